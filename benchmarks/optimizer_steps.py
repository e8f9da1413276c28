"""One step of LARS, LAMB, amp and stage 1 of sharding against torch's fused optimizers, on the same list of shapes.

python -m benchmarks.optimizer_steps --json                                        small, on the CPU
python -m benchmarks.optimizer_steps --device cuda --parameters 350e6 --json       shapes of BERT-Large

Steps alone: gradients are there already, and stay. Each contender has parameters of its own; they step in turns. A
ratio is a contender's time over its rival's. A roof is what the ratio would be if time were bytes moved: LAMB and LARS
need the norms of whole tensors before they move, and read them twice.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_training import wait
from benchmarks.timing import interleave, log, report
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.collective_job import CollectiveJob
from torchfleet.collective.strategies.sharding.zero import ShardedOptimizer
from torchfleet.collective.world import Axis

VOCABULARY, LENGTH = 30_522, 512
EXCLUDED = {"exclude_from_weight_decay": ["bias", "norm"]}
BFLOAT16 = {"amp": True, "amp_configs": {"dtype": "bfloat16"}}
PURE = {"amp": True, "amp_configs": {"use_pure_bf16": True}}

# Contender → its rival, and bytes per value: its own and the rival's.
RIVALS: dict[str, tuple[str, int, int]] = {
    "lamb": ("adam", 40, 28),
    "lars": ("sgd", 28, 20),
    "amp": ("adamw", 28, 28),
    "amp_float16": ("adamw", 28, 28),
    "pure": ("adamw", 40, 28),
    "stage_1": ("adamw", 28, 28),
    "clipped": ("adamw_clipped", 40, 40),
}


class Shapes(torch.nn.Module):
    """Parameters with the shapes and names of a BERT of about `num` values; it computes nothing."""

    def __init__(self, num: float, device: torch.device) -> None:
        super().__init__()
        width = max(64, 64 * round(math.sqrt(num / 330) / 64))
        words = min(VOCABULARY, 30 * width)
        self._add("words", (words, width), device)
        self._add("positions", (LENGTH, width), device)
        for layer in range(max(1, round((num - words * width) / (12 * width * width)))):
            for name in ("query", "key", "value", "output"):
                self._linear(f"layer{layer}_{name}", width, width, device)
            self._linear(f"layer{layer}_up", 4 * width, width, device)
            self._linear(f"layer{layer}_down", width, 4 * width, device)
            for name in ("norm1", "norm2"):
                self._add(f"layer{layer}_{name}_weight", (width,), device)
                self._add(f"layer{layer}_{name}_bias", (width,), device)
        self._add("head_bias", (words,), device)

    def _linear(self, name: str, rows: int, columns: int, device: torch.device) -> None:
        self._add(f"{name}_weight", (rows, columns), device)
        self._add(f"{name}_bias", (rows,), device)

    def _add(self, name: str, shape: tuple[int, ...], device: torch.device) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, device=device) * 0.02))


class Bench:
    def __init__(self, num: float, device: torch.device) -> None:
        self._num, self._device = num, device
        self._info = PaddleCloudRoleMaker(is_collective=True).read()

    def contenders(self) -> dict[str, Callable[[], Any]]:
        adamw, clipped = self._plain(torch.optim.AdamW), self._plain(torch.optim.AdamW)
        return {
            "adam": self._plain(torch.optim.Adam).step,
            "adamw": adamw.step,
            "sgd": self._plain(torch.optim.SGD, momentum=0.9).step,
            "adamw_clipped": _clipping(clipped, lambda: torch.nn.utils.clip_grad_norm_(_parameters(clipped), 1e9)),
            "lamb": self._ours(torch.optim.Adam, lamb=True, lamb_configs=EXCLUDED).step,
            "lars": self._ours(torch.optim.SGD, lars=True, lars_configs=EXCLUDED).step,
            "amp": self._ours(torch.optim.AdamW, **BFLOAT16).step,
            "amp_float16": self._ours(torch.optim.AdamW, amp=True).step,
            "pure": self._pure(),
            "stage_1": self._stage_1().step,
            "clipped": self._clipped(),
        }

    def _plain(self, kind: Any, **options: Any) -> torch.optim.Optimizer:
        model = Shapes(self._num, self._device)
        _give_gradients(model)
        optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=1e-4, fused=True, **options)
        return optimizer

    def _ours(self, kind: Any, **fields: Any) -> Any:
        return self._job(kind, **fields)[0]

    def _job(self, kind: Any, **fields: Any) -> tuple[Any, torch.nn.Module]:
        """The optimizer and the model of a job of one rank. LARS and LAMB have kernels of their own."""
        job = CollectiveJob(self._info, DistributedStrategy(**fields))
        model = job.distribute_model(Shapes(self._num, self._device))
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = job.distribute_optimizer(kind(model.parameters(), lr=1e-4, fused=True, **options))
        _give_gradients(model)
        return optimizer, model

    def _pure(self) -> Callable[[], Any]:
        """A step lets the gradients of half precision go: they are put back before each."""
        optimizer, model = self._job(torch.optim.AdamW, **PURE)
        kept = [(parameter, parameter.grad) for parameter in model.parameters()]

        def step() -> None:
            for parameter, gradient in kept:
                parameter.grad = gradient
            optimizer.step()

        return step

    def _stage_1(self) -> ShardedOptimizer:
        """A job of one rank leaves it out; this is what it does on each of several, but for what it sends them."""
        axis = Axis(0, 1, dist.group.WORLD)
        return ShardedOptimizer(self._plain(torch.optim.AdamW), axis, 32 << 20)

    def _clipped(self) -> Callable[[], Any]:
        optimizer = self._ours(torch.optim.AdamW)
        return _clipping(optimizer, lambda: optimizer.clip_grad_norm_(1e9))


def _give_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 0.01


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _clipping(optimizer: torch.optim.Optimizer, clip: Callable[[], Any]) -> Callable[[], Any]:
    def step() -> None:
        clip()
        optimizer.step()

    return step


def _microseconds(step: Callable[[], Any], device: torch.device, num: int) -> float:
    """Of one step. On a CPU of the processor's time, which other work on the machine does not change."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    wait(device)
    start = clock()
    for _ in range(num):
        step()
    wait(device)
    return 1e6 * (clock() - start) / num


