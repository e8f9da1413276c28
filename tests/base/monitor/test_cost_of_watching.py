"""What a step and a request pay for being watched, in calls of functions: on a busy machine as on an idle one.

What is done twice a second, such as a status, is put off here: the cost of a step must not grow with what it tells.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extras import needing
from support.fleets import Talk

import torchfleet as fleet
from torchfleet.api import current_job
from torchfleet.base.monitor import status
from torchfleet.base.tracing import profile_folder
from torchfleet.launch.roles import free_ports
from torchfleet.ps.net import transport
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state import counters
from torchfleet.ps.tables.settings.spec import TableSpec

_TIMES = 41
_FOREVER = 1e9  # seconds


def num_calls(work: Callable[[], object]) -> float:
    """Functions that `work` calls in this thread, those in C among them: the median of many times, as servers do
    something else now and then."""
    found = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    counts = []
    for _ in range(_TIMES):
        found = 0
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
        counts.append(found)
    return statistics.median(counts)


def calls_of_training(monkeypatch: pytest.MonkeyPatch) -> float:
    """Of a step of a job in this process, with a loss that is reported at every one."""
    monkeypatch.setattr(current_job.current, "job", None)
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    batch = torch.ones(4, 2)

    def train() -> None:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fleet.report(loss=1.0)

    found = num_calls(train)
    fleet.stop_worker()
    return found


@needing("prometheus_client")
def test_a_watched_step_calls_few_functions_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "FLEET_STATUS_FILE", "FLEET_METRICS_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(status, "_PERIOD", _FOREVER)
    monkeypatch.setattr(profile_folder, "LOOK", _FOREVER)
    monkeypatch.setattr(transport, "TICK", _FOREVER)  # a slow machine has a tick in most steps
    before = calls_of_training(monkeypatch)
    monkeypatch.setenv("FLEET_STATUS_FILE", str(tmp_path / "status"))
    monkeypatch.setenv("FLEET_METRICS_PORT", str(free_ports(1)[0]))
    watched = calls_of_training(monkeypatch)
    assert before > 20, "nothing was counted"
    assert (tmp_path / "status").exists(), "nobody watched"
    assert 0 < watched - before <= 14


def test_a_status_that_is_not_due_costs_a_look_at_a_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server asks for it after every request."""
    monkeypatch.setattr(status, "_PERIOD", _FOREVER)
    file = status.StatusFile(str(tmp_path / "status"), dict[str, Any])
    file.write(now=True)

    assert num_calls(file.write) <= 3


def test_a_pull_whose_keys_are_not_sampled_costs_a_look_at_a_clock(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_PAUSE", _FOREVER)
    talk, spec = Talk(server), TableSpec("rows", dim=4)
    talk.create(spec)
    keys = np.arange(1000, dtype=np.uint64)

    def pull() -> None:
        talk.pull(spec, keys)

    before = num_calls(pull)
    server.state.counters.hot_keys.is_on = True
    watched = num_calls(pull)
    assert server.state.counters.hot_keys._counts["rows"], "nobody watched"
    assert 0 < watched - before <= 14
