"""The step of an optimizer alone: those of strategies beside torch's fused ones, on many parameters with gradients."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import torchfleet as fleet
from benchmarks.gpu_training import free, seconds_of
from benchmarks.timing import log

_LAYERS = 24
Maker = Callable[[Any], torch.optim.Optimizer]


class Weights(torch.nn.Module):
    """Matrices and vectors as a transformer of 24 layers has them, `num` numbers about."""

    def __init__(self, num: int, device: torch.device) -> None:
        super().__init__()
        width = max(4, int((num / _LAYERS / 12) ** 0.5))
        shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)] + [(width,)] * 8 + [(4 * width,)]
        self.weights = torch.nn.ParameterList(
            torch.randn(shape, device=device) * 0.02 for _ in range(_LAYERS) for shape in shapes
        )

    def forward(self) -> torch.Tensor:
        raise RuntimeError("only its optimizer's step is measured")


def _adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4, **options)


def _sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, **options)


def _fused_adam(parameters: Any) -> torch.optim.Optimizer:
    return _adam(parameters, fused=True)


# What is measured, beside which of torch's
PURE = {"amp": True, "amp_configs": {"use_pure_bf16": True}}
PAIRS: dict[str, tuple[str, Maker, dict[str, Any]]] = {
    "lamb": ("adam", _adam, {"lamb": True}),
    "lars": ("sgd", _sgd, {"lars": True}),
    "pure_bfloat16": ("adam", _fused_adam, PURE),
    "sharding_1": ("adam", _fused_adam, {"sharding": True, "sharding_configs": {"stage": 1}}),
    "plain": ("adam", _fused_adam, {}),
}


@contextmanager
def _ours(weights: Weights, maker: Maker, fields: dict[str, Any]) -> Iterator[Callable[[], object]]:
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    try:
        model = fleet.distributed_model(weights)
        optimizer = fleet.distributed_optimizer(maker(model.parameters()))
        _give_gradients(weights)
        yield optimizer.step
    finally:
        fleet.stop_worker()


def _give_gradients(weights: torch.nn.Module) -> None:
    for parameter in weights.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)


def optimizer_steps(device: torch.device, num: int, rounds: int, seconds: float) -> dict[str, float]:
    """Milliseconds of a step, medians over rounds in turns, and the ratio to torch's fused optimizer."""
    found: dict[str, float] = {}
    for name, (rival, maker, fields) in PAIRS.items():
        free()
        plain = Weights(num, device)
        _give_gradients(plain)
        fused = (_adam if rival == "adam" else _sgd)(plain.parameters(), fused=True)
        with _ours(Weights(num, device), maker, fields) as step:
            times: dict[str, list[float]] = {"ours": [], "fused": []}
            for _ in range(rounds):
                times["ours"].append(seconds_of(step, device, seconds / 4))
                times["fused"].append(seconds_of(fused.step, device, seconds / 4))
        ours, theirs = (1000 * statistics.median(each) for each in times.values())
        found[f"{name}_ms"], found[f"{name}_torch_{rival}_ms"], found[f"{name}_ratio"] = ours, theirs, ours / theirs
        log(f"  {name}: {ours:.2f} ms, torch's fused {rival} {theirs:.2f} ms: {ours / theirs:.2f} times")
        del plain, fused, step
    return found
