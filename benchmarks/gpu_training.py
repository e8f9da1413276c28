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
        return Bert(SIZES[self.size], self._vocabulary, max(self.length, 64)).to(self.device)

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
        return (resnet50() if self._side > 32 else resnet_small(num_blocks=1)).to(self.device)

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

    def step(self, batch: Batch) -> None:
        self.task.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def ours(task: TrainingTask, **fields: Any) -> Iterator[Step]:
    """The steps of a job of one rank with these fields of DistributedStrategy."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    try:
        job = _Job(task)
        yield job.step
    finally:
        fleet.stop_worker()
        job.model = job.optimizer = None  # whoever still holds the step holds no more than that
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
        with torch.autocast(kind, torch.float16, enabled=is_amp):
            loss = task.loss(model, batch)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

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
    """Over about so many seconds, three steps at least; the GPU is waited for at the end alone."""
    taken = _seconds(task, step, batch, 1)
    num = min(500, max(3, round(seconds / taken)))
    return num * _size(batch) / _seconds(task, step, batch, num)


def _seconds(task: TrainingTask, step: Step, batch: Batch, num: int) -> float:
    wait(task.device)
    start = time.perf_counter()
    for _ in range(num):
        step(batch)
    wait(task.device)
    return time.perf_counter() - start


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def in_turns(task: TrainingTask, contenders: Mapping[str, Step], rounds: int, seconds: float) -> dict[str, float]:
    """Samples per second of each, the median over rounds taken in turns."""
    batch = task.batch(task.batch_size)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        for _ in range(3):
            step(batch)
    for turn in range(rounds):
        for name, step in contenders.items():
            found[name].append(samples_per_s(task, step, batch, seconds))
        log(f"  round {turn + 1}/{rounds}: " + ", ".join(f"{name} {each[-1]:,.1f}/s" for name, each in found.items()))
    return {name: statistics.median(each) for name, each in found.items()}


def peak_bytes(task: TrainingTask, step: Step, size: int, steps: int = 2) -> int | None:
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


def largest_batch(peak: Callable[[int], int | None], cap: int, small: tuple[int, int], most: int) -> int:
    """The largest batch that fits into `cap` bytes, to one in fifty, or `most`; `peak(size)` is None if it does not.

    Two small batches show how memory grows; then sizes around the extrapolation are tried.
    """
    lower, upper = (peak(size) for size in small)
    if lower is None or upper is None:
        raise SystemExit(f"not even a batch of {small} fits into {cap / 2**30:.0f} GiB")
    slope = (upper - lower) / (small[1] - small[0])
    fits, too_large = small[1], most + 1
    guess = most if slope <= 0 else int(small[1] + (cap - upper) / slope)
    for _ in range(10):
        guess = min(max(guess, fits + 1), too_large - 1)
        if too_large - fits <= max(1, fits // 50):
            break
        found = peak(guess)
        log(f"    batch {guess}: " + ("does not fit" if found is None else f"{found / 2**30:.2f} GiB"))
        if found is None:
            too_large = guess
            guess = max((fits + guess) // 2, int(0.96 * guess))
        else:
            fits = guess
            guess = (fits + too_large) // 2 if too_large <= most else int(1.04 * guess) + 1
    return fits
