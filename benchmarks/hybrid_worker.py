"""One process of benchmarks.hybrid: CTR-DNN's tower under DistributedDataParallel without rows, or a worker in hybrid
mode with rows, for a number of steps; prints where its time went."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

import torchfleet as fleet
from benchmarks.hybrid_counted import Counted, audited, train

NUM_SLOTS, DIM, NUM_DENSE, HIDDEN, NUM_IDS = 26, 10, 13, 400, 2000
WARM = 25  # steps before the clock starts: with balance, until sizes of batches follow the speeds
PARTS = 3  # backward takes about twice as long as forward
NUM_TESTED = 20_000
QUORUM_AGE = 8  # rounds: a worker that is five times slower, and enters again for every step, is some six late
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(100000): pass"
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tower() -> torch.nn.Sequential:
    sizes = [NUM_SLOTS * DIM + NUM_DENSE, HIDDEN, HIDDEN, HIDDEN]
    layers: list[torch.nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN, 1))


class CTR(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(DIM, name="rows", initializer=fleet.nn.Uniform(-0.01, 0.01))
        self.tower = tower()

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.tower(torch.cat([self.rows(ids).flatten(1), dense], dim=1)).squeeze(1)
        return logits


@functools.cache
def effects_of_ids() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(NUM_SLOTS, NUM_IDS)) / 3


def made(seed: int | tuple[int, int], num: int) -> Batch:
    """Samples whose clicks depend on ids and numbers, the same way for all seeds."""
    effects = effects_of_ids()
    rng = np.random.default_rng(seed)
    ids = (NUM_IDS * rng.random((num, NUM_SLOTS)) ** 3).astype(np.int64)
    dense = rng.normal(size=(num, NUM_DENSE)).astype(np.float32)
    logits = effects[np.arange(NUM_SLOTS), ids].sum(1) + dense[:, 0] * dense[:, 1]
    clicked = (rng.random(num) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    keys = ids + NUM_IDS * np.arange(NUM_SLOTS)
    return torch.from_numpy(keys), torch.from_numpy(dense), torch.from_numpy(clicked)


def batches(worker: int, size: int, num: int = 20) -> Iterator[Batch]:
    """`num` batches over and over, other ones on every worker; endless."""
    own = [made(1000 + 100 * worker + i, size) for i in range(num)]
    while True:
        yield from own


def new_batches(worker: int, size: int, until: Path, first: int) -> Iterator[Batch]:
    """Batches that no worker sees twice, from number `first` on, until there is a file."""
    for number in itertools.count(first):
        if until.exists():
            return
        yield made((worker, number), size)


def auc_of(scores: torch.Tensor, clicked: torch.Tensor) -> float:
    ranks = scores.double().argsort().argsort().double() + 1
    positive = clicked > 0
    num = int(positive.sum())
    return float((ranks[positive].sum() - num * (num + 1) / 2) / (num * (len(ranks) - num)))


class Slow:
    """Makes this worker slower: by a busy loop or by sleep between forward and backward, or by less of a processor,
    which then has other processes to run."""

    def __init__(self, factor: float, by: str) -> None:
        self._factor, self._by = factor, by
        if by == "cpu" and factor > 1:
            core = max(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {core})  # of this thread, and of processes that it starts
            for _ in range(round(factor) - 1):
                subprocess.Popen([sys.executable, "-c", SPIN, str(os.getpid())])

    def after_forward(self, seconds: float) -> None:
        """`seconds`: that forward computed."""
        if self._by == "cpu":
            return
        until = time.perf_counter() + (self._factor - 1) * PARTS * seconds
        if self._by == "sleep" and self._factor > 1:
            time.sleep(max(0.0, until - time.perf_counter()))
        while time.perf_counter() < until:
            pass


def steps(source: Iterator[Batch], num: int, forward: Callable[[Batch], torch.Tensor], step: Callable[[], None],
          slow: Slow, at_start: Callable[[], None] = lambda: None, warm: int = WARM) -> tuple[float, int]:  # fmt: skip
    """Make `num` steps after `warm` ones. Returns seconds, and this worker's samples in them. `at_start`: called before
    the clock starts."""
    start = num_samples = 0.0
    for number, batch in enumerate(source):
        if number == warm:
            at_start()
            start, num_samples = time.perf_counter(), 0
        begun = time.thread_time()  # not what forward waits: for rows, or for the network of others
        loss = F.binary_cross_entropy_with_logits(forward(batch), batch[2])
        slow.after_forward(time.thread_time() - begun)
        loss.backward()  # type: ignore[no-untyped-call]
        step()
        num_samples += len(batch[2])
        if number + 1 == warm + num:
            break
    return time.perf_counter() - start, int(num_samples)


def by_ranks_alone(chosen: argparse.Namespace) -> dict[str, Any]:
    """The roof: the tower under plain DistributedDataParallel, on inputs that are there."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(tower(), bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    rows = torch.randn(chosen.batch, NUM_SLOTS * DIM)

    def forward(batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = model(torch.cat([rows, batch[1]], dim=1)).squeeze(1)
        return logits

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    slow = Slow(chosen.factor if rank == chosen.slow else 1.0, chosen.by)
    seconds, num = steps(batches(rank, chosen.batch), chosen.steps, forward, step, slow)
    dist.barrier()
    dist.destroy_process_group()
    return {"worker": rank, "workers": size, "seconds": seconds, "samples": num}


def spent() -> dict[str, float]:
    """Seconds and rounds of this worker so far, if it exchanges through the servers. `rows` is part of `computed`."""
    stats = fleet.stats()["worker"]
    waited = (stats["pull_wait_ms"] + stats["push_wait_ms"]) * stats["steps"] / 1000
    exchange = stats.get("exchange", {})
    return {"rows": waited, **{name: exchange.get(name, 0) for name in ("rounds", "computed", "waited", "slowest")}}


def by_fleet(chosen: argparse.Namespace) -> dict[str, Any]:
    fleet.init()
    torch.manual_seed(0)
    plain = Counted(CTR()) if chosen.until else CTR()
    model = fleet.distributed_model(plain)
    configs: dict[str, Any] = {"hybrid": True, "exchange": "ranks" if chosen.way == "ranks" else "servers"}
    if chosen.way == "balance":
        configs["balance"] = True
    if chosen.way == "quorum":
        configs |= {"quorum": fleet.worker_num() - 1, "quorum_max_age": QUORUM_AGE}
    strategy = fleet.DistributedStrategy(a_sync=True, a_sync_configs=configs, sync_timeout=120.0)
    parameters = plain.groups() if isinstance(plain, Counted) else model.parameters()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(parameters, lr=1e-3, fused=True), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return {}
    fleet.init_worker()
    worker = fleet.worker_index()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    slow = Slow(chosen.factor if worker == chosen.slow else 1.0, chosen.by)
    if isinstance(plain, Counted):
        own_from = functools.partial(new_batches, worker, chosen.batch, Path(chosen.until))
        longest, num_steps = train(chosen, model, step, own_from)
        return ended(
            {"worker": worker, "steps": num_steps, "longest": longest}, plain.clicks, lambda: audited(chosen, plain)
        )
    num_steps, warm, own = chosen.steps, WARM, batches(worker, chosen.batch)
    if chosen.way == "quorum":  # the others do not wait for a slow worker, which makes fewer steps in the same time
        is_slow = worker == chosen.slow
        num_steps, warm = (round(num_steps / chosen.factor), 2) if is_slow else (num_steps, WARM)
        own = itertools.islice(own, num_steps + warm)
    before: dict[str, float] = {}
    seconds, num = steps(
        fleet.prefetch(own), num_steps, lambda batch: model(batch[0], batch[1]), step, slow,
        lambda: before.update(spent()), warm,
    )  # fmt: skip
    found: dict[str, Any] = {"worker": worker, "workers": fleet.worker_num(), "seconds": seconds, "samples": num}
    found["steps"] = num_steps
    found["spent"] = {name: value - before[name] for name, value in spent().items()}
    return ended(found, model)


def ended(found: dict[str, Any], model: torch.nn.Module, more: Callable[[], dict[str, int]] = dict) -> dict[str, Any]:
    """All workers are done: worker 0 adds the AUC, what became of late gradients, and `more`."""
    fleet.barrier_worker()
    if fleet.worker_index() == 0:
        found |= {"quorum": fleet.stats().get("quorum", {}), **more()}
        ids, dense, clicked = made(7, NUM_TESTED)
        model.eval()
        with torch.no_grad():
            found["auc"] = auc_of(model(ids, dense), clicked)
    fleet.barrier_worker()
    fleet.stop_worker()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=["ddp", "servers", "ranks", "balance", "quorum"], required=True)
    parser.add_argument("--until", default="", help="a file that ends training, instead of a number of steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps, with --until")
    parser.add_argument("--slow", type=int, default=-1, help="the worker that is slower")
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--by", choices=["busy", "sleep", "cpu"], default="busy")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = by_ranks_alone(chosen) if chosen.way == "ddp" else by_fleet(chosen)
    if found:
        print(f"RESULT {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
