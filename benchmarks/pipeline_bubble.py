"""The idle time of a pipeline's ranks, measured beside what its order and the formula say.

    python -m benchmarks.pipeline_bubble --json             8 ranks over gloo, 16 micro-batches
    python -m benchmarks.pipeline_bubble --json --quick

Stages sleep instead of computing, so that as many ranks as wanted share few cores: a forward pass of a micro-batch
through a rank takes `--milliseconds`, a backward pass twice as long, half of it for gradients of weights.

For each schedule: `*_idle`, 1 - busy / time of the slowest rank, the median over batches; `*_order`, the same from the
order of actions, if sending takes no time; `*_formula`, where there is one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rank_jobs import hand_over, run_own_ranks
from benchmarks.timing import log, report
from torchfleet.collective.pipeline.orders import Action, needed, orders

MODES = {"1F1B": 1, "F-then-B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 1, "ZBVZeroBubble": 2}
PASSES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # how long a micro-batch takes in one stage


def spans(mode: str, size: int, num: int, vpp_degree: int = 1) -> list[tuple[float, float, float]]:
    """(start, end, busy) of each rank, if sending takes no time: it computes in its order, as soon as it can."""
    every, num_stages = orders(mode, size, vpp_degree, num), size * vpp_degree
    ends: dict[Action, float] = {}
    clocks, starts, places = [0.0] * size, [-1.0] * size, [0] * size
    while any(place < len(own) for place, own in zip(places, every, strict=True)):
        before = list(places)
        for rank, own in enumerate(every):
            while places[rank] < len(own) and needed(own[places[rank]], num_stages) <= ends.keys():
                action = own[places[rank]]
                start = max([clocks[rank], *(ends[other] for other in needed(action, num_stages))])
                starts[rank] = start if starts[rank] < 0 else starts[rank]
                clocks[rank] = start + PASSES[action.kind]
                ends[action._replace(kind="B") if action.kind == "I" else action] = clocks[rank]
                places[rank] += 1
        assert places != before, "stages wait for each other"
    busy = [sum(PASSES[action.kind] for action in own) for own in every]
    return list(zip(starts, clocks, busy, strict=True))


def idle_of_order(mode: str, size: int, num: int, vpp_degree: int) -> float:
    found = spans(mode, size, num, vpp_degree)
    return 1 - found[0][2] / max(end for _, end, _ in found)


def idle_of_formula(mode: str, size: int, num: int, vpp_degree: int) -> float | None:
    return None if mode.endswith("ZeroBubble") else (size - 1) / (vpp_degree * num + size - 1)


# In a rank


class _Sleep(torch.autograd.Function):
    """Returns its argument; forward sleeps `before` seconds, backward `after`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, before: float, after: float) -> torch.Tensor:
        ctx.seconds = after
        time.sleep(before)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Sleeper(torch.nn.Module):
    """A stage that sleeps as long in forward, in the backward pass of its input, and in that of its weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self._seconds = torch.nn.Parameter(torch.zeros(4)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = x + _Sleep.apply(self.weight, 0.0, self._seconds)  # type: ignore[no-untyped-call]
        return _Sleep.apply(moved, self._seconds, self._seconds)  # type: ignore[no-any-return,no-untyped-call]


def rank(mode: str, chosen: argparse.Namespace) -> dict[str, Any]:
    import torchfleet as fleet

    degree, num = MODES[mode], chosen.micro_batches
    configs = {"accumulate_steps": num, "schedule_mode": mode, "vpp_degree": degree}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(pipeline=True, pipeline_configs=configs))
    seconds = chosen.milliseconds / 1000 / degree
    stages = [Sleeper(seconds) for _ in range(degree * chosen.ranks)]
    model = fleet.distributed_model(torch.nn.Sequential(*stages))
    batch = torch.ones(num, 4)
    times = []
    for _ in range(chosen.rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        model.train_batch(batch, torch.zeros(num, 4), torch.nn.functional.mse_loss)  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    fleet.stop_worker()
    return {"times": times[1:]}


def measured(mode: str, chosen: argparse.Namespace) -> dict[str, Any]:
    log(f"{mode}, {chosen.ranks} ranks, {chosen.micro_batches} micro-batches")
    found = run_own_ranks("benchmarks.pipeline_bubble", mode, chosen.ranks)
    slowest = [max(times) for times in zip(*(result["times"] for result in found), strict=True)]
    busy = 3 * chosen.micro_batches * chosen.milliseconds / 1000
    size, num, degree = chosen.ranks, chosen.micro_batches, MODES[mode]
    numbers = {f"{mode}_idle": 1 - busy / statistics.median(slowest)}
    numbers[f"{mode}_order"] = idle_of_order(mode, size, num, degree)
    formula = idle_of_formula(mode, size, num, degree)
    return numbers if formula is None else {**numbers, f"{mode}_formula": formula}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--micro_batches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--quick", action="store_true", help="2 ranks, 4 micro-batches, two schedules")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.ranks, chosen.micro_batches, chosen.rounds, chosen.mode = 2, 4, 1, ["1F1B", "Interleaved1F1B"]
    if chosen.rank:
        hand_over(rank(chosen.rank, chosen))
        return
    result: dict[str, Any] = {"ranks": chosen.ranks, "micro_batches": chosen.micro_batches}
    for mode in chosen.mode:
        result |= measured(mode, chosen)
    report(result, chosen.json)


if __name__ == "__main__":
    main()
