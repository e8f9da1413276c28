"""Gradients that are no numbers: the error names the parameter, or the table and id, and the step, in every mode;
nothing of the step was sent, and training can go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Servers, one_worker
from support.messages import naming

import torchfleet
from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.policy import ShowClickEntry

NAN, INF = float("nan"), float("inf")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torchfleet.nn.SparseEmbedding(2, name="rows")
        self.tower = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tower(self.rows(ids)).sum()


def values(part: jobs.Part) -> list[torch.Tensor]:
    return [*(p.detach().clone() for p in part.model.parameters()), part.rows("rows", [5, -7])]


def refused_and_then_trained(part: jobs.Part, hook: Any, text: str) -> None:
    """Two good steps, a third whose gradient goes through `hook`, and a fourth."""
    ids = torch.tensor([5, -7])
    for _ in range(2):
        part.model(ids).backward()
        part.optimizer.step()
        part.optimizer.zero_grad()
    part.flush()
    before = values(part)
    hook(part.model, ids).backward()
    with pytest.raises(TableError, match=text):
        part.optimizer.step()
    part.optimizer.zero_grad()
    part.flush()
    assert all(torch.equal(one, other) for one, other in zip(values(part), before, strict=True))
    part.model(ids).backward()
    part.optimizer.step()
    part.flush()
    assert not torch.equal(values(part)[-1], before[-1])


def spoiled_parameter(model: Any, ids: torch.Tensor) -> torch.Tensor:
    bias = model.tower[1].bias
    handle = bias.register_hook(lambda grad: grad * NAN)
    bias.register_hook(lambda grad: handle.remove())
    return model(ids)


def spoiled_row(value: float) -> Any:
    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        out = model.rows(ids)
        out.register_hook(lambda grad: torch.tensor([[0.0, 1.0], [value, 1.0]]))
        return model.tower(out).sum()

    return loss


@each_of("mode", jobs.MODES)
def test_nan_in_a_dense_gradient_names_the_parameter_and_the_step(mode: str) -> None:
    text = naming("step 3", "NaN", "'tower.1.bias'")
    with one_worker(Net(), mode=mode, servers=Servers(2)) as part:
        refused_and_then_trained(part, spoiled_parameter, text)


@each_of("value", [NAN, INF, -INF])
@each_of("mode", jobs.MODES)
def test_nan_in_a_row_names_the_table_and_the_id_as_it_was_given(mode: str, value: float) -> None:
    text = naming("step 3", "NaN", "'rows'", "-7")
    with one_worker(Net(), mode=mode, num_servers=2) as part:
        refused_and_then_trained(part, spoiled_row(value), text)


def test_a_loss_that_is_nan_names_a_few_and_counts_the_rest() -> None:
    with one_worker(Net()) as part:
        (part.model(torch.tensor([1, 2])) * NAN).backward()
        with pytest.raises(TableError, match=naming("'tower.0.weight'", "'tower.0.bias'", "'tower.1.weight'", 3)):
            part.optimizer.step()


def test_a_step_of_one_of_several_threads_names_it_too() -> None:
    with one_worker(Net(), mode="async") as part, pytest.raises(TableError, match=naming("step 1", "'tower.1.bias'")):
        part.optimizer.step_apart(spoiled_parameter(part.model, torch.tensor([5, -7])))


def test_a_show_that_is_no_number_is_told_from_a_gradient() -> None:
    class Shown(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torchfleet.nn.SparseEmbedding(2, name="rows", entry=ShowClickEntry("show", "click"))

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.rows(batch["ids"]).sum()

    with one_worker(Shown(), mode="half_async") as part:
        part.model({"ids": torch.tensor([3, 4]), "show": torch.tensor([1.0, NAN]), "click": torch.zeros(2)}).backward()
        with pytest.raises(TableError, match=naming("'rows'", 4)):
            part.optimizer.step()
