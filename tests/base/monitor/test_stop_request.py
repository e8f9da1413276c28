"""A job that is asked to end, as schedulers ask before a limit: it saves, and goes on as if nothing had been."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from support import processes
from support.paths import SCRIPTS
from support.scripts.gates import close_gates, open_gate
from support.scripts.launching import SOON, Forked

from torchfleet.base.monitor.stop_request import REQUEUE

SCRIPT = str(SCRIPTS / "asked_to_stop.py")


@pytest.mark.slow
def test_asked_to_end_it_saves_and_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    alone = processes.run([sys.executable, SCRIPT, str(tmp_path / "other")], timeout=200, check=True).stdout
    gates = tmp_path / "gates"
    close_gates(gates, 1)
    with Forked([sys.executable, SCRIPT, str(tmp_path / "model"), "--gates", str(gates)]) as job:
        job.wait_for("training from step 0")
        job.process.send_signal(signal.SIGUSR1)
        open_gate(gates, 1)
        assert job.wait(SOON) == REQUEUE
    again = processes.run([sys.executable, SCRIPT, str(tmp_path / "model")], timeout=200, check=True).stdout
    number = re.search(r"training from step (\d+)", again)
    assert number is not None
    assert 0 < int(number[1]) < 40
    assert _loss(again) == _loss(alone)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["", "model"])
def test_worker_0_saves_where_its_launcher_says_so(tmp_path: Path, folder: str) -> None:
    script = str(SCRIPTS / "tiny.py")
    more = {"FLEET_SAVE_ON_STOP": str(tmp_path / folder)} if folder else {}
    with Forked([sys.executable, script, "--steps", "1000", "--pause", "0.05"], **more) as job:
        job.wait_for("is training")
        job.process.send_signal(signal.SIGUSR1)
        # Without a folder the script does not look for the signal, which then ends the job.
        assert job.wait(SOON) == (REQUEUE if folder else -signal.SIGUSR1)
    assert (tmp_path / "model" / "manifest.json").exists() == bool(folder)


def _loss(text: str) -> str:
    found = re.search(r"loss (\S+)", text)
    assert found is not None, text
    return found[1]
