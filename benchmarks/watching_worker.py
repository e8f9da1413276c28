"""One role of benchmarks.watching: the model of benchmarks.sparse, told by a board when to be watched and when to end.

A process that is not to be watched is put into the state of an unwatched one, and back: no status is due, no
port is there for the times of steps, no key is counted, no step is traced.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet
from benchmarks.sparse_worker import Batch, SummedIds, batches
from benchmarks.watching_board import Board
from benchmarks.watching_jobs import CORES
from torchfleet.base.monitor.status import StatusFile
from torchfleet.base.step_tracing import StepTracing
from torchfleet.base.tracing import span_recorder
from torchfleet.ps.server.state.counters import HotKeys

_HELD_OUT = 1_000_000  # the number of the first held-out batch
_LOOK = 0.02  # seconds between two looks of a server at the orders
_THREADS = {"status file": "status_files_s", "metrics port": "metrics_ports_s", "OTLP export": "trace_export_s"}


class Switch:
    """Watches this process or does not, as ordered. Made when all that watches it is there."""

    def __init__(self, board: Board, role: int) -> None:
        self._board, self._role, self.is_on = board, role, True
        self._statuses, self._tracings = _living(StatusFile), _living(StepTracing)
        self._hot_keys = [found for found in _living(HotKeys) if found.is_on]
        self._ports = [status._port for status in self._statuses]
        self._tracers = [tracing._tracer for tracing in self._tracings]
        self._recorder = span_recorder.active
        board.put(role, "is_on", 1.0)

    def look(self) -> None:
        """Follow the order; of a worker after a step, in the thread that trains."""
        wanted = self._board.ordered("on") > 0
        if wanted == self.is_on or (span_recorder.active is not None and span_recorder.active.trace):
            return  # a traced step has hooks, which go with its end
        self.is_on = wanted
        next_status = time.monotonic() + random.random() / 2 if wanted else math.inf
        for status, port in zip(self._statuses, self._ports, strict=True):
            status._next, status._port = next_status, port if wanted else None
        for keys in self._hot_keys:
            keys.is_on = wanted
        for tracing, tracer in zip(self._tracings, self._tracers, strict=True):
            tracing._tracer = tracer if wanted else None
        span_recorder.use(self._recorder if wanted else None)
        self._board.put(self._role, "is_on", float(wanted))


def _living(kind: type[Any]) -> list[Any]:
    """The objects of this class."""
    return [found for found in gc.get_objects() if type(found) is kind]


def measure_statuses(board: Board, role: int) -> None:
    """From now on the board tells the processor time of this process's statuses, and of threads that watch it."""
    original, seconds = StatusFile._write_due, [0.0]

    def measured(self: StatusFile, now: bool) -> None:
        before = time.thread_time()
        original(self, now)
        seconds[0] += time.thread_time() - before
        board.put(role, "statuses_s", seconds[0])
        for thread in threading.enumerate():
            if thread.name in _THREADS and thread.ident is not None:
                used = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                board.put(role, _THREADS[thread.name], used)

    StatusFile._write_due = measured  # type: ignore[method-assign]


def serve(board: Board, role: int) -> None:
    """As a server, until all workers have stopped."""

    def follow() -> None:
        while not board.of("statuses_s")[role]:
            time.sleep(0.1)  # it does not serve yet
        switch = Switch(board, role)
        while True:
            switch.look()
            time.sleep(_LOOK)

    fleet.init_server()
    threading.Thread(target=follow, daemon=True).start()
    fleet.run_server()


def train(
    step: Callable[[Batch], torch.Tensor], data: list[Batch], board: Board, role: int, options: argparse.Namespace
) -> None:
    """One pass, so that every row exists, then steps until there are enough, or it is told to stop."""
    for batch in fleet.prefetch(data):
        step(batch)
    fleet.barrier_worker()
    switch, losses = Switch(board, role), deque[torch.Tensor](maxlen=len(data))
    board.put(role, "trains", 1.0)
    for steps, batch in enumerate(fleet.prefetch(cycle(data)), start=1):
        losses.append(step(batch))
        board.put(role, "steps", steps)
        if steps % options.report_every == 0:
            fleet.report(loss=float(losses[-1]))
        switch.look()
        if steps == options.steps or board.ordered("stop"):
            break
    fleet.flush()
    board.put(role, "loss", float(torch.stack(list(losses)).mean()))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("batch", 512), ("slots", 26), ("dim", 16), ("num_ids", 200_000), ("num_batches", 160)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.15)
    parser.add_argument("--report_every", type=int, default=10, help="steps between two calls of fleet.report")
    parser.add_argument("--steps", type=int, default=0, help="0: until the board says stop")
    parser.add_argument("--board", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    fleet.init()
    board = Board(options.board)
    role = fleet.server_index() if fleet.is_server() else fleet.server_num() + fleet.worker_index()
    board.put(role, "pid", os.getpid())
    if cores := os.environ.get(CORES):
        own = [int(core) for core in cores.split(",")[2 * role : 2 * role + 2]]
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), own)
    measure_statuses(board, role)
    model = fleet.distributed_model(SummedIds(options.dim))
    strategy = fleet.DistributedStrategy(a_sync=True)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), strategy)
    if fleet.is_server():
        serve(board, role)
        return
    data = batches(options, fleet.worker_index(), fleet.worker_num())
    options.num_batches = _HELD_OUT + 8
    held_out = batches(options, _HELD_OUT, 1)
    fleet.init_worker()

    def step(batch: Batch) -> torch.Tensor:
        ids, offsets, label = batch
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, offsets), label)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train(step, data, board, role, options)
    fleet.barrier_worker()
    meter = fleet.metrics.AUC()
    with torch.no_grad():
        for ids, offsets, label in held_out:
            board.put(role, "auc", meter.update(model(ids, offsets), label))
    fleet.stop_worker()


if __name__ == "__main__":
    main()
