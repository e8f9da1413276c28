"""Starts the processes of a contender, and reads what they report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
_SETTINGS = ("rows", "batch", "dim", "largest", "seed", "threads")
_SECONDS = 900  # that a run may take


@dataclass(frozen=True)
class Contender:
    """`module`: of this package. `ranks`: processes that it starts itself, each told its number; `roles`: the processes
    of `fleetrun` for ours, or "server, worker" for a rival with a server. `site`: a folder of its own packages.
    """

    module: str
    words: tuple[str, ...] = ()
    ranks: int = 1
    fleet: tuple[str, ...] = ()
    has_server: bool = False
    site: str = ""


class Unable(Exception):
    """A contender cannot run here, and why."""


def run(contender: Contender, chosen: argparse.Namespace) -> list[dict[str, float]]:
    """What each process of one run reported. Raises Unable with the last lines of what failed."""
    words = [*contender.words, *(word for name in _SETTINGS for word in (f"--{name}", str(getattr(chosen, name))))]
    script = ["-m", f"benchmarks.peers.{contender.module}"]
    with TemporaryDirectory() as folder:
        if contender.fleet:
            file = str(ROOT / "benchmarks" / "peers" / f"{contender.module}.py")
            command = [sys.executable, "-m", "torchfleet.launch", *contender.fleet, "--log_dir", folder, file, *words]
            _run_all([command], contender)
            texts = [path.read_text() for path in sorted((Path(folder) / "latest").glob("*log.*"))]
        else:
            texts = _run_all([[sys.executable, *script, *words, *own] for own in _roles(contender)], contender)
    found = [
        json.loads(line.partition("RESULT ")[2]) for text in texts for line in text.splitlines() if "RESULT " in line
    ]
    if not found:
        raise Unable(f"{contender.module} reported nothing")
    return found


def _roles(contender: Contender) -> Iterator[list[str]]:
    port = free_port()
    if contender.has_server:
        yield from (["--port", str(port), "--role", role] for role in ("server", "worker"))
        return
    for index in range(contender.ranks):
        yield ["--port", str(port), "--index", str(index), "--number", str(contender.ranks)]


def _run_all(commands: Sequence[list[str]], contender: Contender) -> list[str]:
    """Run these at the same time. Returns what each printed."""
    paths = [*filter(None, [contender.site]), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for command in commands
    ]
    try:
        texts = [process.communicate(timeout=_SECONDS)[0] for process in reversed(started)][::-1]
    except subprocess.TimeoutExpired:
        raise Unable(f"{contender.module} took more than {_SECONDS} s") from None
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    if any(process.returncode for process in started):
        last = [line for text in texts for line in text.strip().splitlines()[-1:]]
        raise Unable(f"{contender.module} failed: {'; '.join(last)[:300]}")
    return texts


def free_port() -> int:
    """Of this machine; the one behind it is probably free, too."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def summary(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of a run: speed and processor time per sample of all workers, memory of all processes, and quality."""
    samples = sum(one["samples"] for one in found)
    made: dict[str, Any] = {
        "samples_per_s": samples / max(one["seconds"] for one in found),
        "cpu_us": 1e6 * sum(one["cpu_s"] for one in found) / samples,
        "peak_mb": sum(one["peak_mb"] for one in found),
        "auc": next((one["auc"] for one in found if "auc" in one), float("nan")),
    }
    return made
