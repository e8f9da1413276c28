"""Runs the ranks of a collective job for a benchmark, with a time-out; no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchfleet.launch.server_nursery import TIE_TO_PARENT

ROOT = Path(__file__).parent.parent
_OWN = ("FLEET_", "PADDLE_", "TRAINING_ROLE", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


def run_ranks(
    commands: Sequence[Sequence[str]],
    seconds: float,
    extra: Sequence[Mapping[str, str]] = (),
    address: str = "127.0.0.1",
) -> list[dict[str, Any]]:
    """What each rank printed as `RESULT {...}`. `commands[i]` runs rank i, with one thread. `address`: of rank 0.

    A rank that fails, or all of them taking more than `seconds`, ends the others and the benchmark with their output.
    """
    size, port = len(commands), _free_port()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        outputs = [Path(folder) / f"rank-{rank}" for rank in range(size)]
        processes = []
        for rank, command in enumerate(commands):
            own = {
                **{name: value for name, value in os.environ.items() if not name.startswith(_OWN)},
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                "MASTER_ADDR": address, "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                "FLEET_DEVICE": "cpu",
                **(extra[rank] if extra else {}),
            }  # fmt: skip
            output = stack.enter_context(outputs[rank].open("w"))
            program = shutil.which(command[0]) or command[0]
            process = subprocess.Popen(  # tied: an interrupt may come before it is known here
                [sys.executable, "-c", TIE_TO_PARENT, program, *command[1:]],
                env=own, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            stack.callback(_end, process)
            processes.append(process)
        failed = _wait(processes, seconds)
        texts = [path.read_text(errors="replace") for path in outputs]
        found = [results(text) for text in texts]
        if failed or any(len(of_rank) != 1 for of_rank in found):
            printed = "\n".join(f"rank {rank}:\n{text[-3000:]}" for rank, text in enumerate(texts))
            raise SystemExit(f"{failed or 'a rank gave no result'}: {' '.join(commands[0])}\n{printed}")
        return [of_rank[0] for of_rank in found]


def run_own_ranks(module: str, name: str, num: int, seconds: float = 300) -> list[dict[str, Any]]:
    """The results of `num` ranks that each run this benchmark with the options that it was given, and `--rank NAME`:
    then it calls `hand_over`.
    """
    own = [option for option in sys.argv[1:] if option != "--json"]
    return run_ranks([[sys.executable, "-m", module, *own, "--rank", name]] * num, seconds)


def hand_over(result: Mapping[str, Any]) -> None:
    """In a rank: give its result to `run_ranks`."""
    print("RESULT", json.dumps(result), flush=True)


def results(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.partition("RESULT ")[2]) for line in text.splitlines() if "RESULT " in line]


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> str:
    """Why the job failed, or nothing."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes):
            return f"rank {next(rank for rank, code in enumerate(codes) if code)} failed"
        if all(code == 0 for code in codes):
            return ""
        time.sleep(0.05)
    return f"not done after {seconds:g} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
