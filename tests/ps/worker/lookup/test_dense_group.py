"""The dense block of a model: its parameters and gradients one after another, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.messages import naming

from torchfleet.base.errors import ModelError
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.lookup.dense_group import DenseGroup
from torchfleet.ps.worker.lookup.plan import make_plan


def group() -> DenseGroup:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(value) for value in (torch.randn(3, 4), torch.randn(5), torch.randn(4, 3).t())]
    spec = TableSpec("dense.0", "dense", size=29)
    return DenseGroup(spec, ["a", "b", "c"], parameters, {"lr": 0.1})


def test_gradients_are_side_by_side_and_zero_where_there_is_none() -> None:
    dense = group()
    first, _, last = dense.parameters
    first.grad, last.grad = torch.randn(4, 3).t(), torch.randn(3, 4)
    block = dense.gradients()
    assert block.dtype == np.float32
    assert np.array_equal(block[:12], first.grad.reshape(-1))
    assert np.array_equal(block[17:], last.grad.reshape(-1))
    assert not block[12:17].any()
    first.grad.zero_()
    assert block[:12].any(), "what is to be sent is apart from what training goes on with"


def test_what_is_written_is_read_back_and_torch_notices_unless_it_must_not() -> None:
    dense = group()
    block = np.arange(29, dtype=np.float32)
    for unnoticed in (False, True):
        versions = [parameter._version for parameter in dense.parameters]
        dense.write(block, unnoticed)
        assert np.array_equal(dense.values(), block)
        assert [parameter._version == before for parameter, before in zip(dense.parameters, versions, strict=True)] == [
            unnoticed
        ] * 3
        block = block + 1
    assert dense.parameters[2][1, 0] == block[17 + 4] - 1


@pytest.mark.parametrize(
    ("change", "value"),
    [({"betas": (0.5, 0.999)}, "beta1 0.5"), ({"eps": 1e-3}, "eps 0.001"), ({"weight_decay": 0.1}, "weight_decay 0.1")],
)
def test_an_option_that_changes_after_steps_is_refused(change: dict[str, object], value: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plan = make_plan(model, optimizer, 1)
    plan.check_options(optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    plan.check_options(optimizer)
    optimizer.param_groups[0].update(change)
    with pytest.raises(ModelError, match=naming("'dense.0'", *value.split())):
        plan.check_options(optimizer)


def test_an_option_that_is_changed_in_place_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plan = make_plan(model, optimizer, 1)
    betas = optimizer.param_groups[0]["betas"] = [0.9, 0.999]
    plan.check_options(optimizer)
    betas[0] = 0.5
    with pytest.raises(ModelError, match=naming("'dense.0'", "beta1", 0.9, 0.5)):
        plan.check_options(optimizer)
