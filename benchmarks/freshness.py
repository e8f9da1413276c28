"""How soon a click that was trained on changes the predictions of a process that follows, and what that costs training.

python -m benchmarks.freshness --json            about two minutes
python -m benchmarks.freshness --quick --json    seconds, to see that it works

A job of one server and one worker trains without a pause. Now and then a sample has an id that was never there. The
time counts from the end of the training step to the first version in which this id changes the prediction: pushed by
the server, and by files with a delta every second.

What a follower costs training is measured in turns with one and without, by the clock and in processor time of server
and worker per step: first with the follower on cores of its own (training_ratio, training_wall_ratio), as it is on
another machine; then with all on the same cores (shared_ratio, shared_wall_ratio), where the follower also takes time
and cache that training would have used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.freshness_worker import DIM, NUM_SLOTS
from benchmarks.timing import log, report
from benchmarks.watching_jobs import processor_seconds
from torchfleet.apps.serve.model_version import ModelVersion
from torchfleet.apps.serve.versions.mapped_model import MappedModel, open_mapped

_WORKER = Path(__file__).with_name("freshness_worker.py")
_START = 240.0  # seconds that the job may take until it trains, with kernels to compile
_TABLE = "embedding"
_LATEST = 60.0  # seconds that a click may take
_FIRST = 10  # clicks that are not counted: the follower loads its kernels


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.freshness", description=__doc__)
    parser.add_argument("--clicks", type=int, default=100, help="clicks to wait for, each way")
    parser.add_argument("--rounds", type=int, default=6, help="turns with a follower and without")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--num_ids", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.clicks, chosen.rounds, chosen.seconds, chosen.num_ids = 8, 1, 1.0, 20_000
    return chosen


@dataclass(frozen=True)
class Look:
    """A job at one moment: sums since its start."""

    time: float
    steps: float
    server_s: float  # processor time
    worker_s: float


class Job:
    """A job that trains in processes of its own."""

    def __init__(self, folder: Path, num_ids: int) -> None:
        self.folder, self.model_dir = folder, str(folder / "model")
        roles = ["--server_num", "1", "--worker_num", "1", "--log_dir", str(folder / "log")]
        script = [str(_WORKER), "--folder", str(folder), "--num_ids", str(num_ids)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torchfleet.launch", *roles, *script], stdout=subprocess.DEVNULL
        )
        self._wait((folder / "ready").exists, _START)
        ready = json.loads((folder / "ready").read_text())
        self.servers = str(ready["servers"]).split(",")
        self._pids = [int(ready["pid"]), int((folder / "server_pid").read_text())]
        self._board = np.memmap(folder / "board", np.float64, "r", shape=(1,))

    def look(self) -> Look:
        worker, server = map(processor_seconds, self._pids)
        return Look(time.perf_counter(), float(self._board[0]), server, worker)

    def run_on(self, cores: set[int]) -> None:
        """Let server and worker use these cores alone."""
        for pid in self._pids:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), cores)

    def clicks(self) -> dict[int, float]:
        """When each click had been trained on."""
        lines = (self.folder / "clicks").read_text().splitlines()
        return {int(line.split()[0]): float(line.split()[1]) for line in lines if len(line.split()) == 2}

    def end(self) -> None:
        (self.folder / "stop").touch()
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(60.0)

    def _wait(self, is_so: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if self._process.poll() is not None or time.monotonic() > deadline:
                logs = [path.read_text()[-1500:] for path in self.folder.glob("log/**/*log*") if path.is_file()]
                raise SystemExit("the job does not train:\n" + "\n".join(logs))
            time.sleep(0.05)


def prediction(version: ModelVersion, item: int) -> float:
    """Of a sample with this id alone; other slots have none."""
    row = torch.from_numpy(version.rows(_TABLE, np.array([item])))
    block = torch.zeros(NUM_SLOTS, DIM)
    block[0] = row[0]
    values, out = version.parameters(), block.reshape(1, -1)
    for layer in ("deep.0", "deep.2"):
        out = torch.relu(out @ values[f"{layer}.weight"].T + values[f"{layer}.bias"])
    return float(out @ values["deep.4.weight"].T + values["deep.4.bias"])


def is_changed(version: ModelVersion, item: int) -> bool:
    """Whether the prediction for this id differs from that for an id without a row."""
    return prediction(version, item) != prediction(version, -1)


def delays(job: Job, model: MappedModel, num: int) -> list[float]:
    """Seconds from the training step to a changed prediction, for `num` clicks, once the follower has warmed up."""
    _delays(job, model, _FIRST)
    return _delays(job, model, num)


def _delays(job: Job, model: MappedModel, num: int) -> list[float]:
    before, found = set(job.clicks()), dict[int, float]()
    while len(found) < num:
        version, now = model.current(), time.time()
        for item, trained in job.clicks().items():
            if item in before or item in found:
                continue
            if is_changed(version, item):
                found[item] = max(0.0, now - trained)
            elif now - trained > _LATEST:
                raise SystemExit(f"a click changed nothing for {_LATEST:g} s; the follower says {model.status()}")
        time.sleep(0.01)
    return list(found.values())


@contextlib.contextmanager
def follower(job: Job, pushed: bool) -> Iterator[MappedModel]:
    model = open_mapped(job.model_dir, True, servers=job.servers if pushed else ())
    deadline = time.monotonic() + _START
    while pushed and model.status().source != "the servers":
        if time.monotonic() > deadline:
            raise SystemExit(f"the follower does not follow: {model.status()}")
        time.sleep(0.02)
    try:
        yield model
    finally:
        model.close()


@dataclass(frozen=True)
class Speed:
    """Of a turn."""

    steps_per_s: float
    server_ms: float  # processor time of a step
    worker_ms: float


def speed(job: Job, seconds: float) -> Speed:
    start = job.look()
    time.sleep(seconds)
    end = job.look()
    num = max(1.0, end.steps - start.steps)
    server, worker = end.server_s - start.server_s, end.worker_s - start.worker_s
    return Speed(num / (end.time - start.time), 1000 * server / num, 1000 * worker / num)


def median(turns: Sequence[Speed]) -> Speed:
    fields = zip(*((turn.steps_per_s, turn.server_ms, turn.worker_ms) for turn in turns), strict=True)
    return Speed(*map(statistics.median, fields))


def in_turns(job: Job, rounds: int, seconds: float) -> tuple[Speed, Speed]:
    """Training alone, and with a follower."""
    alone: list[Speed] = []
    beside: list[Speed] = []
    for turn in range(rounds):
        alone.append(speed(job, seconds))
        with follower(job, True):
            beside.append(speed(job, seconds))
        log(f"  turn {turn + 1}/{rounds}: {alone[-1]} alone, {beside[-1]} with a follower")
    return median(alone), median(beside)


def ratios(alone: Speed, beside: Speed) -> tuple[float, float]:
    """Speed with a follower, of the speed without: by processor time, and by the clock."""
    used = (alone.server_ms + alone.worker_ms) / (beside.server_ms + beside.worker_ms)
    return used, beside.steps_per_s / alone.steps_per_s


def cost_apart(job: Job, rounds: int, seconds: float) -> dict[str, float]:
    """The job has one half of the cores, the follower and this process the other. Empty on a single core."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if not half:
        return {}
    try:
        job.run_on(set(cores[:half]))
        os.sched_setaffinity(0, cores[half:])
        alone, beside = in_turns(job, rounds, seconds)
    finally:
        os.sched_setaffinity(0, cores)
        job.run_on(set(cores))
    by_processor, by_clock = ratios(alone, beside)
    return {
        "training_ratio": by_processor,
        "training_wall_ratio": by_clock,
        "server_ms_per_step": alone.server_ms,
        "server_ms_followed": beside.server_ms,
        "worker_ms_per_step": alone.worker_ms,
        "worker_ms_followed": beside.worker_ms,
    }


