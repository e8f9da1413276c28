"""One process of benchmarks.hybrid: CTR-DNN's tower under DistributedDataParallel without rows, or a worker in hybrid
mode with rows, for a number of steps; prints where its time went."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import torchfleet as fleet
from benchmarks.hybrid_counted import Counted, audited, train
from benchmarks.hybrid_data import NUM_DENSE, NUM_SLOTS, Batch, auc_of, batches, new_batches, tested

DIM, HIDDEN = 10, 400
WARM = 25  # steps before the clock starts: with balance, until sizes of batches follow the speeds
PARTS = 3  # backward takes about twice as long as forward
QUORUM_AGE = 8  # rounds: a worker that is five times slower, and enters again for every step, is some six late
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(100000): pass"


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


def share_of_others(chosen: argparse.Namespace, num_workers: int) -> float:
    """How many times more samples than workers that are alike the others train beside a slow one, in the same time."""
    return 1.0 if chosen.slow < 0 else num_workers / (num_workers - 1 + 1 / chosen.factor)


@dataclass(frozen=True)
class Plan:
    """How many steps a worker makes, the first `warm` of them before the clock starts."""

    warm: int
    num: int

    @classmethod
    def of(cls, chosen: argparse.Namespace, worker: int, num_workers: int) -> Plan:
        """With a quorum the others do not wait for a slow worker: it makes fewer steps in the same time, and they make
        more, so that all together train as many samples as workers that are alike."""
        even = cls(WARM, chosen.steps)
        if chosen.way != "quorum" or chosen.slow < 0:
            return even
        most = math.ceil(even.total * share_of_others(chosen, num_workers))
        if worker != chosen.slow:
            return cls(WARM, most - WARM)
        return cls(2, num_workers * even.total - (num_workers - 1) * most - 2)

    @property
    def total(self) -> int:
        return self.warm + self.num


def steps(source: Iterator[Batch], plan: Plan, forward: Callable[[Batch], torch.Tensor], step: Callable[[], None],
          slow: Slow, at_start: Callable[[], None] = lambda: None) -> dict[str, Any]:  # fmt: skip
    """Make the steps of a plan. `seconds`, `samples`: of this worker since the clock has started; `trained`: its
    samples of all steps. `at_start`: called before the clock starts."""
    start, num_samples, num_before = 0.0, 0, 0
    for number, batch in enumerate(itertools.islice(source, plan.total)):
        if number == plan.warm:
            at_start()
            start, num_before = time.perf_counter(), num_samples
        begun = time.thread_time()  # not what forward waits: for rows, or for the network of others
        loss = F.binary_cross_entropy_with_logits(forward(batch), batch[2])
        slow.after_forward(time.thread_time() - begun)
        loss.backward()  # type: ignore[no-untyped-call]
        step()
        num_samples += len(batch[2])
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "samples": num_samples - num_before, "trained": num_samples}


def by_ranks_alone(chosen: argparse.Namespace) -> dict[str, Any]:
    """The roof: the tower under plain DistributedDataParallel, on inputs that are there."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(chosen.seed)
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
    plan = Plan.of(chosen, rank, size)
    found = steps(batches(chosen.seed, rank, chosen.batch, plan.total), plan, forward, step, slow)
    dist.barrier()
    dist.destroy_process_group()
    return {"worker": rank, "workers": size, **found}


def spent() -> dict[str, float]:
    """Seconds and rounds of this worker so far, if it exchanges through the servers. `rows` is part of `computed`."""
    stats = fleet.stats()["worker"]
    waited = (stats["pull_wait_ms"] + stats["push_wait_ms"]) * stats["steps"] / 1000
    exchange = stats.get("exchange", {})
    return {"rows": waited, **{name: exchange.get(name, 0) for name in ("rounds", "computed", "waited", "slowest")}}


def by_fleet(chosen: argparse.Namespace) -> dict[str, Any]:
    fleet.init()
    torch.manual_seed(chosen.seed)
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
    plan = Plan.of(chosen, worker, fleet.worker_num())
    num_made = math.ceil(plan.total * share_of_others(chosen, fleet.worker_num()))
    own = batches(chosen.seed, worker, chosen.batch, num_made)
    if chosen.way == "quorum":  # each loop ends by itself
        own = itertools.islice(own, plan.total)
    before: dict[str, float] = {}
    found = steps(
        fleet.prefetch(own), plan, lambda batch: model(batch[0], batch[1]), step, slow,
        lambda: before.update(spent()),
    )  # fmt: skip
    found |= {"worker": worker, "workers": fleet.worker_num(), "steps": plan.num}
    found["spent"] = {name: value - before[name] for name, value in spent().items()}
    return ended(found, model)


def ended(found: dict[str, Any], model: torch.nn.Module, more: Callable[[], dict[str, int]] = dict) -> dict[str, Any]:
    """All workers are done: worker 0 adds the AUC, what became of late gradients, and `more`."""
    fleet.barrier_worker()
    if fleet.worker_index() == 0:
        found |= {"quorum": fleet.stats().get("quorum", {}), **more()}
        ids, dense, clicked = tested()
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
    parser.add_argument("--seed", type=int, default=0, help="of the samples and of the network's first values")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = by_ranks_alone(chosen) if chosen.way == "ddp" else by_fleet(chosen)
    if found:
        print(f"RESULT {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
