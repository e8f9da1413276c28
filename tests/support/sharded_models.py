"""Models to cut over ranks, and the batches that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.collective_job import CollectiveJob

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


TINY_MB = 0.001  # of parameters at once: every layer of the small models here is a unit


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Net(torch.nn.Module):
    """Seven rows and three: neither can be cut evenly."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.head = torch.nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 5)
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh())
        self.outputs = torch.nn.Sequential(torch.nn.Linear(5, 11))
        self.outputs[0].weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outputs(self.layers(self.embedding(x)).mean(1))


def start(**fields: Any) -> CollectiveJob:
    return CollectiveJob(PaddleCloudRoleMaker(is_collective=True).read(), DistributedStrategy(**fields))


def sharded(stage: int, **configs: Any) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"stage": stage, "segment_broadcast_MB": TINY_MB, **configs}}


def batches(num: int, size: int, width: int = 7) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        yield torch.randn(size, width, generator=generator), torch.randn(size, 3, generator=generator)


def share(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tensor[rank * len(tensor) // size : (rank + 1) * len(tensor) // size]


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def of_case(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {key.removeprefix(f"{name} "): value for key, value in found.items() if key.startswith(f"{name} ")}


def chain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