def cost_shared(job: Job, rounds: int, seconds: float) -> dict[str, float]:
    """All processes on all cores."""
    alone, beside = in_turns(job, rounds, seconds)
    by_processor, by_clock = ratios(alone, beside)
    return {"steps_per_s": alone.steps_per_s, "shared_ratio": by_processor, "shared_wall_ratio": by_clock}


def summary(name: str, found: list[float]) -> dict[str, float]:
    return {
        f"fresh_{name}_p50_s": statistics.median(found),
        f"fresh_{name}_p99_s": float(np.quantile(found, 0.99)),
    }


def run(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    job = Job(folder, chosen.num_ids)
    try:
        with follower(job, True) as model:
            pushed = delays(job, model, chosen.clicks)
        log(f"pushed: {statistics.median(pushed):.2f} s")
        costs = {**cost_apart(job, chosen.rounds, chosen.seconds), **cost_shared(job, chosen.rounds, chosen.seconds)}
        (folder / "saves").touch()
        with follower(job, False) as model:
            by_files = delays(job, model, chosen.clicks)
        log(f"by files: {statistics.median(by_files):.2f} s")
    finally:
        job.end()
    return {**summary("push", pushed), **summary("file", by_files), **costs, "clicks": chosen.clicks}


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report(run(chosen, Path(folder)), chosen.json)


if __name__ == "__main__":
    main()
