"""Ranks that know how many batches they have agree once; others ask before every batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.cases import each_of
from support.ranks import Ranks
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import torchfleet as fleet
from torchfleet.collective.meeting.batch_agreement import exact_length

ROWS = TensorDataset(torch.arange(10))


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Says that it has more than it yields."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        return iter(range(6))


class Few(Sampler[int]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        return iter(range(6))


@each_of(
    "loader, expected",
    [
        ([1, 2, 3], 3),
        ((), 0),
        (DataLoader(ROWS, batch_size=4), 3),
        (DataLoader(ROWS, batch_size=4, drop_last=True, shuffle=True), 2),
        (DataLoader(Stream(), batch_size=2), None),
        (DataLoader(ROWS, batch_size=2, sampler=Few()), None),
        (DataLoader(ROWS, batch_size=None), None),
        (iter([1, 2]), None),
        (range(3), None),
    ],
)
def test_a_length_is_believed_where_it_cannot_be_wrong(loader: Any, expected: int | None) -> None:
    assert exact_length(loader) == expected


def uneven() -> dict[str, Any]:
    fleet.init(is_collective=True)
    model = fleet.distributed_model(torch.nn.Linear(4, 2))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    own, asked = list(range(3 + 2 * fleet.worker_index())), []
    all_reduce = dist.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = noted  # type: ignore[assignment]
    counted = list(fleet.prefetch(own))
    num_asked = len(asked)
    streamed = list(fleet.prefetch(iter(own)))
    fleet.stop_worker()
    return {"counted": counted, "num_asked": num_asked, "streamed": streamed}


def test_lists_of_unequal_length_end_together_after_one_question(ranks: Ranks) -> None:
    for found in ranks.run(uneven, 2):
        assert found["counted"] == found["streamed"] == [0, 1, 2]
        assert found["num_asked"] == 1
