"""A DataLoader among workers: together they see what the loader alone would show, in the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.messages import naming
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from torchfleet.api.loader_shard import shared_loader
from torchfleet.base.errors import FleetError


class Numbers(Dataset[int]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))

    def __len__(self) -> int:
        return self.num


def epochs(make: Callable[[], DataLoader[Any]], num: int, num_epochs: int = 1) -> list[list[list[int]]]:
    """By worker: its batches. Each worker has other random numbers, as processes have."""
    found = []
    told: list[bytes] = []

    def agree(data: bytes) -> bytes:
        told.append(data)
        return told[0]

    for index in range(num):
        torch.manual_seed(index)
        loader = shared_loader(make(), index, num, agree)
        batches = [torch.as_tensor(batch).reshape(-1).tolist() for _ in range(num_epochs) for batch in loader]
        assert len(batches) == len(loader) * num_epochs
        found.append(batches)
    return found


def rounds(found: list[list[list[int]]]) -> list[list[int]]:
    return [[number for batch in taken for number in batch] for taken in zip(*found, strict=True)]


@pytest.mark.parametrize("num", [2, 3])
def test_a_round_of_all_workers_is_a_batch_of_a_loader_with_as_many_samples(num: int) -> None:
    """Also the last, which is short, and in the second epoch, which has another order."""

    def loader(size: int) -> DataLoader[Any]:
        return DataLoader(Numbers(27), size, shuffle=True, generator=torch.Generator().manual_seed(7))

    alone = loader(4 * num)
    expected = [batch.tolist() for _ in range(2) for batch in alone]
    found = epochs(lambda: loader(4), num, 2)
    assert rounds(found) == expected
    assert len({len(worker[-1]) for worker in found}) <= 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(26), 4, shuffle=True),
        lambda: DataLoader(Numbers(26), batch_sampler=BatchSampler(RandomSampler(range(26)), 4, False)),
        lambda: DataLoader(Numbers(26), None, shuffle=True),
        lambda: DataLoader(Numbers(26), 4, shuffle=True, num_workers=1),
        lambda: DataLoader(Stream(26), 4),
        lambda: DataLoader(Stream(26), None),
    ],
    ids=["shuffle", "batch sampler", "no batches", "processes", "stream", "stream without batches"],
)
def test_every_sample_goes_to_one_worker_though_each_has_its_own_random_numbers(make: Any) -> None:
    found = epochs(make, 2)
    assert sorted(number for worker in found for batch in worker for number in batch) == list(range(26))
    assert len(found[0]) == len(found[1])


@pytest.mark.parametrize("size", [5, 1, None])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_workers_have_as_many_batches_where_samples_do_not_go_round(kind: Any, size: int | None) -> None:
    """16 samples and three workers: two samples are given twice, where one batch is one sample."""
    found = epochs(lambda: DataLoader(kind(16), size), 3)
    assert len({len(worker) for worker in found}) == 1
    given = sorted(number for worker in found for batch in worker for number in batch)
    assert set(given) == set(range(16))
    assert len(given) <= 18


def test_drop_last_keeps_its_meaning() -> None:
    found = epochs(lambda: DataLoader(Numbers(30), 4, drop_last=True), 2)
    assert rounds(found) == [list(range(start, start + 8)) for start in (0, 8, 16)]


def test_a_weighted_sampler_draws_alike_on_all_workers() -> None:
    weights = [1.0] * 10 + [0.0] * 10
    alone = list(WeightedRandomSampler(weights, 12, generator=torch.Generator().manual_seed(0)))

    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(20), 3, sampler=WeightedRandomSampler(weights, 12))

    assert sorted(number for taken in rounds(epochs(make, 2)) for number in taken) == sorted(alone)


def test_a_loader_that_is_shared_already_stays_as_it_is() -> None:
    numbers = Numbers(10)
    loader = DataLoader(numbers, 2, sampler=DistributedSampler(numbers, 2, 1))
    assert shared_loader(loader, 1, 2, bytes) is loader
    assert shared_loader(alone := DataLoader(numbers), 0, 1, bytes) is alone


def test_a_loader_of_another_class_is_refused() -> None:
    class Own(DataLoader[int]):
        pass

    with pytest.raises(FleetError, match=naming("Own", "fleet.data_shard", "fleet.prefetch")):
        shared_loader(Own(Numbers(3)), 0, 2, bytes)
