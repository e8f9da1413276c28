"""Calls are compiled again when the last of several owners has let go, in whatever order they do."""

from __future__ import annotations

import sys

import pytest
import torch
from support.extras import Late

from torchfleet.ps.worker.batch.recorder import hold_compiler, let_compiler_go

testing = Late("torch._dynamo.testing")


class Owner:
    """Something that holds."""


def test_an_owner_that_is_gone_holds_nothing() -> None:
    counter, owner = testing.CompileCounter(), Owner()
    hold_compiler(owner)
    del owner
    torch.compile(lambda x: x + 1, backend=counter)(torch.ones(2))
    assert counter.frame_count == 1


def test_a_compiler_that_is_imported_after_the_first_owner_held_is_held_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter, first, second = testing.CompileCounter(), Owner(), Owner()
    compiled = torch.compile(lambda x: x + 1, backend=counter)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch._dynamo")
        hold_compiler(first)
    hold_compiler(second)
    compiled(torch.ones(2))
    let_compiler_go(first)
    compiled(torch.ones(2))
    assert counter.frame_count == 0
    let_compiler_go(second)
    compiled(torch.ones(2))
    assert counter.frame_count == 1


@pytest.mark.parametrize("is_first_in", [True, False])
def test_the_last_to_let_go_brings_the_compiler_back(is_first_in: bool) -> None:
    counter, owners = testing.CompileCounter(), [Owner(), Owner()]
    compiled = torch.compile(lambda x: x + 1, backend=counter)
    for owner in owners:
        hold_compiler(owner)
    compiled(torch.ones(2))
    first, second = owners if is_first_in else reversed(owners)
    let_compiler_go(first)
    compiled(torch.ones(2))
    assert counter.frame_count == 0
    let_compiler_go(second)
    let_compiler_go(second)  # of one that holds nothing: no effect
    compiled(torch.ones(2))
    assert counter.frame_count == 1
