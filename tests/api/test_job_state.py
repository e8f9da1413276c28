"""fleet.save_state and fleet.load_state: a resumed job is the uninterrupted one, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.messages import naming
from support.paths import SCRIPTS
from support.scripts.launching import forked_fleetrun
from support.scripts.whole_states import EPOCHS, prepared, train

import torchfleet as fleet
from torchfleet.base.errors import CheckpointError, FleetError

SCRIPT = str(SCRIPTS / "whole_states.py")
STOP = 7  # steps: two of the second epoch's five


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    with jobs.clean_facade():
        yield


def begin(dirname: str | None = None, **options: Any) -> tuple[Any, ...]:
    fleet.init()
    return prepared("sync", dirname, **options)


@pytest.mark.parametrize("stop", [5, STOP])
def test_one_process_goes_on_bit_for_bit(stop: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=True)
    straight = train(begin(), stop=stop, save=folder, keep={"scaler": scaler})
    fleet.stop_worker()
    things = begin(folder)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=True)
    extra = fleet.load_state(folder, {"scaler": scaler})
    assert extra == {"epoch": (stop - 1) // 5} == fleet.saved_extra(folder)
    assert scaler.state_dict()["scale"] == 64.0
    assert things[1].param_groups[0]["lr"] == 0.3 * 0.5 ** (stop // 3)
    assert train(things, extra["epoch"]) == straight[stop:]
    fleet.stop_worker()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "hybrid", "servers", None])
def test_two_workers_go_on_bit_for_bit(mode: str | None, tmp_path: Path) -> None:
    """In hybrid mode rows are pushed as in async mode, in an order of chance: there the data go on, batch by batch."""
    counts = ["--server_num", "2", "--worker_num", "2"] if mode else ["--nproc_per_node", "2"]
    script = [SCRIPT, "--folder", str(tmp_path), *(["--mode", mode] if mode else [])]
    for more in (["--stop", "4"], ["--load"]):
        with forked_fleetrun(tmp_path / f"log{len(more)}", *counts, *script, *more) as job:
            assert job.wait() == 0, job.output
    for worker in (0, 1):
        straight = json.loads((tmp_path / f"straight.{worker}").read_text())
        resumed = json.loads((tmp_path / f"resumed.{worker}").read_text())
        assert len(straight) == EPOCHS * 3
        assert len(resumed) == len(straight) - 4
        if mode not in ("hybrid", "servers"):
            assert resumed == straight[4:]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "hybrid", "servers"])
def test_two_workers_save_and_load_as_in_plain_torch(mode: str, tmp_path: Path) -> None:
    options = [SCRIPT, "--folder", str(tmp_path), "--mode", mode, "--dicts"]
    with forked_fleetrun(tmp_path / "log", "--server_num", "2", "--worker_num", "2", *options) as job:
        assert job.wait() == 0, job.output
    for worker in (0, 1):
        assert json.loads((tmp_path / f"wrong.{worker}").read_text()) == []


def test_a_place_that_cannot_be_found_again_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    train(begin(), stop=STOP, save=folder)
    with pytest.raises(FleetError, match=naming("keep['data']", "fleet.prepare")):
        fleet.save_state(folder, {"data": [1, 2]})  # type: ignore[dict-item]
    fleet.stop_worker()
    begin()
    with pytest.raises(FleetError, match=naming("no model", folder)):  # the servers have not loaded it
        fleet.load_state(folder)
    fleet.stop_worker()
    begin(folder)
    with pytest.raises(CheckpointError, match=naming("scaler")):
        fleet.load_state(folder, {"scaler": torch.amp.GradScaler("cpu")})
    fleet.stop_worker()
    _, _, loader, _ = begin(folder, batch_size=30)
    fleet.load_state(folder)
    assert len(list(loader)) == 0  # two batches of the pass were given, and there are two
    fleet.stop_worker()
    _, _, loader, _ = begin(folder, batch_size=40)
    fleet.load_state(folder)
    with pytest.raises(CheckpointError, match=naming("2", "1", "batch size")):
        list(loader)
    fleet.save_persistables(folder)
    with pytest.raises(CheckpointError, match=naming("fleet.save_state", "fleet.save_persistables")):
        fleet.load_state(folder)
    fleet.stop_worker()


def test_another_number_of_workers_is_refused_and_named(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    train(begin(), stop=STOP, save=folder)
    fleet.stop_worker()
    manifest = Path(folder, "manifest.json")
    states = fleet.saved_extra(folder)
    assert states == {"epoch": 1}
    begin(folder)
    from torchfleet.api import job_state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_state, "saved_state", lambda dirname: ["", ""])
        with pytest.raises(CheckpointError, match=naming("2 workers", "1", "fleet.prepare")):
            fleet.load_state(folder)
        patch.setattr(job_state, "saved_state", lambda dirname: ["not a state"])
        with pytest.raises(CheckpointError, match=naming("damaged")):
            fleet.load_state(folder)
    assert manifest.exists()
    fleet.stop_worker()
