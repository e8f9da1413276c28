"""Gates in the loops of jobs that tests disturb: a job is held before a step until the test has done what it does.

A gate is closed by a file in a folder, which the job is given as --gates. Workers at a gate still give
signs of life.
"""

from __future__ import annotations

import time
from pathlib import Path


def gate(folder: str, step: int) -> None:
    """Stay before this step as long as the test keeps it closed. Without a folder there are no gates."""
    while folder and _file(Path(folder), step).exists():
        time.sleep(0.01)


def close_gates(folder: Path, *steps: int) -> None:
    """Hold a job that is started after this before each of these steps."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        _file(folder, step).touch()


def open_gate(folder: Path, step: int) -> None:
    """Let the job go on."""
    _file(folder, step).unlink()


def _file(folder: Path, step: int) -> Path:
    return folder / f"closed.{step}"
