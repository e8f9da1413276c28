"""Starts the processes of a contender, and reads what they report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from benchmarks.peers.clicks import peak_mb

ROOT = Path(__file__).parents[2]
_SETTINGS = ("rows", "batch", "dim", "largest", "seed", "threads")
_SECONDS = 900  # that a run may take


@dataclass(frozen=True)
class Contender:
    """`module`: of this package. `ranks`: processes that it starts itself, each told its number. `fleet`: what
    `fleetrun` is told, for ours. `has_server`: a server and a worker, after which the server is ended. `site`: a folder
    of its own packages.
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
            run_all([command], contender)
            texts = [path.read_text() for path in sorted((Path(folder) / "latest").glob("*log.*"))]
        else:
            texts = run_all([[sys.executable, *script, *words, *own] for own in _roles(contender)], contender)
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


def run_all(commands: Sequence[list[str]], contender: Contender) -> list[str]:
    """Run these at the same time, until all have ended or one has failed. Returns what each printed."""
    paths = [*filter(None, [contender.site]), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile("w+")) for _ in commands]
        started = [
            subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True, env=environment)
            for command, file in zip(commands, files, strict=True)
        ]
        try:
            codes = _wait(started, int(contender.has_server))
            told = _server_told(started[0]) if contender.has_server and codes[0] is None else ""
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()
        texts = [_text(file) for file in files]
    if told:
        texts[0], codes[0] = f"{texts[0]}\n{told}", 0
    last = [line for text, code in zip(texts, codes, strict=True) if code for line in _last(text)]
    if any(codes):
        raise Unable(f"{contender.module} failed: {'; '.join(last)[:300]}")
    if None in codes:
        raise Unable(f"{contender.module} took more than {_SECONDS} s")
    return texts


def _wait(started: Sequence[subprocess.Popen[str]], num_servers: int) -> list[int | None]:
    """Until all but the servers, which are the first, have ended, one has failed, or the time is over. Returns their
    statuses; None: it still runs.
    """
    end = time.monotonic() + _SECONDS
    while True:
        codes = [process.poll() for process in started]
        if any(codes) or None not in codes[num_servers:] or time.monotonic() > end:
            return codes
        time.sleep(0.1)


def _server_told(server: subprocess.Popen[str]) -> str:
    """The report of a server that does not end by itself, in its place."""
    return f"RESULT {json.dumps({'samples': 0, 'seconds': 0, 'cpu_s': 0, 'peak_mb': peak_mb(str(server.pid))})}"


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _last(text: str) -> list[str]:
    """The line that says what went wrong: the last one of an error, or the last one at all."""
    lines = text.strip().splitlines()
    return [line for line in lines if re.match(r"\s*(\[rank\d+\]: )?\w*Error: ", line)][-1:] or lines[-1:]


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
