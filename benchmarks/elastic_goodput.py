"""Goodput with kills: how much of an undisturbed training's progress is left when a rank is killed every minute.

Three jobs of the same ranks: undisturbed; killed ranks replaced alone, from copies in memory (fleet.elastic); all ranks
started again from the last save on disk. A kill costs the time until a step is made that was not made before it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.timing import log

ROOT = Path(__file__).resolve().parents[1]
MINUTE = 60.0
WAIT = 300.0  # seconds until a job must make steps
WAYS = ("undisturbed", "memory", "save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--width", type=int, default=256, help="of the network's layers")
    parser.add_argument("--every", type=int, default=20, help="steps between two copies or saves")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="of all three jobs, one after another")
    parser.add_argument("--between", type=float, default=10.0, help="seconds of training between two kills")
    parser.add_argument("--quick", action="store_true", help="a small run, for tests")
    parser.add_argument("--worker", metavar="WAY", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.kills, options.between, options.width = 1, 1.0, 32
    if options.worker:
        work(options)
        return
    found = measure(options)
    print(json.dumps(found) if options.json else "\n".join(f"{key}: {value}" for key, value in found.items()))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                runs[way].append(Run(options, way, Path(folder)))
                log(f"  round {number}, {way}: {runs[way][-1]}")
    rate = statistics.median(run.rate for run in runs["undisturbed"])
    made: dict[str, Any] = {"ranks": options.ranks, "stage": options.stage, "steps_per_s": round(rate, 1)}
    copying = statistics.median(run.rate for run in runs["memory"])
    made["pace_with_copies"] = round(copying / rate, 3)
    for way in WAYS[1:]:
        lost = [seconds for run in runs[way] for seconds in run.lost]
        made[f"lost_per_kill_s_{way}"] = round(statistics.median(lost), 2)
        made[f"longest_lost_s_{way}"] = round(max(lost), 2)
        made[f"goodput_kill_a_minute_{way}"] = round(max(0.0, 1 - statistics.median(lost) / MINUTE), 3)
    return made


class Run:
    """One job: its pace between kills, and the seconds that each kill has cost."""

    def __init__(self, options: argparse.Namespace, way: str, folder: Path) -> None:
        self._folder, self._pick = folder, random.Random(0)
        self.lost: list[float] = []
        launch = ["--nproc_per_node", str(options.ranks), "--max_restart", "1000", "--log_dir", str(folder / "log")]
        flags = ["--worker", way, "--folder", str(folder), "--stage", str(options.stage)]
        flags += ["--width", str(options.width), "--every", str(options.every)]
        command = [sys.executable, "-m", "torchfleet.launch", *launch, __file__, *flags]
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        with open(folder / "output", "w") as output:
            job = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}
            )
            try:
                self.rate = self._train(options, 0 if way == "undisturbed" else options.kills)
            except TimeoutError:
                raise SystemExit((folder / "output").read_text()[-4000:]) from None
            finally:
                job.send_signal(signal.SIGTERM)
                job.wait(60)

    def __repr__(self) -> str:
        return f"{self.rate:.1f} steps/s, lost per kill {[round(seconds, 2) for seconds in self.lost]}"

    def _train(self, options: argparse.Namespace, num_kills: int) -> float:
        rates = []
        self._wait_beyond(0)
        for i in range(num_kills + 1):
            begin, start = self._step(), time.monotonic()
            time.sleep(options.between)
            rates.append((self._step() - begin) / (time.monotonic() - start))
            if i < num_kills:
                rank = self._pick.randrange(options.ranks)
                before, killed = self._step(), time.monotonic()
                os.kill(int((self._folder / f"pid.{rank}").read_text()), signal.SIGKILL)
                self._wait_beyond(before + 1)  # a step that was under way may still be noted
                self.lost.append(time.monotonic() - killed)
        return statistics.median(rates)

    def _step(self) -> int:
        """The last step that was made, of those that rank 0 has noted."""
        notes = self._folder / "steps"
        lines = re.findall(r"^(\d+)$", notes.read_text(), re.MULTILINE) if notes.exists() else []
        return max(map(int, lines[-100:]), default=0)

    def _wait_beyond(self, step: int) -> None:
        deadline = time.monotonic() + WAIT
        while self._step() <= step:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.01)


def work(options: argparse.Namespace) -> None:
    """One rank, in a job of `fleetrun`."""
    import torch
    from torch.nn import functional as F

    import torchfleet as fleet

    rank = int(os.environ["RANK"])
    (options.folder / f"pid.{rank}").write_text(str(os.getpid()))
    save = str(options.folder / "save")

    def train() -> None:
        strategy = fleet.DistributedStrategy(sharding=True, sharding_configs={"stage": options.stage})
        fleet.init(is_collective=True, strategy=strategy)
        width = options.width
        layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(8)]
        model = fleet.distributed_model(torch.nn.Sequential(*layers))
        optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters()))
        copies = options.every if options.worker == "memory" else 0
        saves = options.every if options.worker == "save" else 0
        for step in fleet.elastic.steps(1 << 40, save, copies):
            x = torch.randn(16, width, generator=torch.Generator().manual_seed(step))
            loss = F.mse_loss(model(x), x)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                with open(options.folder / "steps", "a") as notes:
                    print(step, file=notes)
            if saves and (step + 1) % saves == 0:
                fleet.save(save, extra={"step": step + 1}, asynchronous=True)

    if options.worker == "save":
        train()
    else:
        fleet.elastic.run(train)


if __name__ == "__main__":
    main()
