"""Ctrl-C in the first second of a command line, while it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cases import each_of
from support.paths import ROOT
from support.scripts.launching import clean_environment

_INTERRUPTS = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


@pytest.mark.slow
@each_of("module", ["torchfleet.launch", "torchfleet.observe.commands"])
def test_ctrl_c_during_the_imports_ends_the_command_without_a_word(tmp_path: Path, module: str) -> None:
    (tmp_path / "argparse.py").write_text(_INTERRUPTS)  # stands in front of Python's own
    environment = clean_environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
