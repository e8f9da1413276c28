"""What one rank of collective_peers.py measures: loss, memory and speed of the contenders, in turns."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import torchfleet as fleet
from benchmarks.gpu_training import BertTask, ResNetTask, TrainingTask, free, wait
from benchmarks.host_tensors import HostTensors
from benchmarks.peer_trainings import FAMILIES, Contender, GPT2Task, Step, contenders, lines_of
from benchmarks.timing import log

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bfloat16, dense, as the vendor gives them
# Ratios of ours to a rival's, above 1 where ours has more: what they are of, and whether less is better.
_RATIOS = {"samples_per_s": ("ratio_to", False), "cpu_s": ("cpu_ratio_to", True),
           "mib": ("memory_ratio_to", False), "rss_mib": ("rss_ratio_to", False)}  # fmt: skip
_MIB = 1 << 20


def task_of(name: str, device: torch.device, chosen: argparse.Namespace) -> TrainingTask:
    batch = chosen.batch
    if name == "gpt2":
        sizes = (2, 128, 1000, 32) if chosen.small else (12, 768, 50257, chosen.length)
        return GPT2Task(device, batch or 8, *sizes)
    if name == "bert":
        return BertTask(device, batch or 16, *(("tiny", 32) if chosen.small else ("base", chosen.length)))
    return ResNetTask(device, batch or 32, 32 if chosen.small else 224)


def measured(name: str, family: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """The numbers of this rank for one model and one family. All ranks call it together; the group exists."""
    size = dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if not chosen.cpu else torch.device("cpu")
    task = task_of(name, device, chosen)
    found: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    torch.manual_seed(1 + dist.get_rank())
    batches = [task.batch(task.batch_size) for _ in range(chosen.checked)]
    if device.type == "cuda":
        _warm(task, batches[0])
    for own, make in wanted(family, size, chosen).items():
        try:
            steps[own], numbers = _checked(own, make, task, batches, counts_tensors=bool(chosen.rounds))
            found |= numbers
        except Exception as error:  # of another library: the others are measured all the same
            if own.startswith("fleet"):
                raise
            log(f"  {own} failed: {error}")
            found[f"{own}_failed"] = f"{type(error).__name__}: {error}"[:200]
    if chosen.rounds and steps:
        found |= _speeds(task, steps, chosen)
    if chosen.cpu and not chosen.rounds and len(steps) == 1:  # the peak of the process: of one contender alone
        found[f"{next(iter(steps))}_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MIB
    if any(own.startswith("fleet") for own in steps):
        fleet.stop_worker()
    if dist.get_rank() == 0:  # what is measured is told at once, in case that time runs out
        log(f"{name}, {family}: {json.dumps({key: round(value, 4) for key, value in _numbers(found).items()})}")
    return found


def _warm(task: TrainingTask, batch: Any) -> None:
    """A pass of no contender: the GPU's libraries take memory when they are first used, and keep it."""
    with torch.autocast(task.device.type, torch.bfloat16):
        loss = task.loss(task.model(), batch)
    loss.backward()  # type: ignore[no-untyped-call]


def wanted(family: str, size: int, chosen: argparse.Namespace) -> dict[str, Contender]:
    every = contenders(family, size)
    return {own: make for own, make in every.items() if not chosen.contender or own in chosen.contender}


def ratios(found: Mapping[str, Any]) -> dict[str, float]:
    """Ours and each rival of its family. `ratio_to`, `cpu_ratio_to`: speed, by the clock and by processor time, above 1
    where ours is faster; `memory_ratio_to`, `rss_ratio_to`: memory, above 1 where ours takes more."""
    made: dict[str, float] = {}
    for ours, *rivals in FAMILIES.values():
        for rival in rivals:
            for unit, (name, is_inverse) in _RATIOS.items():
                if f"{ours}_{unit}" in found and f"{rival}_{unit}" in found:
                    ratio = found[f"{ours}_{unit}"] / found[f"{rival}_{unit}"]
                    made[f"{name}_{rival}"] = 1 / ratio if is_inverse else ratio
    return made


def _numbers(found: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in {**found, **ratios(found)}.items() if isinstance(value, (int, float))}


def _checked(
    own: str, make: Contender, task: TrainingTask, batches: list[Any], counts_tensors: bool
) -> tuple[Step, dict[str, Any]]:
    """A contender after its first steps: the loss, the most memory of its tensors, and its lines of code."""
    free()
    is_gpu = task.device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_gpu else 0
    host = HostTensors() if counts_tensors and not is_gpu else None
    with host or nullcontext():
        step = make(task, is_gpu)
        torch.manual_seed(2)  # for dropout
        for batch in batches:
            loss = step(batch)
        wait(task.device)
    numbers = {f"{own}_loss": float(loss.detach()), f"{own}_lines": lines_of(make)}
    if is_gpu:
        numbers[f"{own}_mib"] = (torch.cuda.max_memory_allocated() - before) / _MIB
    elif host is not None:
        numbers[f"{own}_mib"] = host.peak / _MIB
    return step, numbers


def _speeds(task: TrainingTask, steps: dict[str, Step], chosen: argparse.Namespace) -> dict[str, Any]:
    """By medians over rounds in turns: samples per second of all ranks together, and processor time of this rank in a
    step, which other processes of a busy machine disturb less. Of a GPU also the share of its peak."""
    size, batch = dist.get_world_size(), task.batch(task.batch_size)
    num = _agreed(chosen.seconds / _timed(next(iter(steps.values())), batch, 2, task.device)[0])
    times: dict[str, list[tuple[float, float]]] = {own: [] for own in steps}
    for _ in range(chosen.rounds):
        for own, step in steps.items():
            times[own].append(_timed(step, batch, num, task.device))
    medians = {own: [statistics.median(each) for each in zip(*rounds, strict=True)] for own, rounds in times.items()}
    speeds = {own: size * task.batch_size / clock for own, (clock, _) in medians.items()}
    found: dict[str, Any] = {f"{own}_samples_per_s": speed for own, speed in speeds.items()}
    found |= {f"{own}_cpu_s": processor for own, (_, processor) in medians.items()}
    peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in _gpu_name(task.device)), None)
    if peak is not None:
        per_sample = flops_of(task)
        found |= {f"{own}_mfu": speed * per_sample / (size * peak) for own, speed in speeds.items()}
    return found


def _agreed(wanted: float) -> int:
    """A number of steps, the same on all ranks."""
    number = torch.tensor([max(2.0, wanted)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(number, 0)
    return int(number)


def _timed(step: Step, batch: Any, num: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a step by the clock and of the processor, the means over `num`."""
    dist.barrier()
    wait(device)
    start, busy = time.perf_counter(), time.process_time()
    for _ in range(num):
        step(batch)
    wait(device)
    return (time.perf_counter() - start) / num, (time.process_time() - busy) / num


def flops_of(task: TrainingTask) -> float:
    """Of forward and backward of one sample: products of matrices and convolutions, backward twice as many."""
    model, batch = task.model(), task.batch(1)
    with FlopCounterMode(display=False) as counter:
        task.loss(model, batch)
    return 3.0 * float(counter.get_total_flops())


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
