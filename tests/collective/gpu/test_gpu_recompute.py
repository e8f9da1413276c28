"""Recomputation on a GPU: what memory it leaves, and gradients against the same blocks without it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchfleet.collective.strategies.recomputation.offload import Offload
from torchfleet.collective.strategies.recomputation.recompute import recompute

pytestmark = pytest.mark.gpu

WIDTH, ROWS, NUM = 512, 16384, 12
INPUT = WIDTH * ROWS * 4  # bytes of what a block is given


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.dropout(self.down(nn.functional.gelu(self.up(x)))))  # type: ignore[no-any-return]


def peak_and_gradients(change: Callable[[nn.Module], None], amp: bool, dropout: bool) -> tuple[int, list[torch.Tensor]]:
    """Bytes beyond those before the pass, and gradients."""
    torch.manual_seed(1)
    device = torch.device("cuda", 0)
    first = Block()
    first.dropout.p = 0.1 if dropout else 0.0
    net = nn.Sequential(*(copy.deepcopy(first) for _ in range(NUM))).to(device)
    for block in net:
        change(block)
    x = torch.randn(ROWS, WIDTH, device=device, generator=torch.Generator(device).manual_seed(2))
    for _ in range(2):
        net.zero_grad()
        torch.manual_seed(3)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            output = net(x)
        output.float().sin().sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    return peak, [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def off(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def test_a_gpu_has_fewer_activations_from_way_to_way_and_gradients_are_those_of_torch() -> None:
    offload = Offload(torch.device("cuda", 0))
    ways: dict[str, Callable[[nn.Module], None]] = {
        "plain": lambda block: None,
        "recompute": recompute,
        "slices": lambda block: recompute(block, slices=8),
        "offload": lambda block: recompute(block, offload, slices=8),
    }
    peaks, gradients = {}, {}
    for name, change in ways.items():
        peaks[name], gradients[name] = peak_and_gradients(change, amp=False, dropout=False)
    for name in ("recompute", "slices", "offload"):
        assert off(gradients[name], gradients["plain"]) < 1e-4, name
    in_inputs = {name: round(peak / INPUT, 1) for name, peak in peaks.items()}
    assert peaks["plain"] > 1.8 * peaks["recompute"] > 1.8 * 1.3 * peaks["slices"], in_inputs
    assert peaks["slices"] - peaks["offload"] > (NUM - 4) * INPUT, in_inputs


def test_masks_are_those_of_the_first_run_also_in_slices() -> None:
    """Beside slices made by hand, which draw the same masks forward; other masks in backward would show at once."""

    def by_hand(block: nn.Module) -> None:
        whole = block.forward
        block.forward = lambda x: torch.cat([whole(part) for part in x.chunk(4)])  # type: ignore[method-assign]

    expected = peak_and_gradients(by_hand, amp=False, dropout=True)[1]
    found = peak_and_gradients(lambda block: recompute(block, slices=4), amp=False, dropout=True)[1]
    assert off(found, expected) < 1e-4


def test_inputs_in_half_precision_take_half_the_memory_and_change_little() -> None:
    exact, expected = peak_and_gradients(lambda block: recompute(block, slices=8), amp=True, dropout=False)
    half, found = peak_and_gradients(
        lambda block: recompute(block, half_inputs=True, slices=8), amp=True, dropout=False
    )
    assert exact - half > 0.4 * NUM * INPUT, (exact / INPUT, half / INPUT)
    assert off(found, expected) < 0.05
