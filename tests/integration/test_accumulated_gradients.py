"""Gradients of rows add up until zero_grad, as those of dense parameters do, in every mode, against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.cases import each_of
from support.jobs import MODES
from support.messages import naming
from torch.nn.functional import binary_cross_entropy_with_logits as entropy

import torchfleet as fleet
from torchfleet.base.errors import ModelError

torch.manual_seed(5)
IDS = [torch.randint(60, (32, 3)) for _ in range(5)]
LABELS = [(ids.sum(1) % 2).float() for ids in IDS]


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    fleet.reset()


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    rows = torch.nn.Embedding(60, 4, sparse=True)
    return torch.nn.Sequential(rows, torch.nn.Flatten(), torch.nn.Linear(12, 1), torch.nn.Flatten(0))


def make_optimizer(model: torch.nn.Module, rule: str) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, rule)(model.parameters(), lr=0.1)
    return made


def nothing(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    """Gradients add up over all steps."""


def every_other(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    if step % 2:
        optimizer.zero_grad()


def to_zeros(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)


def of_the_model(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    model.zero_grad()


def zeros_of_the_model(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    model.zero_grad(set_to_none=False)


def by_hand(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def rows_by_hand(model: Any, optimizer: Any, step: int) -> None:
    """The network's gradients add up, those of rows do not."""
    model[0].weight.grad = None


Clear = Callable[[Any, Any, int], None]
CLEARS: list[Clear] = [nothing, every_other, to_zeros, of_the_model, zeros_of_the_model, by_hand, rows_by_hand]


def train(model: torch.nn.Module, optimizer: Any, clear: Clear, num_backwards: int = 1) -> list[float]:
    losses = []
    for step, (ids, labels) in enumerate(zip(IDS, LABELS, strict=True)):
        for _ in range(num_backwards):
            loss = entropy(model(ids), labels)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        clear(model, optimizer, step)
    return losses


def by_fleet(mode: str, rule: str, clear: Clear, num_backwards: int = 1) -> list[float]:
    model = make_model()
    strategy = fleet.DistributedStrategy(**MODES[mode])
    model, optimizer = fleet.prepare(model, make_optimizer(model, rule), strategy=strategy)
    found = train(model, optimizer, clear, num_backwards)
    fleet.stop_worker()
    fleet.reset()
    return found


@each_of("mode", ["sync", "half_async", "hybrid", "geo"])
@each_of("clear", CLEARS)
def test_gradients_add_up_until_they_are_cleared_as_in_plain_torch(mode: str, clear: Clear) -> None:
    rule = "SGD" if mode == "geo" else "Adagrad"
    plain = make_model()
    expected = train(plain, make_optimizer(plain, rule), clear)
    assert by_fleet(mode, rule, clear) == pytest.approx(expected, rel=2e-4)


@each_of("clear", [nothing, every_other])
def test_several_backward_passes_before_a_step_add_up_with_those_of_earlier_steps(clear: Clear) -> None:
    plain = make_model()
    expected = train(plain, make_optimizer(plain, "Adagrad"), clear, num_backwards=2)
    assert by_fleet("sync", "Adagrad", clear, num_backwards=2) == pytest.approx(expected, rel=2e-4)


def test_async_training_without_zero_grad_learns_from_earlier_steps_too() -> None:
    """The sum of the rows' gradients that are pushed, in a mode in which losses depend on the time."""
    model = make_model()
    strategy = fleet.DistributedStrategy(a_sync=True)
    model, optimizer = fleet.prepare(model, make_optimizer(model, "SGD"), strategy=strategy)
    entropy(model(IDS[0]), LABELS[0]).backward()
    first = model[0].weight.grad.clone()
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(model[0].weight.grad, first)
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    fleet.barrier_worker()
    moved = make_model()[0].weight - model.state_dict()["0.weight"]
    assert moved.sum(0).tolist() == pytest.approx((0.2 * first.sum(0)).tolist(), rel=1e-4, abs=1e-6)


def test_two_optimizers_clear_their_own_gradients() -> None:
    def make(distribute: Callable[[Any], Any] = lambda one: one) -> tuple[Any, Any, Any]:
        model = make_model()
        rows = torch.optim.SparseAdam(model[0].parameters(), lr=0.1)
        return model, rows, torch.optim.Adam(model[2].parameters(), lr=0.1)

    def run(model: Any, rows: Any, network: Any) -> list[float]:
        losses = []
        for ids, labels in zip(IDS, LABELS, strict=True):
            loss = entropy(model(ids), labels)
            loss.backward()
            rows.step()
            network.step()
            network.zero_grad()
            losses.append(loss.item())
        return losses

    expected = run(*make())
    assert run(*fleet.prepare(*make())) == pytest.approx(expected, rel=2e-4)


class Counted(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.items = fleet.nn.SparseEmbedding(4, name="items", **options)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.items(batch["ids"]))
        return scores


@each_of("options", [{"cache": "1MB"}, {"entry": fleet.ShowClickEntry("show", "click")}])
def test_rows_whose_gradients_cannot_add_up_say_so(options: dict[str, Any]) -> None:
    model: Any = Counted(**options)
    model, optimizer = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(clears: bool) -> None:
        batch = {"ids": torch.arange(4), "show": torch.ones(4), "click": torch.ones(4)}
        model(batch).square().sum().backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()

    step(clears=True)
    step(clears=False)
    with pytest.raises(ModelError, match=naming("zero_grad", "items")):
        step(clears=False)
    optimizer.zero_grad()
    step(clears=True)
    fleet.reset()
