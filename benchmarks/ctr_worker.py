"""One worker or server of benchmarks.ctr: CTR-DNN trained for a while, in turns with its network alone, and timed."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from benchmarks.ctr_sections import Sections, thread_seconds
from examples.ctr_dnn.model import CTRDNN, SLOTS, loss_of, slots

BLOCK = 25  # steps of one kind in a row
FIRST = 3  # of them are not counted: another kind of block was before
KINDS = ("fleet", "network", "bare", "sections")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--files", nargs="*", default=[])
    parser.add_argument("--test", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = train(options)
    if found:
        print(f"RESULT {json.dumps(found)}", flush=True)


def train(options: argparse.Namespace) -> dict[str, Any]:
    fleet.init()
    model = fleet.distributed_model(CTRDNN())
    strategy = fleet.DistributedStrategy(a_sync=True)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return {}
    fleet.init_worker()
    data = fleet.InMemoryDataset()
    data.init(options.batch, use_var=slots(), data_format=fleet.CriteoFormat(log_scale=True), drop_last=True)
    data.set_filelist(fleet.util.get_file_shard(options.files))
    data.load_into_memory()
    run = Run(model, optimizer)
    for batch in fleet.prefetch(data):  # the first pass makes all rows
        run.step(batch)
    fleet.barrier_worker()
    run.go(data, options.seconds)
    fleet.flush()
    stats = fleet.stats()["worker"]
    fleet.barrier_worker()
    waits = {name: stats[name] for name in ("pull_wait_ms", "push_wait_ms")}
    found = {**run.result(options.batch), **waits, "auc": test_auc(model, options.test)}
    fleet.stop_worker()
    return found


class Run:
    """Blocks of steps in turns: the fleet's; the network's on rows that are there; the fleet's again, in sections."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._own: dict[str, list[float]] = {kind: [] for kind in KINDS}  # processor time of the training thread
        self._faults: Counter[str] = Counter()  # of pages, in the training thread
        self._all: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}  # and of all threads, by block
        self._sections = Sections()
        self._losses: list[float] = []
        self._batch: Any = None

    def step(self, batch: Any) -> torch.Tensor:
        loss = loss_of(self._model(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._batch = batch
        return loss

    def go(self, data: Any, seconds: float) -> None:
        """Passes over the data until the time is over and each kind of block has had as many turns."""
        deadline, batches = time.perf_counter() + seconds, self._batches(data)
        for kind in cycle(KINDS):
            before, num_faults = thread_seconds(), page_faults()
            self._block(kind, batches)
            self._faults[kind] += page_faults() - num_faults
            fleet.flush()  # the senders' work is this block's, and leaves the next one alone
            self._all[kind].update({name: now - before[name] for name, now in thread_seconds().items()})
            if kind == KINDS[-1] and time.perf_counter() > deadline:
                batches.close()
                return

    def _batches(self, data: Any) -> Generator[Any, None, None]:
        while True:
            data.local_shuffle()
            yield from fleet.prefetch(data)

    def _block(self, kind: str, batches: Iterator[Any]) -> None:
        if kind == "fleet":
            self._steps(kind, batches)
        elif kind == "sections":
            with self._sections.timed():
                self._steps(kind, batches)
        else:
            compute = self._network(with_input=kind == "network")
            for number in range(BLOCK):
                start = time.perf_counter(), time.thread_time()
                compute()
                self._note(kind, number, *start)

    def _steps(self, kind: str, batches: Iterator[Any]) -> None:
        start = time.perf_counter(), time.thread_time()
        for number, batch in enumerate(islice(batches, BLOCK)):
            loss = self.step(batch)
            self._note(kind, number, *start)
            start = time.perf_counter(), time.thread_time()
        self._losses.append(loss.item())

    def _note(self, kind: str, number: int, wall: float, own: float) -> None:
        if number >= FIRST:
            self._wall[kind].append(time.perf_counter() - wall)
            self._own[kind].append(time.thread_time() - own)

    def _network(self, with_input: bool) -> Callable[[], None]:
        """Forward and backward of the tower, on the last batch; `with_input`: to the gradient that rows need."""
        batch, tower = self._batch, self._model.tower
        with torch.no_grad():
            embedded = self._model.embedding([batch[name] for name in SLOTS]).flatten(1)
        embedded.requires_grad_(with_input)

        def compute() -> None:
            logits = tower(torch.cat([embedded, batch["dense_input"]], dim=1))
            loss_of(logits, batch).backward()  # type: ignore[no-untyped-call]
            tower.zero_grad()
            embedded.grad = None

        return compute

    def result(self, batch: int) -> dict[str, Any]:
        """Medians of a step in milliseconds, and what it is made of."""
        wall, own = (
            {kind: 1000 * statistics.median(times[kind]) for kind in KINDS} for times in (self._wall, self._own)
        )
        spent = {name: self._per_step("fleet", seconds) for name, seconds in self._all["fleet"].items()}
        return {
            "samples_per_s": batch * len(self._wall["fleet"]) / sum(self._wall["fleet"]),
            "step_ms": wall["fleet"],
            "network_ms": wall["network"],
            "bare_network_ms": wall["bare"],
            "network_ratio": wall["network"] / wall["fleet"],
            "bare_network_ratio": wall["bare"] / wall["fleet"],
            "p99_step_ms": 1000 * float(np.percentile(self._wall["fleet"], 99)),
            "step_cpu_ms": own["fleet"],
            "network_cpu_ms": own["network"],
            "network_cpu_ratio": own["network"] / own["fleet"],
            "sections_step_ms": wall["sections"],
            **{f"cpu_{name}_ms": value for name, value in spent.items()},
            **{f"own_{part}_ms": self._per_step("sections", s) for part, s in self._sections.own.items()},
            **{f"own_{part}_cpu_ms": self._per_step("sections", s) for part, s in self._sections.own_cpu.items()},
            **{f"beside_{part}_ms": self._per_step("sections", s) for part, s in self._sections.others.items()},
            "page_faults": self._per_step("fleet", self._faults["fleet"] / 1000),
            "network_page_faults": self._per_step("network", self._faults["network"] / 1000),
            "loss": statistics.mean(self._losses[-8:]),
        }

    def _per_step(self, kind: str, seconds: float) -> float:
        num = len(self._wall[kind]) / (BLOCK - FIRST) * BLOCK
        return 1000 * seconds / num


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_auc(model: torch.nn.Module, files: list[str]) -> float:
    test, meter = fleet.QueueDataset(), fleet.metrics.AUC()
    test.init(4096, use_var=slots(), data_format=fleet.CriteoFormat(log_scale=True))
    test.set_filelist(files)
    fleet.infer_from_dataset(lambda batch: {"auc": meter.update(model(batch), batch["label"])}, test, print_period=0)
    return meter.compute()[0]


if __name__ == "__main__":
    main()
