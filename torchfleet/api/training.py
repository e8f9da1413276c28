"""Training and prediction over a dataset, in one or several threads, with printed progress."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError
from torchfleet.base.fetch import FetchHandler, Watch, numbers, plain
from torchfleet.base.monitor.epochs import Epoch
from torchfleet.data.dataset import BatchIterator, Dataset
from torchfleet.data.slots import Batch
from torchfleet.ps.worker.distributed_optimizer import DistributedOptimizer
from torchfleet.ps.worker.lookup.engine import Engine

Values = Mapping[str, Any]
Step = Callable[[Batch], Values]


@dataclass
class Result:
    """The result of a pass."""

    steps: int = 0
    samples: int = 0  # of this worker
    unused: int = 0  # samples of this worker's data in which it made no step: its loop ended with another worker's
    seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)  # numbers of the last step
    mean: dict[str, float] = field(default_factory=dict)  # prediction only: means of all numbers over all samples

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(self.seconds, 1e-9)


class Report:
    """Counts steps, prints a line periodically, and passes the latest values to the handler."""

    epoch: Epoch | None = None  # the launcher's view of this pass
    on_print: Callable[[dict[str, float]], None] | None = None  # called with the numbers of every printed line

    def __init__(
        self,
        what: str,
        fetch_list: Sequence[str] | None,
        print_period: int,
        handler: Any,
        fetch_info: Sequence[str] | None = None,
    ) -> None:
        if type(print_period) is not int or print_period < 0:
            raise FleetError(f"print_period: expected a number of steps, or 0 for never, found {print_period!r}")
        if handler is not None and not isinstance(handler, FetchHandler):
            raise FleetError(f"fetch_handler: expected an object of a class of fleet.FetchHandler, found {handler!r}")
        if isinstance(fetch_list, str):
            raise FleetError(f"fetch_list: expected a list of names, found the single {fetch_list!r}")
        self._what, self._names, self._period = what, fetch_list, print_period
        self._labels = _labels(fetch_list, fetch_info)
        self._lock = threading.Lock()
        self.result = Result()
        self._latest: Values = {}
        self._start = self._last_time = time.monotonic()
        self._last_samples = 0
        self._handler = handler
        self._watch: Watch | None = None

    def begin(self) -> None:
        self._start = self._last_time = time.monotonic()
        self._watch = Watch(self._handler) if self._handler is not None else None

    def note(self, batch: Batch, values: Values) -> None:
        with self._lock:
            self.result.steps += 1
            self.result.samples += batch.num_samples
            self._latest = values
            number = self.result.steps
            if self.epoch is not None:
                self.epoch.done, self.epoch.values = self.result.samples, values
        if self._watch is not None:
            self._watch.note(values)
        if self._period and number % self._period == 0:
            self._print(number, values)
            if self.on_print is not None:
                self.on_print(numbers(values))

    def end(self) -> Result:
        self.result.last = numbers(self._latest)
        return self.result

    def close(self) -> None:
        self.result.seconds = time.monotonic() - self._start
        if self._watch is not None:
            self._watch.close()

    def _print(self, number: int, values: Values) -> None:
        with self._lock:
            now, samples = time.monotonic(), self.result.samples
            rate = (samples - self._last_samples) / max(now - self._last_time, 1e-9)
            self._last_time, self._last_samples = now, samples
        shown = numbers(values)
        if self._names is not None:
            missing = [name for name in self._names if name not in values]
            if missing:
                raise FleetError(f"fetch_list: the step returns {', '.join(values)}, and no {', '.join(missing)}")
            shown = {self._labels[name]: shown.get(name, plain(values[name])) for name in self._names}
        texts = [
            f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
        ]
        parts = [f"{self._what} step {number}", f"{rate:,.0f} samples/s", *texts]
        print(" | ".join(parts), file=sys.stdout, flush=True)


def _labels(fetch_list: Sequence[str] | None, fetch_info: Sequence[str] | None) -> dict[str, str]:
    """The text in front of each value of a printed line, by its name."""
    names = list(fetch_list or ())
    if fetch_info is None:
        return {name: name for name in names}
    if isinstance(fetch_info, str) or len(fetch_info) != len(names):
        raise FleetError(f"fetch_info: expected a label for each name of fetch_list ({names}), found {fetch_info!r}")
    return {name: str(label).strip() for name, label in zip(names, fetch_info, strict=True)}


def as_step(model: Callable[[Batch], Any], loss_fn: Callable[[Any, Batch], torch.Tensor] | None) -> Step:
    """Convert the user's model and loss to a function from a batch to its values."""
    if not callable(model):
        raise FleetError(f"expected a function step(batch), or a model and loss_fn; found {model!r}")
    if loss_fn is not None and not callable(loss_fn):
        raise FleetError(f"loss_fn: expected a function of (output, batch), found {loss_fn!r}")

    def step(batch: Batch) -> Values:
        found = model(batch)
        if loss_fn is not None:
            found = loss_fn(found, batch)
        return found if isinstance(found, Mapping) else {"loss": found}

    return step


