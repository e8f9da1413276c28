"""Fourteen models of seven other libraries, unchanged: in one process, and on two servers and two workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import jobs, processes
from support.extras import needs
from support.paths import ROOT
from support.scripts.launching import forked_fleetrun
from support.third_party.case import Case, Outcome, Port
from support.third_party.cases import CASES

import torchfleet as fleet

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of seven libraries, about NumPy, pandas and torch
]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "third_party_job.py"
PATIENCE = 400.0  # seconds of a fleet whose processes all import these libraries
SYNC = 1e-5  # of a loss: two halves of a batch are summed in another order than the whole
IMPORTED = {  # what a job's processes are forked with
    "torchfm": ("sklearn.metrics", "torchfm.model.dfm", "torchfm.model.ffm"),
    "torch_rechub": ("sklearn.metrics", "torch_rechub.models.ranking", "torch_rechub.trainers"),
    "deepctr_torch": ("sklearn.metrics",),  # its import starts a thread, which asks for newer versions
    "recbole": (),
    "torch_geometric": ("sklearn.metrics", "torch_geometric.nn"),
    "transformers": ("sklearn.metrics", "transformers"),
    "pytorch_forecasting": ("sklearn.metrics", "lightning"),
}
models = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.library} {case.name}")


@pytest.fixture(autouse=True)
def _one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with jobs.clean_facade():
        yield


_plain: dict[str, Outcome] = {}


def plain(case: Case) -> Outcome:
    """What the library makes of it alone; once for all tests of this process."""
    needs(case.library, *(("recbole",) if case.library in ("torchfm", "torch_rechub", "deepctr_torch") else ()))
    found = _plain.get(case.library + case.name)
    if found is None:
        found = _plain[case.library + case.name] = case.train(Port(None))
    quarter = len(found.losses) // 4
    assert np.mean(found.losses[-quarter:]) < np.mean(found.losses[:quarter]), "the library alone learns nothing"
    return found


def by_fleet(case: Case, mode: str, folder: Path) -> list[Outcome]:
    """What two workers say."""
    command = [str(SCRIPT), f"{case.library} {case.name}", mode, str(folder)]
    roles = ["--server_num", "2", "--worker_num", "2"]
    with (
        processes.preloaded(*IMPORTED[case.library]),
        forked_fleetrun(folder / "log", *roles, *command, FLEET_WORKER_TIMEOUT="100") as started,
    ):
        assert started.wait(PATIENCE) == 0, started.output
    found: list[list[Any]] = [json.loads((folder / f"worker{index}.json").read_text()) for index in range(2)]
    return [Outcome(*one) for one in found]


def test_there_are_fourteen_models_of_seven_libraries() -> None:
    assert len(CASES) == 14
    assert {case.library for case in CASES} == set(IMPORTED)
    assert [case.name for case in CASES if (case.sync_band or case.score_band > 1e-3) and not case.reason] == []


@models
def test_one_process_has_the_losses_of_plain_torch(case: Case) -> None:
    expected = plain(case)
    found = case.train(Port("sync"))
    fleet.stop_worker()
    np.testing.assert_allclose(found.losses, expected.losses, rtol=case.relative, atol=0)
    assert found.score == pytest.approx(expected.score, abs=case.score_band)


@models
@pytest.mark.slow
def test_two_workers_in_sync_mode_have_the_losses_of_plain_torch(case: Case, tmp_path: Path) -> None:
    expected = plain(case)
    found = by_fleet(case, "sync", tmp_path)
    each = [worker.losses for worker in found]
    losses = np.sum(each, axis=0) if case.has_summed_loss else np.mean(each, axis=0)
    if case.sync_band:
        quarter = len(losses) // 4
        ends = [np.mean(of[-quarter:]) for of in (losses, expected.losses)]
        assert ends[0] == pytest.approx(ends[1], rel=case.sync_band), case.reason
    else:
        np.testing.assert_allclose(losses, expected.losses, rtol=max(SYNC, case.relative), atol=0)
    for worker in found:
        assert worker.score == pytest.approx(expected.score, abs=case.score_band), case.reason


@models
@pytest.mark.slow
def test_two_workers_in_hybrid_mode_learn_what_plain_torch_learns(case: Case, tmp_path: Path) -> None:
    expected = plain(case)
    for worker in by_fleet(case, "hybrid", tmp_path):
        quarter = len(worker.losses) // 4
        assert np.mean(worker.losses[-quarter:]) < np.mean(worker.losses[:quarter])
        assert worker.score == pytest.approx(expected.score, abs=case.hybrid_band)
