"""examples/trainers: each runs alone and learns what it is shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support import processes
from support.extras import needing
from support.paths import ROOT
from support.scripts.launching import clean_environment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "least"),
    [
        pytest.param("with_lightning.py", [], 70.0, marks=needing("lightning")),
        pytest.param(
            "with_transformers.py", ["--epochs", "3", "--merge", "2"], 80.0, marks=needing("transformers", "accelerate")
        ),
    ],
)
@pytest.mark.long
def test_an_example_of_a_trainer_learns(script: str, options: list[str], least: float, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "examples" / "trainers" / script),
        "--folder",
        str(tmp_path / "run"),
        *options,
    ]
    ended = processes.run(command, timeout=200, cwd=tmp_path, env=clean_environment(PYTHONPATH=str(ROOT)))
    assert ended.returncode == 0, ended.stdout
    found = re.search(r"([0-9.]+)% of new \w+ are told apart", ended.stdout)
    assert found, ended.stdout
    assert float(found[1]) > least
