"""Recomputation in slices of the batch, and with inputs in half precision, against the same by hand in plain torch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.collective_oracles import alone
from support.messages import naming
from torch import nn

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.collective.strategies.fusion import Fusion
from torchfleet.collective.strategies.recomputation.offload import Offload
from torchfleet.collective.strategies.recomputation.recompute import Recompute, recompute

CPU = torch.device("cpu")
DIM, ROWS = 16, 12


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.LayerNorm(DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.dropout(self.down(torch.tanh(self.up(x))))
        return self.norm(x + (inner if mask is None else inner * mask))  # type: ignore[no-any-return]


def made(dropout: float = 0.0, num: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(dropout) for _ in range(num))


Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def gradients(blocks: nn.ModuleList, call: Call, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Of the blocks, and of what the first is given."""
    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)
    y: torch.Tensor = x
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        for block in blocks:
            y = call(block, y)
    y.float().sin().sum().backward()  # not a square: that of a norm's outputs is nearly constant
    assert x.grad is not None
    return [x.grad, *(parameter.grad for parameter in blocks.parameters() if parameter.grad is not None)]


def by_hand(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Slices whose weights are cast for each of them."""
    torch.clear_autocast_cache()
    outputs = []
    for part in x.chunk(5):
        outputs.append(block(part))
        torch.clear_autocast_cache()
    return torch.cat(outputs)


@pytest.mark.parametrize("offload", [False, True], ids=["kept", "offload"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_slices_draw_the_same_masks_again_and_add_gradients_in_float32(offload: bool, dtype: Any) -> None:
    """Five slices of twelve rows: three, and at last fewer. Summed in bfloat16, gradients would be off by 1e-3."""
    blocks = made(dropout=0.3)
    expected = gradients(copy.deepcopy(blocks), by_hand, dtype)
    kept = Offload(CPU) if offload else None
    for block in blocks:
        recompute(block, kept, slices=5)
    found = gradients(blocks, lambda block, y: block(y), dtype)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5


def test_inputs_in_half_precision_are_rounded_for_both_runs() -> None:
    blocks = made(dropout=0.3)
    expected = gradients(copy.deepcopy(blocks), lambda block, y: block(y.to(torch.bfloat16)), torch.bfloat16)
    for block in blocks:
        recompute(block, half_inputs=True)
    kept: list[torch.dtype] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (ROWS, DIM):
            kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = gradients(blocks, lambda block, y: block(y), torch.bfloat16)
    assert kept.count(torch.bfloat16) >= 3
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_masks_are_cut_with_the_batch_and_single_rows_go_to_every_slice() -> None:
    """The mask of a sample goes with it; a mask of one row goes whole."""
    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    masks = [torch.arange(ROWS)[:, None] % 2.0, torch.arange(DIM)[None] % 2.0]
    plain = made(num=1)[0]
    block = copy.deepcopy(plain)
    recompute(block, slices=5)
    for mask in masks:
        torch.testing.assert_close(block(x, mask=mask), plain(x, mask=mask))


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def test_what_cannot_be_cut_is_an_error() -> None:
    x = torch.randn(ROWS, DIM, requires_grad=True)
    block, total = made(num=1)[0], Total()
    recompute(block, slices=2)
    with pytest.raises(ModelError, match=naming(12, "(16,)", "'slices'")):
        block(x, torch.ones(DIM))
    recompute(total, slices=2)
    with pytest.raises(ModelError, match=naming(6)):
        total(x)
    with pytest.raises(ModelError, match="BatchNorm1d"):
        recompute(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), slices=2)


@pytest.mark.parametrize(
    ("kind", "fields", "match"),
    [
        (Recompute, {"configs": {"half_inputs": True}}, "half_inputs amp=True"),
        (Recompute, {"configs": {"slices": 2}, "pipeline": True}, "'slices' pipeline accumulate_steps"),
        (Fusion, {"configs": {"slices": 2}}, "recompute_configs['slices']"),
        (Fusion, {"flag": "allow_cuda_graph_capture"}, "GPU cpu"),
    ],
)
def test_contradictions_are_found(kind: Any, fields: dict[str, Any], match: str) -> None:
    configs = {"checkpoints": ["0"], **fields.pop("configs", {})}
    flag = fields.pop("flag", "fuse_bn_act_ops")
    with pytest.raises(StrategyError, match=naming(*match.split())):
        kind(*alone(recompute=True, recompute_configs=configs, build_strategy={flag: True}, **fields))


def test_after_a_backward_pass_that_was_broken_off_no_input_stays() -> None:
    offload, blocks = Offload(CPU), made(num=4)
    for block in blocks:
        recompute(block, offload)

    def fail(_: Any) -> None:
        raise MemoryError

    handle = blocks[1].norm.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        gradients(blocks, lambda block, y: block(y))
    assert offload._coming, "that of the block before was on its way"
    handle.remove()
    gc.collect()
    blocks.zero_grad()
    left: list[int] = []

    def call(block: nn.Module, y: torch.Tensor) -> torch.Tensor:
        y = block(y)
        left.append(len(offload._coming))
        return y

    found = gradients(blocks, call)
    assert left == [0] * 4, "a new pass has their memory"
    expected = gradients(made(num=4), lambda block, y: block(y))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