def measure(num: float, device: torch.device, rounds: int, steps: int) -> dict[str, Any]:
    made = Bench(num, device).contenders()
    for step in made.values():
        for _ in range(3):
            step()
    log(f"{num:,.0f} values: microseconds of a step, {rounds} rounds of {steps} steps")
    turns = {name: _turn(step, device, steps) for name, step in made.items()}
    found = interleave(rounds, turns)
    result: dict[str, Any] = {f"{name}_us": value for name, value in found.items()}
    for name, (rival, own, other) in RIVALS.items():
        result[f"{name}_ratio"], result[f"{name}_roof"] = found[name] / found[rival], own / other
    return result


def _turn(step: Callable[[], Any], device: torch.device, steps: int) -> Callable[[], float]:
    return lambda: _microseconds(step, device, steps)


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parameters", type=float, default=2e6, help="how many values; default 2e6")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps of a contender's turn")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU: leave --device out")
    return chosen


def main() -> None:
    chosen = options()
    if chosen.device == "cpu":
        os.environ["FLEET_DEVICE"] = "cpu"
        torch.set_num_threads(1)  # threads that wait for each other would count as work
    torch.manual_seed(0)
    result = measure(chosen.parameters, torch.device(chosen.device), chosen.rounds, chosen.steps)
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
    settings = {"parameters": chosen.parameters, "torch": torch.__version__, "device": name}
    report({**result, **settings}, chosen.json)


if __name__ == "__main__":
    main()
