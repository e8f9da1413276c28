"""Collective training beside its rivals: GPT-2-small, BERT-base and ResNet-50 by torchfleet and by other libraries.

python -m benchmarks.collective_peers --json                             one GPU, or 2 and 4 ranks on CPUs with --cpu
python -m benchmarks.collective_peers --cpu --small --ranks 2 --json     small models: what the libraries cost
torchrun --nproc_per_node 8 -m benchmarks.collective_peers --torchrun --json     several GPUs: the same table, with MFU

For each model and number of ranks: samples per second of all ranks (medians of rounds taken in turns), peak memory of
rank 0 in MiB, lines of code, and the loss after some steps on the same batches. Ratios are of ours over the rival's:
speed, and memory. Plain data parallelism is beside DDP, Accelerate and Lightning's Fabric; sharding (stage 3) beside
FSDP2 and DeepSpeed. A library that is not installed is left out.

On one rank torchfleet exchanges and shards nothing, while DDP and FSDP2 are in place: ratios to them show only that.
The rival of one rank is `hand`, a plain loop.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import torchfleet as fleet
from benchmarks.gpu_training import BertTask, ResNetTask, TrainingTask, free, wait
from benchmarks.peer_trainings import FAMILIES, Contender, GPT2Task, Step, contenders, lines_of
from benchmarks.rank_jobs import run_ranks
from benchmarks.timing import log, report

MODELS = ("gpt2", "bert", "resnet50")
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bfloat16, dense, as the vendor gives them
_MIB = 1 << 20


def task_of(name: str, device: torch.device, chosen: argparse.Namespace) -> TrainingTask:
    batch = chosen.batch
    if name == "gpt2":
        sizes = (2, 128, 1000, 32) if chosen.small else (12, 768, 50257, chosen.length)
        return GPT2Task(device, batch or 8, *sizes)
    if name == "bert":
        return BertTask(device, batch or 16, *(("tiny", 32) if chosen.small else ("base", chosen.length)))
    return ResNetTask(device, batch or 32, 32 if chosen.small else 224)


# In a rank


def measured(name: str, family: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """The numbers of rank 0 for one model and one family. All ranks call it together; the group exists."""
    size = dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if not chosen.cpu else torch.device("cpu")
    task = task_of(name, device, chosen)
    found: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    torch.manual_seed(1 + dist.get_rank())
    batches = [task.batch(task.batch_size) for _ in range(chosen.checked)]
    for own, make in wanted(family, size, chosen).items():
        try:
            steps[own], numbers = _checked(own, make, task, batches)
            found |= numbers
        except Exception as error:  # of another library: the others are measured all the same
            if own.startswith("fleet"):
                raise
            log(f"  {own} failed: {error}")
            found[f"{own}_failed"] = f"{type(error).__name__}: {error}"[:200]
    if chosen.rounds and steps:
        found |= _speeds(task, steps, chosen)
    if chosen.cpu and len(steps) == 1:  # the peak of the process: of one contender alone
        found[f"{next(iter(steps))}_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MIB
    if any(own.startswith("fleet") for own in steps):
        fleet.stop_worker()
    if dist.get_rank() == 0:  # what is measured is told at once, in case that time runs out
        log(f"{name}, {family}: {json.dumps({key: round(value, 4) for key, value in _numbers(found).items()})}")
    return found


def _numbers(found: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in {**found, **ratios(found)}.items() if isinstance(value, (int, float))}


def _checked(own: str, make: Contender, task: TrainingTask, batches: list[Any]) -> tuple[Step, dict[str, Any]]:
    """A contender after its first steps: the loss, the memory that it took, and its lines of code."""
    free()
    is_gpu = task.device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_gpu else 0
    step = make(task, is_gpu)
    torch.manual_seed(2)  # for dropout
    for batch in batches:
        loss = step(batch)
    wait(task.device)
    numbers = {f"{own}_loss": float(loss.detach()), f"{own}_lines": lines_of(make)}
    if is_gpu:
        numbers[f"{own}_mib"] = (torch.cuda.max_memory_allocated() - before) / _MIB
    return step, numbers


def wanted(family: str, size: int, chosen: argparse.Namespace) -> dict[str, Contender]:
    every = contenders(family, size)
    return {own: make for own, make in every.items() if not chosen.contender or own in chosen.contender}


def _speeds(task: TrainingTask, steps: dict[str, Step], chosen: argparse.Namespace) -> dict[str, Any]:
    """Samples per second of all ranks together, by medians over rounds in turns; of a GPU the share of its peak."""
    size, batch = dist.get_world_size(), task.batch(task.batch_size)
    num = _agreed(chosen.seconds / _timed(next(iter(steps.values())), batch, 2, task.device))
    times: dict[str, list[float]] = {own: [] for own in steps}
    for _ in range(chosen.rounds):
        for own, step in steps.items():
            times[own].append(_timed(step, batch, num, task.device))
    speeds = {own: size * task.batch_size / statistics.median(each) for own, each in times.items()}
    found: dict[str, Any] = {f"{own}_samples_per_s": speed for own, speed in speeds.items()}
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


def _timed(step: Step, batch: Any, num: int, device: torch.device) -> float:
    """Seconds of a step, the mean over `num`."""
    dist.barrier()
    wait(device)
    start = time.perf_counter()
    for _ in range(num):
        step(batch)
    wait(device)
    return (time.perf_counter() - start) / num


def flops_of(task: TrainingTask) -> float:
    """Of forward and backward of one sample: products of matrices and convolutions, backward twice as many."""
    model, batch = task.model(), task.batch(1)
    with FlopCounterMode(display=False) as counter:
        task.loss(model, batch)
    return 3.0 * float(counter.get_total_flops())


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _join(chosen: argparse.Namespace) -> None:
    """Make the process group that all libraries use, as torchrun's environment says. Ranks may share a GPU."""
    shares = False
    if not chosen.cpu:
        num = torch.cuda.device_count()
        shares = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > num
        os.environ["LOCAL_RANK"] = str(int(os.environ.get("LOCAL_RANK", "0")) % num)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if chosen.cpu or shares else "nccl")


