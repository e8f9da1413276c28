"""The launcher of serving processes, with scripted processes: when it announces the address, when it gives up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import msgspec
import pytest
from support.messages import names

from torchfleet.apps.serve import serving_processes
from torchfleet.apps.serve.serving_processes import ServingProcesses
from torchfleet.apps.serve.settings import FAILED, ServeSettings, WorkerStart

CRASHES = 1  # a status; a process whose script is None becomes ready, and stays
MOST_STARTS = 20  # a launcher that starts more processes than this never gives up


@dataclass
class Scripted:
    """In place of a Popen. `status`: the process ends with it, at once; None: it runs."""

    status: int | None

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout: float | None = None) -> None:
        pass

    terminate = kill = wait


@dataclass
class Launched:
    """Scripts of processes by number, one for each of its starts (the last for all later ones)."""

    scripts: Sequence[Sequence[int | None]]

    def __post_init__(self) -> None:
        self.starts: list[int] = []

    def __call__(self, arguments: list[str], pass_fds: tuple[int, ...], **_: Any) -> Scripted:
        number = msgspec.json.decode(arguments[-1], type=WorkerStart).worker
        script = self.scripts[number]
        status = script[min(self.starts.count(number), len(script) - 1)]
        self.starts.append(number)
        assert len(self.starts) <= MOST_STARTS
        if status is None:
            os.write(pass_fds[-1], b"1")
        return Scripted(status)


def run(monkeypatch: pytest.MonkeyPatch, launched: Launched) -> int:
    monkeypatch.setattr(subprocess, "Popen", launched)
    monkeypatch.setattr(serving_processes, "_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(serving_processes, "_LOOK", 0.0)
    return ServingProcesses(ServeSettings("model", "clicks", port=0, workers=len(launched.scripts))).run()


@pytest.mark.parametrize(("scripts", "num_starts"), [(((CRASHES,), (None,)), 7), (((CRASHES, FAILED), (None,)), 3)])
def test_a_model_that_one_process_cannot_serve_is_given_up(
    scripts: Sequence[Sequence[int | None]],
    num_starts: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also if the other process is ready."""
    launched = Launched(scripts)
    assert run(monkeypatch, launched) == 1
    assert len(launched.starts) == num_starts
    assert not capsys.readouterr().out


def test_the_address_is_announced_when_all_processes_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has crashed before, and is ready at its second start."""
    launched = Launched([(CRASHES, None), (None,)])
    announced: list[tuple[str, list[int]]] = []

    def say(text: str, file: TextIO = sys.stdout) -> None:
        if file is not sys.stderr:
            announced.append((text, list(launched.starts)))
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(serving_processes, "say", say)
    assert run(monkeypatch, launched) == 0
    ((text, starts),) = announced
    assert starts == [0, 1, 0]
    assert names(text, "/v2/models/clicks")
