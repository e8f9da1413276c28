"""Gradients of lookups arrive at their rows bit for bit the same, however they lie in memory when they come back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from support.cases import each_of

from torchfleet.ps.worker.batch.bags import split_slots
from torchfleet.ps.worker.batch.batch_tensors import keys_of
from torchfleet.ps.worker.lookup.batch_rows import BatchRows
from torchfleet.ps.worker.lookup.row_functions import PooledLookup

NUM_SAMPLES, DIM = 50, 10

# What a model may do with its rows before it looks at them: each lays out their gradients in another way.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as they are": lambda out: out,
    "beside numbers": lambda out: torch.cat([out.flatten(1), torch.ones(len(out), 13)], dim=1),
    "behind numbers": lambda out: torch.cat([torch.ones(len(out), 3), out.flatten(1)], dim=1),
    "slots last": lambda out: out.transpose(1, 2).contiguous(),
    "samples last": lambda out: out.permute(1, 2, 0).contiguous(),
    "summed over samples": lambda out: out.sum(dim=0),
    "every second sample": lambda out: out[::2],
}


def gradients(num_slots: int, arrange: Callable[[torch.Tensor], torch.Tensor], copy: bool) -> np.ndarray:
    """Of every key's row; `copy`: what comes back is first laid out anew, sample by sample."""
    rng = np.random.default_rng(num_slots)
    slots, bags = split_slots(list(torch.from_numpy(rng.integers(0, 30, (num_slots, NUM_SAMPLES, 1)))), "sum")
    rows = BatchRows(DIM, lambda rows: None)
    rows.expect(keys_of(slots), None)
    rows.values = rng.standard_normal((len(rows.keys), DIM)).astype(np.float32)
    index, missing = rows.find(keys_of(slots))
    assert missing is None
    out = PooledLookup.apply(torch.empty(0, DIM, requires_grad=True), rows, index, bags)
    if copy:
        out.register_hook(torch.Tensor.clone)
    (arrange(out) ** 3).sum().backward()
    found = rows.gradients()
    assert found is not None
    assert np.array_equal(found[0], rows.keys)
    expected = torch.from_numpy(rows.values).requires_grad_()
    plain = expected[torch.from_numpy(index).long()].view(num_slots, NUM_SAMPLES, DIM).transpose(0, 1)
    (arrange(plain) ** 3).sum().backward()
    np.testing.assert_allclose(found[1], expected.grad, rtol=1e-5, atol=1e-5)
    return found[1]


@each_of("num_slots", [1, 3])
@each_of("layout", LAYOUTS)
def test_gradients_are_those_of_torch_however_they_lie(layout: str, num_slots: int) -> None:
    direct, copied = (gradients(num_slots, LAYOUTS[layout], copy) for copy in (False, True))
    assert np.array_equal(direct.view(np.uint32), copied.view(np.uint32))


def test_offsets_of_equal_bags_are_made_once_and_those_of_others_anew() -> None:
    even = [torch.zeros(4, 2, dtype=torch.int64)] * 3
    (_, first), (_, second) = split_slots(even, "sum"), split_slots(even, "mean")
    assert first.offsets is second.offsets
    assert first.offsets.tolist() == list(range(0, 25, 2))
    _, other = split_slots([torch.zeros(4, 3, dtype=torch.int64)] * 2, "sum")
    assert other.offsets.tolist() == list(range(0, 25, 3))
