"""How many samples a model is called with."""

from __future__ import annotations

from typing import Any

import torch
from support.cases import each_of

from torchfleet.ps.worker.batch.batch_tensors import num_samples, tensors_of

IDS = torch.arange(9)


@each_of(
    ("inputs", "num"),
    [
        ([], 0),
        ([IDS], 9),
        ([torch.zeros(4, 3), torch.zeros(4)], 4),
        ([IDS, torch.tensor([0, 2, 2, 7])], 4),  # flat ids, and where bags begin
        ([[IDS], {"offsets": torch.tensor([0, 5])}], 2),
        ([IDS, torch.tensor([0, 2, 9])], 2),  # include_last_offset
        ([IDS, torch.tensor([0])], 1),
        ([IDS, torch.tensor([1, 2])], 9),  # no place is the first: numbers of another kind
        ([IDS, torch.tensor([0, 3, 2])], 9),
        ([IDS, torch.tensor([0, 10])], 9),
        ([IDS, torch.zeros(3)], 9),
        ([IDS, torch.zeros(9, dtype=torch.int64)], 9),  # labels
        ([IDS.view(3, 3), torch.tensor([0, 2])], 3),
    ],
)
def test_bags_count_where_ids_are_flat(inputs: Any, num: int) -> None:
    assert num_samples(inputs, tensors_of(inputs).values()) == num
