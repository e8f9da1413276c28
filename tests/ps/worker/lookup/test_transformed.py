"""What transforms or records a model in torch, and what the port refuses: short errors that name the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import each_of
from support.jobs import one_worker
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import ModelError

IDS = torch.tensor([1, 2])


class Scores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(30, 4, sparse=True)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.items(ids))


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def per_sample(model: torch.nn.Module) -> Any:
    def loss(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (ids,)).sum()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))({"out.weight": model.out.weight}, IDS.view(2, 1))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "torch.fx": torch.fx.symbolic_trace,
    "vmap": lambda model: torch.func.vmap(model)(IDS.view(2, 1)),
    "grad": per_sample,
    "torch.jit.script": torch.jit.script,
    "torch.jit.trace": lambda model: torch.jit.trace(model, (IDS,), check_trace=False),
    "torch.export": lambda model: torch.export.export(model, (IDS,)),
}


@each_of("mode", [True, False])
@each_of("what", TRANSFORMS)
def test_what_transforms_a_model_is_refused_and_works_on_the_plain_one(what: str, mode: bool) -> None:
    """Before and after training, which lets lookups be foreseen."""
    with one_worker(Scores(), momentum) as part:
        for _ in range(3):
            with pytest.raises(ModelError, match=naming("fleet.to_plain(model)", what)):
                TRANSFORMS[what](part.model.train(mode))
            part.model(IDS).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
        TRANSFORMS[what](fleet.to_plain(part.model).train(mode))


def test_an_embedding_by_itself_names_its_path() -> None:
    with one_worker(Scores(), momentum) as part:
        with pytest.raises(ModelError, match=naming("'items'", "fleet.to_plain(model)")):
            torch.func.vmap(part.model.items)(IDS.view(2, 1))
        assert part.model.items(IDS).shape == (2, 4)


@each_of("sparse", [True, False])
def test_a_model_without_memory_is_refused_by_name(sparse: bool) -> None:
    with torch.device("meta"):
        model = Scores()
    model.items.sparse = sparse
    expected = naming("'items.weight'", "meta", "to_empty(device='cpu')")
    with pytest.raises(ModelError, match=expected), one_worker(model, momentum):
        pass


@each_of("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_cycled_momentum_is_refused_with_the_cure_in_front(kind: Any) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    def train(model: torch.nn.Module, optimizer: Any, schedule: Any) -> None:
        for _ in range(3):
            model(IDS).sum().backward()
            optimizer.step()
            schedule.step()

    with one_worker(Scores(), make) as part:
        schedule = torch.optim.lr_scheduler.OneCycleLR(part.optimizer, max_lr=0.1, total_steps=10)
        with pytest.raises(ModelError) as caught:
            train(part.model, part.optimizer, schedule)
        said = str(caught.value)
        assert said.index("cycle_momentum=False") < 40
        assert len(said) < 300
