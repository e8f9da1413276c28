"""A dry step against bytes counted by hand, and against whole stages that run at once."""

from __future__ import annotations

import copy
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from support.messages import naming
from torch import nn

from torchfleet.base.errors import ModelError
from torchfleet.collective.pipeline.dry_step import DryStep, ModelPart
from torchfleet.collective.pipeline.stage_cuts import Cutting, Stages, Unit
from torchfleet.collective.strategies.recomputation.recompute import recompute
from torchfleet.collective.tensors.kept_tensors import bytes_in, kept_for_backward

BATCH, DIM, WIDE = 4, 8, 16
CPU = torch.device("cpu")


def parts_of(model: nn.Sequential) -> list[ModelPart]:
    def first(module: nn.Module, _: Any, inputs: Any) -> Any:
        return module(*inputs[0])

    def later(module: nn.Module, value: Any, _: Any) -> Any:
        return module(value)

    calls = [partial(later if place else first, module) for place, module in enumerate(model)]
    return [
        ModelPart(str(place), module, 0.0, call) for place, (module, call) in enumerate(zip(model, calls, strict=True))
    ]


def measured(model: nn.Sequential, precision: torch.dtype | None = None) -> list[Unit]:
    return DryStep(CPU, precision).measure(parts_of(model), ((torch.ones(BATCH, DIM),), {}))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [
        nn.Linear(DIM, WIDE),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(WIDE, DIM),
        nn.BatchNorm1d(DIM),
        nn.ReLU(True),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(DIM, 3))


def test_bytes_are_those_counted_by_hand() -> None:
    first, tanh, _, second, *_ = measured(network())
    wide, narrow = 4 * BATCH * WIDE, 4 * BATCH * DIM
    assert (first.inside, first.entering, first.leaving) == (0, 0, wide)  # the batch itself is not counted
    assert (tanh.inside, tanh.entering, tanh.joined, tanh.leaving) == (wide, wide, 0, 0)  # keeps what it returns
    assert (second.inside, second.entering, second.joined, second.leaving) == (0, wide, wide, narrow)


def test_sums_over_units_are_what_a_whole_stage_keeps() -> None:
    model = network()
    units = measured(model)
    cutting = Cutting(units, Stages([0], [1]))
    assert [unit.name for unit in units if not unit.is_start] == ["5"]  # would change what another rank has sent
    for first, end in combinations(range(len(units) + 1), 2):
        if first == 5:
            continue
        entering = model[:first](torch.ones(BATCH, DIM)).detach().requires_grad_(first > 0)
        own = [*model.parameters(), *model.buffers(), *([] if first else [entering])]
        with kept_for_backward(own) as kept:
            output = model[first:end](entering)
        held = [*kept.values(), output, *([entering] if first else [])]  # the batch itself is not counted
        assert cutting.bytes(0, first, end) == bytes_in(held), (first, end)


def test_nothing_changes() -> None:
    model = network()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    measured(model)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_a_model_without_memory_is_measured_alike() -> None:
    with torch.device("meta"):
        bare = network()
    sizes = [(u.inside, u.entering, u.joined, u.leaving) for u in measured(bare)]
    assert sizes == [(u.inside, u.entering, u.joined, u.leaving) for u in measured(network())]
    assert all(parameter.is_meta for parameter in bare.parameters())


def test_a_recomputed_module_keeps_only_its_input() -> None:
    wide = 4 * BATCH * DIM
    inner = nn.Sequential(nn.Linear(DIM, WIDE), nn.Tanh(), nn.Linear(WIDE, DIM))
    model = nn.Sequential(nn.Linear(DIM, DIM), inner)
    assert measured(model)[1].inside == 4 * BATCH * WIDE
    recompute(inner)
    unit = measured(model)[1]
    assert (unit.inside, unit.entering, unit.joined) == (0, wide, wide)


def test_autocast_halves_what_crosses() -> None:
    first, second, *_ = measured(nn.Sequential(nn.Linear(DIM, WIDE), nn.Tanh()), torch.bfloat16)
    assert second.entering == 2 * BATCH * WIDE
    assert first.leaving == second.entering


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, 2 * x


class Sum(nn.Module):
    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return both[0] + both[1]


def test_no_stage_begins_with_what_takes_several_tensors() -> None:
    units = measured(nn.Sequential(nn.Linear(DIM, DIM), Two(), Sum(), nn.Linear(DIM, DIM)))
    assert [unit.is_start for unit in units] == [True, True, False, True]


def test_the_module_that_cannot_run_is_named() -> None:
    with pytest.raises(ModelError, match=naming("'1'", "dry_batch", "train_batch")):
        measured(nn.Sequential(nn.Linear(DIM, WIDE), nn.Linear(DIM, WIDE)))
