"""What the scripts of habits share: a small model, its data, a loop as anybody writes it, and what to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from support.habits.habit import Port

NUM_IDS, DIM, STEPS = 20, 4, 4


class Model(torch.nn.Module):
    """A table, a bag and a tower."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(NUM_IDS, DIM, sparse=sparse)
        self.words = torch.nn.EmbeddingBag(NUM_IDS, DIM, mode="sum", sparse=sparse)
        self.hidden = torch.nn.Linear(2 * DIM, 5)
        self.out = torch.nn.Linear(5, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = torch.cat([self.items(ids[:, 0]), self.words(ids)], dim=1)
        return self.out(torch.tanh(self.hidden(found))).squeeze(1)


def batches(num: int = STEPS, size: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and targets; ids repeat, and some occur in no batch."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(NUM_IDS - 4, (num, size, 3), generator=draw)
    return [(part, (part.float().mean(1) / NUM_IDS)) for part in ids]


def loss_of(model: torch.nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    ids, target = batch
    return (model(ids) - target).square().mean()


def train(
    model: torch.nn.Module,
    optimizers: Any,
    data: Iterable[Sequence[torch.Tensor]] | None = None,
    after_step: Callable[[], Any] | None = None,
    after_backward: Callable[[], Any] | None = None,
) -> list[float]:
    """The losses."""
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    losses = []
    for batch in data if data is not None else batches():
        loss = loss_of(model, batch)
        loss.backward()
        if after_backward is not None:
            after_backward()
        for optimizer in several:
            optimizer.step()
        if after_step is not None:
            after_step()
        for optimizer in several:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(model: torch.nn.Module, lr: float = 0.5, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def adagrad(model: torch.nn.Module, lr: float = 0.2, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=lr, **options)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that the model would save, as plain tensors."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(port: Port, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Any:
    """The losses and the model of a plain loop."""
    model, optimizer = port(model, optimizer)
    return train(model, optimizer, **more), values(model)
