"""Kill servers and workers of an endless job at random, start it again each time, and see what becomes of the model.

python -m benchmarks.kills --mode sync --json        200 kills over a month of hourly passes: about ten minutes
python -m benchmarks.kills --mode async --json
python -m benchmarks.kills --quick --json            three kills, to see that it works

The job is that of benchmarks.online (admission, eviction, full saves and deltas): two servers and two workers as
processes of their own, forked so that a start takes half a second. In sync mode the final model must equal that of an
undisturbed run, bit for bit. In every mode each part must be in the model once, in order.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet
from benchmarks.online import BATCH, Clicks, Month
from benchmarks.online_data import Drift
from benchmarks.timing import log, report
from torchfleet.apps.online import Part, history, model_to_load
from torchfleet.launch.job_spec import Task
from torchfleet.launch.roles import one_machine, tasks
from torchfleet.ps.checkpoint.comparison import compare
from torchfleet.ps.server.job.warm import warm_up

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "half_async": {"a_sync": True, "a_sync_configs": {"half_async": True}},
    "async": {"a_sync": True},
}
POLICIES = {
    "entry": fleet.CountFilterEntry(2),
    "shrink": fleet.Shrink(delete_after_unseen_days=1, every_hours=24, max_share=1.0),
}
WAIT = 300.0  # seconds that a job may take to end by itself


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--hours", type=int, default=720)
    parser.add_argument("--samples", type=int, default=6_000, help="per hour")
    parser.add_argument("--longest", type=float, default=1.5, help="seconds from a start to the next kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.kills, chosen.hours, chosen.samples, chosen.longest = 3, 30, 1_500, 1.0
    return chosen


def job(chosen: argparse.Namespace, folder: str) -> None:
    """The script of all roles."""
    fleet.init()
    torch.manual_seed(0)
    model = fleet.distributed_model(Clicks(POLICIES))
    strategy = fleet.DistributedStrategy(sync_timeout=60.0, **MODES[chosen.mode])
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05), strategy)
    model_dir = str(Path(folder) / "model")
    if fleet.is_server():
        fleet.init_server(model_to_load(model_dir))
        fleet.run_server()
        return
    fleet.init_worker(model_to_load(model_dir))
    drift = Drift(chosen.samples)

    def train(part: Part, files: list[str]) -> None:
        if fleet.is_first_worker():
            with (Path(folder) / "trained").open("a") as log:
                log.write(f"{part.name}\n")
        ids, labels = (torch.from_numpy(array) for array in drift.hour(int(part.position) - 1))
        mine = slice(fleet.worker_index(), None, fleet.worker_num())  # of each batch its share, so that steps are equal
        batches = zip(torch.split(ids, BATCH), torch.split(labels, BATCH), strict=True)
        for some, wanted in fleet.prefetch([(a[mine], b[mine]) for a, b in batches]):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(some), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    fleet.online.train_passes(Month(chosen.hours), model_dir, train)
    fleet.stop_worker()


class Fleet:
    """The processes of one start of the job."""

    def __init__(self, chosen: argparse.Namespace, folder: str) -> None:
        self.running: dict[int, str] = {}
        for task in tasks(one_machine(2, 2), 2, {}):
            pid = os.fork()
            if not pid:
                become(task, chosen, folder)
            self.running[pid] = task.name

    def wait(self, seconds: float) -> bool | None:
        """Whether all have ended well; None if they are still running after so long."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                time.sleep(0.01)
            elif self.running.pop(pid, None) is not None and status:
                self.kill_all()
                return False
        return None if self.running else True

    def kill_one(self, rng: random.Random) -> str:
        pid = rng.choice(sorted(self.running))
        name = self.running[pid]
        os.kill(pid, signal.SIGKILL)
        return name

    def kill_all(self) -> None:
        for pid in list(self.running):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self.running[pid]


def become(task: Task, chosen: argparse.Namespace, folder: str) -> None:
    """In the forked process: play the part and end."""
    code = 1
    try:
        os.environ.update(task.environment)
        sink = os.open(str(Path(folder) / f"{task.role}log.{task.index}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        job(chosen, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def disturbed(chosen: argparse.Namespace, folder: str) -> Counter[str]:
    """Run the job to its end, with kills on the way; returns which roles were killed."""
    rng = random.Random(chosen.seed)
    killed: Counter[str] = Counter()
    while True:
        fleet_now = Fleet(chosen, folder)
        left = chosen.kills - killed.total()
        ended = fleet_now.wait(rng.uniform(0.2, chosen.longest) if left else WAIT)
        if ended:
            return killed
        if ended is None and left:
            killed[fleet_now.kill_one(rng)] += 1
            fleet_now.kill_all()
            if killed.total() % 20 == 0:
                log(f"  {killed.total()} kills, {len(trained(folder))} passes begun")
        elif ended is None:
            fleet_now.kill_all()
            raise RuntimeError(f"the job does not end; its logs are in {folder}")
        else:
            raise RuntimeError(f"the job failed by itself; its logs are in {folder}")


def trained(folder: str) -> list[str]:
    """The parts whose training was begun, in order, repeats included."""
    path = Path(folder) / "trained"
    return path.read_text().split() if path.exists() else []


def run(chosen: argparse.Namespace, folders: Sequence[str]) -> dict[str, Any]:
    start = time.monotonic()
    killed = disturbed(chosen, folders[0])
    log(f"  {killed.total()} kills in {time.monotonic() - start:.0f} s; now an undisturbed run")
    disturbed(argparse.Namespace(**{**vars(chosen), "kills": 0}), folders[1])
    begun, expected = Counter(trained(folders[0])), trained(folders[1])
    model = str(Path(folders[0]) / "model")
    in_model = [done.part for done in history(model)]  # the last thousand
    num_passes = (fleet.saved_extra(model) or {})["online"]["passes"]
    result = {
        "mode": chosen.mode,
        "parts": chosen.hours,
        "kills": killed.total(),
        "killed_servers": sum(num for name, num in killed.items() if name.startswith("server")),
        "parts_in_the_model_once_and_in_order": in_model == expected[-len(in_model) :] and num_passes == len(expected),
        "parts_lost": len(set(expected[-len(in_model) :]) - set(in_model)) + len(expected) - num_passes,
        "passes_begun_again": sum(begun.values()) - len(begun),
        "most_begins_of_one_part": max(begun.values()),
    }
    if chosen.mode == "sync":
        found = compare(str(Path(folders[0]) / "model"), str(Path(folders[1]) / "model"))
        result["equals_the_undisturbed_run"] = found.is_equal
    return result


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    warm_up()
    torch.optim.Adagrad([torch.zeros(1, requires_grad=True)])  # imports much, and forks need not do it again
    log(f"{chosen.hours} parts, {chosen.kills} kills, {chosen.mode}")
    with tempfile.TemporaryDirectory() as killed, tempfile.TemporaryDirectory() as undisturbed:
        report(run(chosen, (killed, undisturbed)), chosen.json)


if __name__ == "__main__":
    main()
