"""state_dict, load_state_dict, copies and fleet.to_plain in a whole fleet, against one plain model on both batches."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support.paths import SCRIPTS
from support.scripts.launching import forked_fleetrun
from support.scripts.loading_states import Model, batch


def test_all_workers_go_on_from_the_state_that_they_load(tmp_path: Path) -> None:
    """In hybrid mode, whose network is on the workers; tests/ps/worker/test_model_state.py has the other modes."""
    settings = {"a_sync": True, "a_sync_configs": {"hybrid": True}}
    torch.manual_seed(5)
    plain = Model()
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    fleet = ("--server_num", "2", "--worker_num", "2", str(SCRIPTS / "loading_states.py"))
    arguments = (json.dumps(settings), str(tmp_path / "plain.pt"), str(tmp_path))
    with forked_fleetrun(tmp_path / "log", *fleet, *arguments) as job:
        assert job.wait() == 0, job.output
    states = [torch.load(tmp_path / f"worker-{i}.pt", weights_only=True) for i in range(2)]
    for state in states:
        assert all(torch.equal(state["loaded"][name], value) for name, value in plain.state_dict().items())
        assert torch.equal(state["predicted"], state["copied"])
        torch.testing.assert_close(state["plain"], state["predicted"], rtol=0, atol=1e-6)
        assert all(torch.equal(value, states[0]["trained"][name]) for name, value in state["trained"].items())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    (sum(plain(batch(i)).square().mean() for i in range(2)) / 2).backward()
    optimizer.step()
    # The network learns from the mean; rows learn from each worker's batch by itself.
    torch.testing.assert_close(states[0]["trained"]["tower.weight"], plain.tower.weight, rtol=0, atol=1e-6)
