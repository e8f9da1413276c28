"""examples/deepctr: a model of another library, trained by a fleet, tells clicks as well as without."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
from support import jobs, processes
from support.extras import needing
from support.paths import ROOT
from support.scripts.launching import forked_fleetrun

pytestmark = [
    needing("deepctr_torch", "sklearn"),
    pytest.mark.xdist_group("deepctr"),  # imported once, which takes seconds
]

SCRIPT = ROOT / "examples" / "deepctr" / "train.py"
ROWS = ["--rows", "4000", "--batch_size", "64"]

PATIENCE = 200.0  # seconds of a fleet whose processes all import deepctr_torch


def auc(output: str) -> float:
    found = re.search(r"AUC ([0-9.]+) on 1,000 held-out rows", output)
    assert found, output
    return float(found[1])


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What the script prints, run in this process."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "data", raising=False)
    with contextlib.redirect_stdout(out), jobs.clean_facade():
        runpy.run_path(str(SCRIPT), run_name="__main__")
    sys.modules.pop("data", None)
    return out.getvalue()


def test_one_process_in_sync_mode_is_as_good_as_plain_torch_to_the_last_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = auc(run(monkeypatch, "--plain", *ROWS))
    assert plain > 0.75
    assert auc(run(monkeypatch, "--mode", "sync", *ROWS)) == pytest.approx(plain, abs=1e-4)


@pytest.mark.long
@pytest.mark.slow
def test_a_server_and_two_workers_tell_clicks(tmp_path: Path) -> None:
    roles = ["--server_num", "1", "--worker_num", "2"]
    heavy = processes.preloaded("sklearn.metrics")  # not deepctr_torch itself: its import starts a thread
    with heavy, forked_fleetrun(tmp_path / "log", *roles, str(SCRIPT), *ROWS, FLEET_WORKER_TIMEOUT="60") as job:
        assert job.wait(PATIENCE) == 0, job.output
    # Untrained: 0.5. Workers at their own pace: five runs on overloaded cores gave 0.78 to 0.786, a deviation of 0.003.
    # The bound is 40 of these away, which is no matter of chance.
    assert auc(job.output) > 0.65
