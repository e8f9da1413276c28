"""Which modules of a model are blocks, and which models are refused."""

from __future__ import annotations

import pytest
import torch
from support.messages import naming
from torch import nn

import torchfleet as fleet
from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.ps.worker.heter.blocks import blocks_of


class Guarded(nn.Module):
    def __init__(self, outside: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        with fleet.device_guard("gpu"):
            tower = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 1)))
            if not outside:
                self.tower = tower
        if outside:
            self.tower = tower


@pytest.mark.parametrize("outside", [False, True])
def test_the_outermost_module_of_a_guard_is_the_block(outside: bool) -> None:
    assert [block.name for block in blocks_of(Guarded(outside))] == ["tower"]


def test_a_call_of_the_guard_marks_a_module_and_a_cpu_guard_makes_no_block() -> None:
    model = nn.Sequential(nn.Linear(1, 1), fleet.device_guard("gpu")(nn.Linear(1, 1)), nn.Linear(1, 1))
    with fleet.device_guard("cpu"):
        model.append(nn.Linear(1, 1))
    assert [block.name for block in blocks_of(model)] == ["1"]
    assert [block.name for block in blocks_of(nn.Sequential(model))] == ["0.1"]


def test_a_module_with_two_names_is_one_block() -> None:
    model = nn.ModuleDict({"a": fleet.device_guard("gpu")(nn.Linear(1, 1))})
    model["b"] = model["a"]
    assert [block.name for block in blocks_of(model)] == ["a"]


def test_a_block_has_no_embedding_and_no_part_for_the_cpu() -> None:
    holder = nn.Module()
    with fleet.device_guard("gpu"):
        holder.rows = nn.Sequential(fleet.nn.SparseEmbedding(2))
    with pytest.raises(ModelError, match=naming("'rows.0'", "device_guard('gpu')")):
        blocks_of(holder)
    holder = nn.Module()
    holder.tower = fleet.device_guard("gpu")(nn.Sequential(fleet.device_guard("cpu")(nn.Linear(1, 1))))
    with pytest.raises(ModelError, match=naming("'tower.0'", "device_guard('cpu')", "'tower'")):
        blocks_of(holder)
    with pytest.raises(ModelError, match=naming("whole model")):
        blocks_of(fleet.device_guard("gpu")(nn.Linear(1, 1)))


@pytest.mark.parametrize("value", [nn.Parameter(torch.zeros(1, dtype=torch.complex64))])
def test_a_parameter_that_cannot_be_sent_is_named(value: nn.Parameter) -> None:
    model = Guarded()
    model.tower[0].weight = value
    with pytest.raises(ModelError, match=naming("'tower.0.weight'", "complex64", "float32")):
        blocks_of(model)[0].spec()


def test_the_guard_takes_modules_and_known_devices() -> None:
    with pytest.raises(StrategyError, match=naming("'xpu'", "'gpu'")):
        fleet.device_guard("xpu")
    with pytest.raises(StrategyError, match=naming("torch.nn.Modules", "function")):
        fleet.device_guard("gpu")(lambda: None)  # type: ignore[type-var]
