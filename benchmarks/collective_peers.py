"""Collective training beside its rivals: GPT-2-small, BERT-base and ResNet-50 by torchfleet and by other libraries.

python -m benchmarks.collective_peers --json                             one GPU, or 2 and 4 ranks on CPUs with --cpu
python -m benchmarks.collective_peers --cpu --small --ranks 2 --json     small models: what the libraries cost
torchrun --nproc_per_node 8 -m benchmarks.collective_peers --torchrun --json     several GPUs: the same table, with MFU

For each model and number of ranks: samples per second of all ranks and processor time of a step (medians of rounds in
turns), memory, lines of code, and the loss after some steps on the same batches. Memory is the most that tensors of
a contender took in those steps, its model and optimizer included, as torch's allocator counts it, on a GPU and on a
CPU; `rss` is the most resident memory of a process with that contender alone, modules and all. Of ranks on CPUs both
are medians. Plain data parallelism is beside DDP, Accelerate and Lightning's Fabric; sharding (stage 3) beside FSDP2
and DeepSpeed, on GPUs under autocast as FSDP2 is; `fleet_pure`, stage 3 with use_pure_bf16, beside FSDP2 with a policy
that has everything in bfloat16 (`fsdp2_pure`). A library that is not installed is left out.

On one rank torchfleet exchanges and shards nothing, while DDP and FSDP2 are in place: ratios to them show only that.
The rival of one rank is `hand`, a plain loop.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peer_ranks import measured, ratios, wanted
from benchmarks.peer_trainings import FAMILIES, IN_FLOAT32
from benchmarks.rank_jobs import hand_over, run_ranks
from benchmarks.timing import log, report

MODELS = ("gpt2", "bert", "resnet50")
_OF_ALL = ("_mib", "_cpu_s")  # numbers of ranks whose median counts; of others, those of rank 0


# In a rank


def _join(chosen: argparse.Namespace) -> None:
    """Make the process group that all libraries use, as torchrun's environment says. Ranks may share a GPU."""
    shares = False
    if not chosen.cpu:
        num = torch.cuda.device_count()
        shares = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > num
        os.environ["LOCAL_RANK"] = str(int(os.environ.get("LOCAL_RANK", "0")) % num)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if chosen.cpu or shares else "nccl")


def families(chosen: argparse.Namespace) -> list[str]:
    """Ranks that share a GPU talk over gloo, which cannot exchange shards in GPU memory."""
    if chosen.cpu:
        return list(IN_FLOAT32)
    shares_gpu = dist.is_initialized() and dist.get_backend() == "gloo"
    return ["replicated"] if shares_gpu else list(FAMILIES)


# The table


def cells(chosen: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(model.ranks, its numbers), each family in processes of its own; resident memory by one start per contender."""
    arguments = [option for option in sys.argv[1:] if option != "--json"]
    for name in chosen.model:
        for size in chosen.ranks:
            found: dict[str, Any] = {}
            for family in families(chosen):
                log(f"{name}, {size} ranks, {family}")
                found |= _run(arguments, name, family, size, chosen)
                for own in wanted(family, size, chosen) if chosen.cpu else ():
                    alone = _run([*arguments, "--rounds", "0"], name, family, size, chosen, own)
                    found[f"{own}_rss_mib"] = alone[f"{own}_rss_mib"]
            yield f"{name}.{size}", found


def _run(
    arguments: list[str], name: str, family: str, size: int, chosen: argparse.Namespace, own: str = ""
) -> dict[str, Any]:
    """What the ranks have measured; `own`: of this contender alone."""
    command = [sys.executable, "-m", "benchmarks.collective_peers", *arguments, "--worker", f"{name}:{family}:{own}"]
    extra = [] if chosen.cpu else [{"FLEET_DEVICE": ""}] * size
    ranks = run_ranks([command] * size, 600, extra)
    return {
        key: statistics.median(rank[key] for rank in ranks) if key.endswith(_OF_ALL) else value
        for key, value in ranks[0].items()
    }


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
        hand_over(measured(name, family, chosen))
        dist.destroy_process_group()
        return
    table: dict[str, Any] = {}
    if chosen.torchrun:
        _join(chosen)
        for name in chosen.model:
            found: dict[str, Any] = {}
            for family in families(chosen):
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