def _families(chosen: argparse.Namespace) -> list[str]:
    """Ranks that share a GPU talk over gloo, which cannot exchange shards in GPU memory."""
    return list(FAMILIES) if chosen.cpu or dist.get_backend() == "nccl" else ["replicated"]


# The table


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Ours over each rival of its family: samples per second, and memory."""
    made: dict[str, float] = {}
    for family in FAMILIES.values():
        ours, *rivals = family
        for rival in rivals:
            for unit, key in (("samples_per_s", f"ratio_to_{rival}"), ("mib", f"memory_ratio_to_{rival}")):
                if f"{ours}_{unit}" in found and f"{rival}_{unit}" in found:
                    made[key] = found[f"{ours}_{unit}"] / found[f"{rival}_{unit}"]
    return made


def cells(chosen: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(model.ranks, its numbers), each family in processes of its own; memory of hosts by one start per contender."""
    arguments = [option for option in sys.argv[1:] if option != "--json"]
    for name in chosen.model:
        for size in chosen.ranks:
            found: dict[str, Any] = {}
            for family in FAMILIES:
                log(f"{name}, {size} ranks, {family}")
                found |= _run(arguments, name, family, size, chosen)
                for own in wanted(family, size, chosen) if chosen.cpu else ():
                    alone = _run([*arguments, "--rounds", "0"], name, family, size, chosen, own)
                    found[f"{own}_mib"] = alone[f"{own}_mib"]
            yield f"{name}.{size}", found


def _run(
    arguments: list[str], name: str, family: str, size: int, chosen: argparse.Namespace, own: str = ""
) -> dict[str, Any]:
    """What rank 0 has measured; `own`: of this contender alone."""
    command = [sys.executable, "-m", "benchmarks.collective_peers", *arguments, "--worker", f"{name}:{family}:{own}"]
    extra = [] if chosen.cpu else [{"FLEET_DEVICE": ""}] * size
    return run_ranks([command] * size, 600, extra)[0]


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collective_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", action="append", choices=MODELS, help="this one alone; may be given several times")
    names = [name for family in FAMILIES.values() for name in family]
    parser.add_argument(
        "--contender", action="append", choices=names, help="this one alone; may be given several times"
    )
    parser.add_argument("--ranks", type=int, action="append", help="default 1 on a GPU, 2 and 4 on CPUs")
    parser.add_argument("--cpu", action="store_true", help="ranks on CPUs over gloo, in float32")
    parser.add_argument("--small", action="store_true", help="small models, in which the libraries' own cost shows")
    parser.add_argument(
        "--batch", type=int, default=0, help="samples per rank; default 8 (gpt2), 16 (bert), 32 (resnet50)"
    )
    parser.add_argument("--length", type=int, default=512, help="words of a sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each contender in a round")
    parser.add_argument("--checked", type=int, default=5, help="steps after which losses are compared")
    parser.add_argument("--torchrun", action="store_true", help="this process is a rank that torchrun started")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args(arguments)
    chosen.model = chosen.model or list(MODELS)
    chosen.ranks = chosen.ranks or ([2, 4] if chosen.cpu else [1])
    if not chosen.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU: --cpu measures ranks on CPUs")
    return chosen


def main() -> None:
    chosen = options()
    if chosen.cpu:
        os.environ["FLEET_DEVICE"] = "cpu"
    if chosen.worker:
        _join(chosen)
        name, family, own = chosen.worker.split(":")
        chosen.contender = [own] if own else chosen.contender
        print("RESULT " + json.dumps(measured(name, family, chosen)), flush=True)
        dist.destroy_process_group()
        return
    table: dict[str, Any] = {}
    if chosen.torchrun:
        _join(chosen)
        for name in chosen.model:
            found: dict[str, Any] = {}
            for family in _families(chosen):
                found |= measured(name, family, chosen)
            table |= {
                f"{name}.{dist.get_world_size()}.{key}": value for key, value in {**found, **ratios(found)}.items()
            }
        is_first = dist.get_rank() == 0
        dist.destroy_process_group()
        if not is_first:
            return
    else:
        for cell, found in cells(chosen):
            table |= {f"{cell}.{key}": value for key, value in {**found, **ratios(found)}.items()}
    device = "cpu" if chosen.cpu else torch.cuda.get_device_name()
    if any(cell.split(".")[1] == "1" for cell in table):
        table["one_rank"] = "ours exchanges and shards nothing there; ratio_to_hand is the fair one"
    report({**table, "torch": torch.__version__, "device": device, "batch": chosen.batch}, chosen.json)


if __name__ == "__main__":
    main()
