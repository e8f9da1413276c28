"""A process in reserve: what it runs sees the arguments, the environment and the folder that `python` would give it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from torchfleet.launch.ranks.standby import Standby

SCRIPT = """
import json, os, sys
print(json.dumps([__name__, sys.argv, sys.path[0], os.environ.get("RANK"), os.environ.get("GONE"), sys.stdin.read()]))
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_module", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_standby_runs_what_python_would(is_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(SCRIPT)
    command = [sys.executable, *(["-m", "job"] if is_module else [str(tmp_path / "job.py")]), "--flag", "a b"]
    environment = {**os.environ, "RANK": "3", "FLEET_LOG_FILE": str(tmp_path / "log")}
    expected = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    (tmp_path / "log").write_text("before\n")
    standby = Standby({"GONE": "only of the process in reserve", "PYTHONPATH": str(ROOT)})
    standby.prepare()
    process = standby.take(command, environment)
    assert process is not None
    assert process.wait(120) == expected.returncode == 7
    assert (tmp_path / "log").read_text() == "before\n" + expected.stdout
    assert json.loads(expected.stdout)[3:] == ["3", None, ""]


def test_a_standby_that_is_not_there_is_not_taken() -> None:
    assert Standby({}).take([sys.executable, "job.py"], {}) is None


@pytest.mark.slow
def test_a_standby_ends_with_its_launcher() -> None:
    standby = Standby({})
    standby.prepare()
    process = standby._process
    assert process is not None
    standby.close()
    assert process.poll() is not None
