"""Workers of a hybrid job that are killed and join again: how long the others stop, and what the model loses. Rows
that count steps show which of these are lost or doubled.

While a worker is away, the others' rounds have fewer samples. So the model is held against two undisturbed runs: one
that trains as many samples, in fewer rounds, and one that makes as many rounds, with more samples. No sample is trained
twice: a worker that joins again goes on with its data where it was. If data were repeated, those of the worker that is
never killed would be repeated most, and the model would learn them by heart.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.progress import Board
from benchmarks.hybrid_runs import ROOT, WORKER, results
from benchmarks.timing import log

WAIT = 120.0  # seconds until a worker must be at work
PAUSE = 0.1  # seconds of a step beside computing, so that many kills fit into few epochs


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("kills").add_argument
    add("--kills", type=int, default=20)
    add("--at_once", type=int, default=2, help="workers that are killed at the same time")
    add("--kill_workers", type=int, default=5)
    add("--lease", type=float, default=3.0, help="FLEET_WORKER_TIMEOUT")


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """A run with kills, and two without: of as many samples, and of as many rounds."""
    with tempfile.TemporaryDirectory() as folder:
        killed = Killed(chosen, Path(folder) / "killed").run(chosen.kills)
        log(f"  with kills: {killed}")
        rounds = int(killed["steps"])
        same = {"samples": round(killed["samples"] / chosen.batch / chosen.kill_workers), "rounds": rounds}
        undisturbed = {}
        for what, num in same.items():
            undisturbed[what] = Killed(chosen, Path(folder) / what, num).run(0)
            log(f"  without, the same {what}: {undisturbed[what]}")
    of_samples, of_rounds = undisturbed["samples"], undisturbed["rounds"]
    return {
        "kills": chosen.kills, "joins": killed["joins"], "lease": chosen.lease,
        "longest_pause": killed["longest"], "longest_pause_undisturbed": of_rounds["longest"],
        "restarts": killed["restarts"], "lost": killed["lost"], "doubled": killed["doubled"],
        "rounds": rounds, "samples": killed["samples"], "auc": killed["auc"],
        "same_samples": {name: of_samples[name] for name in ("steps", "samples", "auc")},
        "same_rounds": {name: of_rounds[name] for name in ("steps", "samples", "auc")},
    }  # fmt: skip


class Killed:
    """One job. Worker 0 is never killed; it ends the job after `steps`, or when all kills are done."""

    def __init__(self, chosen: argparse.Namespace, folder: Path, steps: int = 1 << 30) -> None:
        self._chosen, self._folder, self._steps = chosen, folder, steps
        self._done, board = folder / "done", folder / "board"
        board.mkdir(parents=True)
        Board(board, end=0)

    def run(self, num_kills: int) -> dict[str, Any]:
        """What worker 0 printed, `samples`: of all workers, `joins`: how often a killed worker was at work again,
        `restarts`: of all workers."""
        chosen = self._chosen
        roles = ["--server_num", str(chosen.servers), "--worker_num", str(chosen.kill_workers)]
        loss = ["--on_worker_loss", "go_on", "--max_restart", str(num_kills + 1)]
        flags = ["--way", "servers", "--batch", str(chosen.batch), "--steps", str(self._steps)]
        flags += ["--until", str(self._done), "--pause", str(PAUSE)]
        command = [sys.executable, "-m", "torchfleet.launch", *roles, *loss, "--log_dir", str(self._folder / "log")]
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FLEET_WORKER_TIMEOUT": str(chosen.lease)}
        with (self._folder / "output").open("w") as output:
            job = subprocess.Popen(
                [*command, str(WORKER), *flags], stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **own}
            )
            try:
                joins = self._kill(num_kills)
                if num_kills:
                    self._done.touch()
                job.wait(900)
            finally:
                job.kill()
                job.wait()
        found, told = (
            [each for each in results(self._log(0)) if each["worker"] == 0],
            (self._folder / "output").read_text(),
        )
        if job.returncode or len(found) != 1:
            logs = "\n".join(self._log(worker)[-1500:] for worker in range(chosen.kill_workers))
            raise SystemExit(f"the job failed:\n{told[-3000:]}\n{logs}")
        samples = chosen.batch * sum(Board(self._folder / "board").num_steps())
        return {**found[0], "samples": samples, "joins": joins, "restarts": told.count("starting all workers again")}

    def _kill(self, num_kills: int) -> int:
        others = range(1, self._chosen.kill_workers)
        for worker in range(self._chosen.kill_workers):
            self._wait_for_steps(worker, 1)
        starts = dict.fromkeys(others, 1)
        for kill in range(0, num_kills, self._chosen.at_once):
            num = min(self._chosen.at_once, num_kills - kill)
            victims = {others[(kill + i) % len(others)] for i in range(num)}
            for worker in victims:
                os.kill(int(re.findall(r"^PID (\d+)", self._log(worker), re.MULTILINE)[-1]), signal.SIGKILL)
                starts[worker] += 1
            for worker in victims:
                self._wait_for_steps(worker, starts[worker])
        return sum(starts.values()) - len(starts)

    def _wait_for_steps(self, worker: int, num_starts: int) -> None:
        """Until the worker's process number `num_starts` has made some steps."""
        deadline = time.monotonic() + WAIT
        while True:
            starts = self._log(worker).split("PID ")[1:]
            if len(starts) >= num_starts and "AT WORK" in starts[-1]:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"worker {worker} is not at work:\n{self._log(worker)[-2000:]}")
            time.sleep(0.05)

    def _log(self, worker: int) -> str:
        path = self._folder / "log" / "latest" / f"workerlog.{worker}"
        return path.read_text() if path.exists() else ""
