"""Where the time of a training step goes: the parts of torchfleet that take a share in it, timed one by one."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torchfleet.base.monitor.status import StatusFile
from torchfleet.data.dataset import BatchIterator
from torchfleet.ps.worker import distributed_optimizer
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Future
from torchfleet.ps.worker.distributed_optimizer import DistributedOptimizer
from torchfleet.ps.worker.lookup.batch_rows import BatchRows
from torchfleet.ps.worker.lookup.dense_group import DenseGroup
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.modes.communicator import Communicator

# What is timed, and the name it has in the result. Time inside of another of these is not counted twice.
PARTS: tuple[tuple[Any, str, str], ...] = (
    (BatchIterator, "ready", "take_batch"),
    (Engine, "_foresee", "distinct_keys"),
    (Communicator, "pull", "pull_submit"),
    (Future, "result", "wait"),
    (Engine, "enter", "enter_model"),
    (Engine, "pooled", "lookup"),
    (BatchRows, "add_pooled", "scatter"),
    (Engine, "take_gradients", "sparse_gradients"),
    (DenseGroup, "gradients", "dense_gradients"),
    (distributed_optimizer, "check_finite", "check_finite"),
    (Plan, "check_options", "options_and_rates"),
    (Plan, "rates", "options_and_rates"),
    (DenseGroup, "write", "dense_write"),
    (Communicator, "step", "push_submit"),
    (Client, "push_tables", "push"),
    (StatusFile, "write", "status"),
    (DistributedOptimizer, "step", "rest_of_step"),
    (DistributedOptimizer, "zero_grad", "zero_grad"),
)


class Sections:
    """Seconds by part: of the thread that made it, with its processor time, and of all others together."""

    def __init__(self) -> None:
        self.own: dict[str, float] = defaultdict(float)
        self.own_cpu: dict[str, float] = defaultdict(float)
        self.others: dict[str, float] = defaultdict(float)
        self._thread = threading.get_ident()
        self._inside = threading.local()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """The parts are timed until the end of the block; before and after it they are as they were."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS]
        for owner, name, part in PARTS:
            setattr(owner, name, self._timing(getattr(owner, name), part))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def _timing(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self._inside.seconds = getattr(self._inside, "seconds", (0.0, 0.0)), (0.0, 0.0)
            start = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start[0], time.thread_time() - start[1]
                self._note(part, *(whole - inner for whole, inner in zip(seconds, self._inside.seconds, strict=True)))
                self._inside.seconds = outer[0] + seconds[0], outer[1] + seconds[1]

        return run

    def _note(self, part: str, seconds: float, cpu: float) -> None:
        if threading.get_ident() != self._thread:
            self.others[part] += seconds
            return
        self.own[part] += seconds
        self.own_cpu[part] += cpu


def thread_seconds() -> dict[str, float]:
    """Processor time so far of this thread, of Python's other threads, and of the rest of the process."""
    own = time.thread_time()
    others = 0.0
    for thread in threading.enumerate():
        if thread.ident is not None and thread.ident != threading.get_ident():
            others += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return {"training": own, "threads": others, "rest": time.process_time() - own - others}