def check_pass(dataset: Any, num_threads: Any, num_optimizers: int = 1) -> None:
    """Raise FleetError for arguments with which no pass can be made."""
    if not isinstance(dataset, Dataset):
        raise FleetError(
            f"expected a fleet.InMemoryDataset or fleet.QueueDataset, found {type(dataset).__name__}; for a DataLoader "
            "write the loop yourself, over fleet.prefetch(loader)"
        )
    if type(num_threads) is not int or num_threads < 1:
        raise FleetError(f"thread: expected a number of at least 1, found {num_threads!r}")
    if num_threads > 1 and num_optimizers > 1:
        raise FleetError(
            f"thread={num_threads}: a step of {num_optimizers} optimizers is made in one thread. Use thread=1, or one "
            "optimizer with a param group for each."
        )


def train(
    step: Step,
    dataset: Dataset,
    optimizers: Sequence[DistributedOptimizer],
    engine: Engine,
    num_threads: int,
    report: Report,
) -> Result:
    """Train for one pass. Each of `num_threads` threads trains on its own batches.

    Call `check_pass` before.
    """
    communicator = optimizers[0].communicator
    if num_threads > 1 and not communicator.takes_threads:
        raise FleetError(
            f"thread={num_threads}: in sync and hybrid mode, with max_staleness, and with SparseEmbedding(cache=...), "
            "a worker makes one step at a time. Use thread=1 and more workers, or async, half_async or geo mode "
            "(strategy.a_sync=True) without a cache."
        )

    communicator.has_threads = num_threads > 1

    def run(batches: Iterator[Batch]) -> None:
        for batch in engine.prefetch(batches):
            communicator.freshen()  # needed if only parts of the model are called
            values = step(batch)
            loss = _loss(values)
            if num_threads > 1:
                optimizers[0].step_apart(loss)
            else:
                loss.backward()  # type: ignore[no-untyped-call]
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            report.note(batch, values)

    try:
        return _run_pass(dataset, run, num_threads, report, communicator.leave_thread, counts_rest=True)
    finally:
        if num_threads > 1:
            communicator.end_threads()


def infer(
    step: Step,
    dataset: Dataset,
    model: torch.nn.Module,
    engine: Engine,
    num_threads: int,
    report: Report,
    leave_thread: Callable[[], None],
) -> Result:
    """Run one pass without gradients, with the model in eval mode. Creates no rows. Call `check_pass` before."""
    sums: dict[str, tuple[float, int]] = {}
    lock = threading.Lock()

    def run(batches: Iterator[Batch]) -> None:
        with torch.no_grad():  # applies to this thread only
            for batch in engine.prefetch(batches):
                values = step(batch)
                with lock:
                    for name, value in numbers(values).items():
                        total, num = sums.get(name, (0.0, 0))
                        sums[name] = total + value * batch.num_samples, num + batch.num_samples
                report.note(batch, values)

    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        result = _run_pass(dataset, run, num_threads, report, leave_thread)
    finally:
        for module in was_training:
            module.training = True
    result.mean = {name: total / max(1, num) for name, (total, num) in sums.items()}
    return result


def _run_pass(
    dataset: Dataset,
    run: Callable[[Iterator[Batch]], None],
    num_threads: int,
    report: Report,
    leave_thread: Callable[[], None],
    counts_rest: bool = False,
) -> Result:
    """Run a pass in the calling thread, or in several threads: then the first error ends all of them, and is raised
    here. `counts_rest`: count the samples that `run` leaves over, in one thread.
    """
    batches = dataset.iterate()
    report.begin()
    try:
        if num_threads == 1:
            run(batches)
            if counts_rest:
                for _ in batches:  # counts what is left; nothing in most modes
                    pass
                report.result.unused = batches.num_samples_taken - report.result.samples
        else:
            _run_in_threads(batches, run, num_threads, leave_thread)
    finally:
        batches.close()
        report.close()
    return report.end()


def _run_in_threads(
    batches: BatchIterator, run: Callable[[Iterator[Batch]], None], num_threads: int, leave_thread: Callable[[], None]
) -> None:
    def work(own: BatchIterator) -> None:
        try:
            run(own)
        finally:
            leave_thread()

    def on_end() -> None:
        if threads.error is not None:
            batches.close()  # ends the other threads

    works = [partial(work, batches.fork()) for _ in range(num_threads)]
    threads = BackgroundThreads(works, on_end=on_end, daemon=False)
    threads.start()
    threads.join()
    threads.check()


def _loss(values: Values) -> torch.Tensor:
    loss = values.get("loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise FleetError(
            "the step must return the loss, a tensor with one number and a gradient, or a dict with it as 'loss'; "
            f"found {type(loss).__name__} among {', '.join(values)}"
        )
    return loss
