"""`fleet plan --model` beside what ranks measure: bytes at rest, bytes in a step, and seconds of a step.

    python -m benchmarks.model_plan --json              2 ranks over gloo, a thread each
    python -m benchmarks.model_plan --json --quick

A stack of transformer layers is trained with Adam under data parallelism and sharding. For each strategy, planned and
measured: `*_rest_mb`, parameters, gradients and optimizer state; `*_step_mb`, with the most that torch has allocated in
forward and backward, by its profiler; `*_step_s`, a step, the median. The two units of the plan are measured in the
same run: `tflops`, of the matrix products of a layer, and `link_mb_per_s`, of an all-reduce. `*_planned_s` is computing
and exchange one after the other: an exchange beside computing is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.host_tensors import HostTensors
from benchmarks.rank_jobs import hand_over, run_own_ranks
from benchmarks.timing import log, report
from torchfleet.observe.plan.model_plan import plans, size_of

STRATEGIES = {"data parallelism": 0, "sharding, stage 1": 1, "sharding, stage 2": 2, "sharding, stage 3": 3}
SHAPES = {"full": (6, 256, 4, 128), "quick": (2, 64, 2, 32)}  # layers, width, samples, length
MB = 1e6


def make(shape: str) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    num, width, samples, length = SHAPES[shape]
    layers = [torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(num)]
    return torch.nn.Sequential(*layers), (torch.randn(samples, length, width),)


def full() -> Any:
    return make("full")


def quick() -> Any:
    return make("quick")


# In a rank


def rank(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    import torchfleet as fleet

    stage = STRATEGIES[name]
    settings = {"sharding": True, "sharding_configs": {"stage": stage}} if stage else {}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**settings))
    torch.manual_seed(0)
    whole, (batch,) = make(chosen.shape)
    model: Any = fleet.distributed_model(whole)
    optimizer: Any = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()))

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(2):  # in the second, data parallelism makes its buckets anew, in the order of backward
        step()
    found: dict[str, float] = {"rest": held(model, optimizer)}
    with HostTensors() as host:
        model(batch).square().mean().backward()
    found["step"] = found["rest"] + batch.nbytes + host.peak  # the gradients of the step before are added to
    optimizer.zero_grad()
    found["seconds"] = median_of(chosen.rounds, step)
    found["flops"], found["link"] = reached_flops(chosen), reached_link(sum(p.numel() for p in whole.parameters()))
    fleet.stop_worker()
    return found


def held(model: Any, optimizer: Any) -> int:
    """Bytes of parameters, gradients and optimizer state on this rank."""
    own = [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in [*own, *state])


def median_of(rounds: int, call: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def reached_flops(chosen: argparse.Namespace) -> float:
    """Operations a second of the largest matrix products of a layer."""
    _, width, samples, length = SHAPES[chosen.shape]
    rows, weight = torch.randn(samples * length, width), torch.randn(width, 4 * width)
    return 2.0 * rows.numel() * 4 * width / median_of(chosen.rounds, lambda: rows @ weight)


def reached_link(numel: int) -> float:
    """Bytes a second that each rank sends in an all-reduce."""
    tensor, size = torch.zeros(numel), dist.get_world_size()
    return 2 * tensor.nbytes * (size - 1) / size / median_of(5, lambda: dist.all_reduce(tensor))


# Beside the plan


def measured(name: str, chosen: argparse.Namespace) -> dict[str, float]:
    log(f"{name}, {chosen.ranks} ranks")
    found = run_own_ranks("benchmarks.model_plan", name, chosen.ranks)
    most = {key: max(result[key] for result in found) for key in ("rest", "step", "seconds")}
    return {**most, **{key: min(result[key] for result in found) for key in ("flops", "link")}}


def beside(name: str, planned: Any, flops: float, found: dict[str, float]) -> dict[str, float]:
    seconds = flops / found["flops"] + planned.exchanged_bytes / found["link"]
    key = name.replace(", ", "_").replace(" ", "_")
    return {
        f"{key}_planned_rest_mb": planned.state_bytes / MB,
        f"{key}_rest_mb": found["rest"] / MB,
        f"{key}_planned_step_mb": planned.bytes / MB,
        f"{key}_step_mb": found["step"] / MB,
        f"{key}_planned_s": seconds,
        f"{key}_step_s": found["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--strategy", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--quick", action="store_true", help="a small model, two strategies")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.shape = "quick" if chosen.quick else "full"
    if chosen.quick:
        chosen.rounds, chosen.strategy = 2, ["data parallelism", "sharding, stage 3"]
    if chosen.rank:
        hand_over(rank(chosen.rank, chosen))
        return
    size = size_of(f"benchmarks.model_plan:{chosen.shape}")
    every = {one.strategy: one for one in plans(size, chosen.ranks, "adam")}
    result: dict[str, Any] = {"ranks": chosen.ranks, "parameter_mb": size.parameters / MB, "gflop": size.flops / 1e9}
    for name in chosen.strategy:
        found = measured(name, chosen)
        result |= {"tflops": found["flops"] / 1e12, "link_mb_per_s": found["link"] / MB}
        result |= beside(name, every[name], size.flops, found)
    report(result, chosen.json)


if __name__ == "__main__":
    main()
