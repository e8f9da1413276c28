"""A job of passes over hourly parts, killed or failing where it is told; locally also at any moment, again and again.

fleetrun ... online_job.py --data D --model_dir M --until 20261116/01 [--kill worker 20261115/23]
python online_job.py --data D --model_dir M --until 20261116/01 --kills 10      one JSON line: how often it was killed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from torchfleet.apps import online

BATCH = 20
SLOTS = [("ids", 3), ("label", 1)]


class Model(torch.nn.Module):
    """Rows are admitted at their second appearance, and evicted after 72 minutes without one."""

    def __init__(self) -> None:
        super().__init__()
        entry, shrink = (
            fleet.CountFilterEntry(2),
            fleet.Shrink(delete_after_unseen_days=0.05, every_hours=2, max_share=1.0),
        )
        self.ids = fleet.nn.SparseEmbedding(4, name="ids", entry=entry, shrink=shrink)
        self.out = torch.nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.ids(ids).flatten(1)).squeeze(1)


def hours(first: str, num: int) -> list[str]:
    start = online.parts.time_of(first[:8], int(first[9:]))
    found = [online.parts.day_and_hour(start + 3600 * i) for i in range(num)]
    return [f"{day}/{hour:02}" for day, hour in found]


def write_parts(folder: Path, names: list[str], num_rows: int = 200, num_files: int = 2) -> None:
    """Ids drift: every hour has a few that the hour before had not."""
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        ids = rng.integers(10 * number, 10 * number + 60, (num_rows, 3))
        clicked = (rng.random(num_rows) < 0.2 + 0.6 * (ids[:, 0] % 2)).astype(int)
        lines = [f"3 {a} {b} {c} 1 {y}\n" for (a, b, c), y in zip(ids.tolist(), clicked.tolist(), strict=True)]
        part = folder / name
        part.mkdir(parents=True)
        for i in range(num_files):
            (part / f"part-{i}").write_text("".join(lines[i::num_files]))
        (part / "_SUCCESS").touch()


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        torch.manual_seed(0)
        self.model = fleet.distributed_model(Model())
        settings = {"a_sync": options.mode == "async", "sync_timeout": 60.0}
        adam = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer = fleet.distributed_optimizer(adam, fleet.DistributedStrategy(**settings))

    def run(self) -> list[online.PassReport]:
        options = self._options
        return online.train_passes(
            online.FolderSource(options.data, until=options.until),
            options.model_dir,
            self.train,
            evaluate=self.evaluate,
            shrink=True,
            poll_seconds=0.1,
            all_files=options.mode == "sync",
        )

    def train(self, part: online.Part, files: list[str]) -> None:
        for number, batch in enumerate(self._batches(files)):
            if number == 2:
                self._suffer(part)
            rows = (
                slice(fleet.worker_index(), None, fleet.worker_num()) if self._options.mode == "sync" else slice(None)
            )
            logits = self.model(batch["ids"][rows])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"][rows, 0].float())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self, part: online.Part, files: list[str]) -> Any:
        meter = fleet.metrics.AUC()
        self.model.eval()
        with torch.no_grad():
            for batch in self._batches(files):
                meter.update(self.model(batch["ids"]), batch["label"])
        self.model.train()
        return meter

    def _batches(self, files: list[str]) -> Any:
        dataset = fleet.QueueDataset()
        dataset.init(BATCH, use_var=[fleet.Slot(name, dim=dim) for name, dim in SLOTS])
        dataset.set_filelist(files)
        return dataset

    def _suffer(self, part: online.Part) -> None:
        """What the command line asks for, once."""
        for number, (who, name) in enumerate(self._options.kill or []):
            mark = Path(f"{self._options.model_dir}.killed-{number}")
            if name != part.name or mark.exists() or fleet.worker_index() != (who in ("worker", "error")):
                continue
            mark.touch()
            print(f"about to kill a {who} in {name}", flush=True)
            if who == "error":
                raise RuntimeError("this worker was told to fail")
            pid = os.getpid() if who == "worker" else fleet.stats()["servers"][0]["pid"]
            os.kill(pid, signal.SIGKILL)


def main(options: argparse.Namespace) -> None:
    fleet.init()
    trainer = Trainer(options)
    if fleet.is_server():
        fleet.init_server(online.model_to_load(options.model_dir))
        fleet.run_server()
        return
    fleet.init_worker(online.model_to_load(options.model_dir))
    trainer.run()
    fleet.stop_worker()


def forked(options: argparse.Namespace, lives: float = 0.0) -> int:
    """The job in a child process, which prints its errors only. `lives`: seconds of processor time after which the
    system ends it, as abruptly as SIGKILL would; 0: never."""
    child = os.fork()
    if child:
        return child
    signal.setitimer(signal.ITIMER_PROF, lives)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        main(options)
    except BaseException as error:
        print(f"the child failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def killed_again_and_again(options: argparse.Namespace) -> None:
    """The job in a child process, killed at random moments; every child goes on where the last one came to."""
    dice, num_killed = random.Random(options.seed), 0
    while True:
        lives = dice.uniform(0.02, options.kill_within) if num_killed < options.kills else 0.0
        _, status = os.waitpid(forked(options, lives), 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print(json.dumps({"killed": num_killed}), flush=True)
            return
        num_killed += 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--until")
    parser.add_argument("--mode", default="sync", choices=["sync", "async"])
    parser.add_argument("--kill", nargs=2, action="append", metavar=("WHO", "PART"), help="worker, server or error")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--kill_within", type=float, default=0.1, help="seconds of processor time, at most")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    from torchfleet.ps.server.job.warm import load_all

    given = parse()
    if given.kills:
        torch.set_num_threads(1)
        warm = parse(["--data", given.data, "--model_dir", f"{given.model_dir}-whole", "--until", given.until])
        load_all()  # kernels, here, once for all children
        # Uninterrupted, in a child: where torch is built with CUDA, a child cannot train if its parent has trained.
        assert os.waitpid(forked(warm), 0)[1] == 0
        killed_again_and_again(given)
    else:
        main(given)
