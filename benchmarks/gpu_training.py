"""Trainings that collective_gpu.py compares, through torchfleet and written by hand; their speed and memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchfleet as fleet
from benchmarks.timing import log
from examples.bert.model import SIZES, Bert
from examples.resnet.model import resnet50, resnet_small

VOCABULARY = 30_522  # words, as in the published BERT
Batch = Mapping[str, torch.Tensor]
Step = Callable[[Batch], object]


class TrainingTask:
    """A model and batches for it, on `device`."""

    def __init__(self, device: torch.device, batch: int) -> None:
        self.device, self.batch_size = device, batch

    def model(self) -> torch.nn.Module:
        raise NotImplementedError

    def batch(self, size: int) -> Batch:
        raise NotImplementedError

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)


class BertTask(TrainingTask):
    """Masked words of random sequences; 15 % of them are told, as in examples/bert."""

    def __init__(self, device: torch.device, batch: int, size: str, length: int) -> None:
        super().__init__(device, batch)
        self.size, self.length = size, length
        self._vocabulary = VOCABULARY if size in ("base", "large") else 100

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        with self.device:  # random numbers of a CPU would take seconds
            return Bert(SIZES[self.size], self._vocabulary, max(self.length, 64))

    def batch(self, size: int) -> Batch:
        def drawn(most: int, length: int) -> torch.Tensor:
            return torch.randint(0, most, (size, length), device=self.device)

        num = max(1, round(0.15 * self.length))
        return {
            "input_ids": drawn(self._vocabulary, self.length),
            "positions": drawn(self.length, num),
            "labels": drawn(self._vocabulary, num),
        }

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(**batch).loss
        return found


class ResNetTask(TrainingTask):
    """Random images of `side` pixels: ResNet-50, or a small network for small ones."""

    def __init__(self, device: torch.device, batch: int, side: int) -> None:
        super().__init__(device, batch)
        self._side = side

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        with self.device:
            return resnet50() if self._side > 32 else resnet_small(num_blocks=1)

    def batch(self, size: int) -> Batch:
        images = torch.randn(size, 3, self._side, self._side, device=self.device)
        return {"images": images, "labels": torch.randint(0, 10, (size,), device=self.device)}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["images"]), batch["labels"])

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class _Job:
    def __init__(self, task: TrainingTask) -> None:
        self.task = task
        self.model: Any = fleet.distributed_model(task.model())
        self.optimizer: Any = fleet.distributed_optimizer(task.optimizer(self.model))

    def step(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad()  # first: a step before may have ended for want of memory
        loss = self.task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


@contextmanager
def ours(task: TrainingTask, **fields: Any) -> Iterator[Step]:
    """The steps of a job of one rank with these fields of DistributedStrategy."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    try:
        job = _Job(task)
        yield job.step
    finally:
        fleet.stop_worker()
        job.model = job.optimizer = None  # what still refers to the step keeps no more memory than that
        free()


def by_hand(task: TrainingTask, is_amp: bool, with_ddp: bool) -> Step:
    """The same in plain PyTorch, as one would write it for one GPU; with_ddp: as one would for several."""
    model: torch.nn.Module = task.model()
    if with_ddp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=False)
    optimizer = task.optimizer(model)
    kind = task.device.type
    scaler = torch.amp.GradScaler(kind, init_scale=32768.0, growth_interval=1000, enabled=is_amp)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        with torch.autocast(kind, torch.float16, enabled=is_amp):
            loss = task.loss(model, batch)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    return step


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def samples_per_s(task: TrainingTask, step: Step, batch: Batch, seconds: float) -> float:
    """Over about `seconds`, two steps at least; waits for the GPU at the end alone."""
    return len(next(iter(batch.values()))) / seconds_of(lambda: step(batch), task.device, seconds)


def seconds_of(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The mean time of one run of `work`, over about `seconds`."""
    num = min(500, max(2, round(seconds / _timed(work, device, 1))))
    return _timed(work, device, num) / num


def _timed(work: Callable[[], object], device: torch.device, num: int) -> float:
    wait(device)
    start = time.perf_counter()
    for _ in range(num):
        work()
    wait(device)
    return time.perf_counter() - start


class Limit:
    """The time that a part of the benchmark may take, from now on."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end


def in_turns(
    task: TrainingTask, contenders: Mapping[str, Step], rounds: int, seconds: float, limit: Limit
) -> dict[str, float]:
    """Samples per second of each, the median over rounds taken in turns, fewer when time is up."""
    batch = task.batch(task.batch_size)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        for _ in range(4):  # a CUDA graph is recorded in the second or third
            step(batch)
    for turn in range(rounds):
        for name, step in contenders.items():
            found[name].append(samples_per_s(task, step, batch, seconds))
        log(f"  round {turn + 1}/{rounds}: " + ", ".join(f"{name} {each[-1]:,.1f}/s" for name, each in found.items()))
        if limit.is_over:
            log("  time is up")
            break
    return {name: statistics.median(each) for name, each in found.items()}


def peak_bytes(task: TrainingTask, step: Step, size: int, steps: int = 1) -> int | None:
    """Of memory on the device over some steps with a batch of `size`; None: there was not enough."""
    try:
        free()
        batch = task.batch(size)
        for _ in range(steps):
            step(batch)
        wait(task.device)
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() if task.device.type == "cuda" else 0


def largest_batch(peak: Callable[[int], int | None], first: int, most: int, limit: Limit, share: float = 1 / 24) -> int:
    """The largest batch for which `peak` finds memory, to a `share` of it: by doubling from `first`, then by bisection.

    `most` if that fits. When time is up, the largest that was seen to fit; 0: not even a single sample does.
    """
    fits, too_large = 0, most + 1
    size = min(first, most)
    while too_large - fits > max(1, share * fits) and not (limit.is_over and fits):
        found = peak(size)
        log(f"    batch {size}: " + ("does not fit" if found is None else f"{found / 2**30:.2f} GiB"))
        if found is None:
            too_large = size
        else:
            fits = size
        size = min(2 * fits, most) if fits and too_large > most else (fits + too_large) // 2
    return fits
