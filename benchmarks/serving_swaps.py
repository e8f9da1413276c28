"""Versions that are swapped under load: every answer over HTTP must be that of one version, whole.

python -m benchmarks.serving_swaps --json                1,000 swaps, about five minutes
python -m benchmarks.serving_swaps --swaps 50 --json

A job in this process trains and saves a delta, or every hundredth time a full save. `fleet serve --follow files` with
two processes takes each save over, and threads ask it without a pause. The trainer's own model says what each save must
answer. A serving process is killed half-way: connections to it break and are made anew, which is not a failed answer.
With --shards the rows of the first save are on two read-only servers, and all later saves are deltas.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

import torchfleet as fleet
from benchmarks.serving import PATH, free_port, running
from benchmarks.timing import log, report

NUM_IDS, NUM_SAMPLES, RATE = 1000, 8, 0.25  # every answer differs by this rate or more from one save to the next
FULL_EVERY = 100  # saves
LONGEST = 30.0  # seconds until a save is served
NEAR = 1e-3


class Sums(torch.nn.Module):
    """The sum of a sample's two rows, and a bias: rows and network change with every step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(1, name="rows")
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.rows(ids).sum(dim=(1, 2)) + self.bias
        return made


class Trainer:
    """Trains in this process. `answers[i]`: what save i must answer for the sample (2k, 2k + 1), for every k."""

    def __init__(self, folder: str, num_saves: int, full_every: int) -> None:
        self._folder, self.num_saves, self._full_every = folder, 0, full_every
        self._ids = torch.arange(NUM_IDS).reshape(-1, 2)
        self.answers = np.full((num_saves, len(self._ids)), np.inf, np.float32)
        fleet.init()
        self._model = fleet.distributed_model(Sums())
        self._optimizer = fleet.distributed_optimizer(torch.optim.SGD(self._model.parameters(), lr=RATE))
        fleet.init_worker()

    def save(self) -> None:
        self._model(self._ids).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            self.answers[self.num_saves] = self._model(self._ids).numpy()
        fleet.save_persistables(self._folder, mode=0 if self.num_saves % self._full_every == 0 else 1)
        self.num_saves += 1


class Checker:
    """Asks in threads, and holds every answer against those of all saves."""

    def __init__(self, port: int, trainer: Trainer, num_threads: int) -> None:
        self._port, self._trainer, self._over, self._lock = port, trainer, threading.Event(), threading.Lock()
        self.saves: dict[str, int] = {}  # by version that was served
        self.times: list[float] = []
        self.wrong: list[str] = []
        self.num_failed = self.num_broken = 0
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        rng, connection = np.random.default_rng(seed), http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._over.is_set():
            chosen = rng.integers(0, NUM_IDS // 2, NUM_SAMPLES)
            ids = np.stack([2 * chosen, 2 * chosen + 1], axis=1)
            given = {"name": "ids", "datatype": "INT64", "shape": list(ids.shape), "data": ids.reshape(-1).tolist()}
            began = time.perf_counter()
            try:
                connection.request("POST", PATH, json.dumps({"inputs": [given]}))
                response = connection.getresponse()
                status, body = response.status, response.read()
            except (ConnectionError, http.client.HTTPException):  # of the process that was killed
                connection.close()
                self.num_broken += 1
                continue
            self._note(status, body, chosen, time.perf_counter() - began)
        connection.close()

    def _note(self, status: int, body: bytes, chosen: npt.NDArray[np.int64], seconds: float) -> None:
        with self._lock:
            if status != 200:
                self.num_failed += 1
                return
            found = json.loads(body)
            answer = np.array(found["outputs"][0]["data"], np.float32)
            expected = self._trainer.answers[: self._trainer.num_saves + 1, chosen]
            same = np.flatnonzero(np.abs(expected - answer).max(axis=1) < NEAR)
            version = found["model_version"]
            if len(same) != 1 or self.saves.setdefault(version, int(same[0])) != same[0]:
                self.wrong.append(f"version {version}: {answer.tolist()} is that of the saves {same.tolist()}")
            self.times.append(seconds)


@contextmanager
def checking(port: int, trainer: Trainer, num_threads: int) -> Iterator[Checker]:
    checker = Checker(port, trainer, num_threads)
    try:
        yield checker
    finally:
        checker.close()


def swap(trainer: Trainer, checker: Checker) -> None:
    """Save, and wait until an answer is that of this save."""
    trainer.save()
    end = time.monotonic() + LONGEST
    while trainer.num_saves - 1 not in list(checker.saves.values()):
        if time.monotonic() > end or checker.wrong:
            raise SystemExit(f"save {trainer.num_saves} was not served; wrong answers: {checker.wrong[:3]}")
        time.sleep(0.005)


@contextmanager
def shards(model: str, num: int) -> Iterator[list[str]]:
    """Options of `fleet serve` for this many read-only servers of a model; none for 0."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(num)]
    command = [sys.executable, "-m", "torchfleet.server", "--read_only", model]
    started = [
        subprocess.Popen([*command, "--shard", f"{i}/{num}", "--endpoint", f"tcp://{address}"])
        for i, address in enumerate(addresses)
    ]
    try:
        for address in addresses:
            wait_for(address)
        yield ["--shards", ",".join(addresses)] if num else []
    finally:
        for process in started:
            process.terminate()
            process.wait(30)


def wait_for(address: str) -> None:
    """Until a server listens."""
    host, _, port = address.partition(":")
    end = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
            return
        if time.monotonic() > end:
            raise SystemExit(f"the server at {address} does not listen")
        time.sleep(0.1)


def run(folder: Path, num_swaps: int, num_threads: int, most_seconds: float, num_shards: int) -> dict[str, Any]:
    model, port = str(folder / "model"), free_port()
    trainer = Trainer(model, num_swaps + 1, num_swaps + 1 if num_shards else FULL_EVERY)
    trainer.save()
    flags = ["--follow", "files", "--workers", "2", "--port", str(port)]
    with (
        shards(model, num_shards) as more,
        running(["torchfleet.observe.commands", "serve", model, *flags, *more], port) as process,
    ):
        serving = psutil.Process(process.pid)
        with checking(port, trainer, num_threads) as checker:
            began = time.monotonic()
            for i in range(num_swaps):
                if time.monotonic() - began > most_seconds:
                    break
                swap(trainer, checker)
                if i == num_swaps // 2:
                    os.kill(serving.children()[0].pid, signal.SIGKILL)
                if (i + 1) % 100 == 0:
                    log(f"  {i + 1} swaps, {len(checker.times):,} answers, {time.monotonic() - began:.0f} s")
    fleet.stop_worker()
    return {
        "swaps": len(checker.saves) - 1,
        "answers": len(checker.times),
        "wrong": len(checker.wrong),
        "failed": checker.num_failed,
        "broken_connections": checker.num_broken,
        "p99_ms": 1000 * float(np.percentile(checker.times, 99)),
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no further swap begins")
    parser.add_argument("--shards", action="store_true", help="rows on two read-only servers")
    parser.add_argument("--threads", type=int, default=2, help="that ask")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), chosen.swaps, chosen.threads, chosen.seconds, 2 * chosen.shards)
    report(result, chosen.json)
    raise SystemExit(1 if result["wrong"] or result["failed"] else 0)


if __name__ == "__main__":
    main()
