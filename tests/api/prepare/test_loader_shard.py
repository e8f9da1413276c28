"""A DataLoader among workers: together they see what the loader alone would show, in the same rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import each_of
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torchfleet.api.prepare.loader_shard import shared_loader


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


def epochs(
    make: Callable[[], DataLoader[Any]], num: int, num_epochs: int = 1, each_pass: bool = True
) -> list[list[list[int]]]:
    """By worker: its batches. Each worker has other random numbers, as processes have: worker 0 begins with seed 0."""
    found = []
    told: dict[str, bytes] = {}

    def agree(name: str, data: bytes) -> bytes:
        return told.setdefault(name, data)

    for index in range(num):
        torch.manual_seed(index)
        loader = shared_loader(make(), index, num, agree, each_pass)
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


WEIGHTS = [1.0] * 20 + [0.0] * 7


@each_of(
    "options",
    [
        lambda size: {"batch_size": size, "shuffle": True},
        lambda size: {"batch_size": size, "sampler": RandomSampler(Numbers(27), replacement=True, num_samples=70)},
        lambda size: {"batch_size": size, "sampler": WeightedRandomSampler(WEIGHTS, 27)},
        lambda size: {"batch_size": size, "sampler": SubsetRandomSampler(range(3, 25))},
        lambda size: {"batch_sampler": BatchSampler(RandomSampler(Numbers(27)), size, False)},
        lambda size: {"batch_size": size, "shuffle": True, "num_workers": 1},
    ],
    ids=["shuffle", "replacement", "weights", "subset", "batch sampler", "processes"],
)
def test_without_a_generator_the_order_is_that_of_plain_torch_with_the_seed_of_worker_0(options: Any) -> None:
    """In every epoch, and though workers draw other random numbers in between."""
    torch.manual_seed(0)
    alone = DataLoader(Numbers(27), **options(8))
    expected = [batch.tolist() for _ in range(3) for batch in alone]
    found = epochs(lambda: DataLoader(Numbers(27), **options(4)), 2, 3)
    assert rounds(found) == expected


def test_random_numbers_that_the_script_draws_count_as_in_plain_torch() -> None:
    """Worker 0's do, and are not disturbed; those of worker 1 are its own."""

    def drawn(loader: Any) -> list[list[int]]:
        return [
            [*torch.randint(1000, (3,)).tolist(), *(x for batch in loader for x in batch.tolist())] for _ in range(3)
        ]

    torch.manual_seed(0)
    expected = drawn(DataLoader(Numbers(8), 4, shuffle=True))
    told: dict[str, bytes] = {}
    torch.manual_seed(0)
    first = drawn(shared_loader(DataLoader(Numbers(8), 2, shuffle=True), 0, 2, told.setdefault))
    torch.manual_seed(1)
    own = torch.randint(1000, (3,)).tolist()
    torch.manual_seed(1)
    other = drawn(shared_loader(DataLoader(Numbers(8), 2, shuffle=True), 1, 2, told.setdefault))
    assert [one[:3] for one in first] == [one[:3] for one in expected]
    assert [sorted(a[3:] + b[3:]) for a, b in zip(first, other, strict=True)] == [list(range(8))] * 3
    assert [a[3:5] + b[3:5] for a, b in zip(first, other, strict=True)] == [one[3:7] for one in expected]
    assert other[0][:3] == own


def test_workers_that_do_not_wait_for_each_other_agree_once() -> None:
    names: list[str] = []

    def agree(name: str, data: bytes) -> bytes:
        names.append(name)
        return bytes(data)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    loaders = []
    for index in range(2):
        torch.set_rng_state(state)
        loaders.append(shared_loader(DataLoader(Numbers(26), 4, shuffle=True), index, 2, agree, False, "films"))
    torch.manual_seed(5)
    passes = [[x for batch in loader for x in batch.tolist()] for loader in loaders for _ in range(2)]
    assert names == ["films, pass 0"] * 2
    for first, other in ((0, 2), (1, 3)):
        assert sorted(passes[first] + passes[other]) == list(range(26))
    assert passes[0] != passes[1]


@pytest.mark.parametrize("num", [2, 3, 4])
def test_samples_are_dealt_out_evenly_to_one_sample(num: int) -> None:
    """Also where the last round has all of its batches, and the last one is short."""
    for total in range(1, 40):
        found = epochs(lambda total=total: DataLoader(Numbers(total), 4), num)
        counts = [sum(map(len, worker)) for worker in found]
        assert max(counts) - min(counts) <= 1, (total, counts)
        assert {len(worker) for worker in found} == {-(-total // (4 * num))}
        assert sorted({x for worker in found for batch in worker for x in batch}) == list(range(total))


@each_of(
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


@each_of("size", [5, 1, None])
@each_of("kind", [Numbers, Stream])
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


def test_a_loader_that_is_shared_already_stays_as_it_is() -> None:
    numbers = Numbers(10)
    loader = DataLoader(numbers, 2, sampler=DistributedSampler(numbers, 2, 1))
    assert shared_loader(loader, 1, 2, {}.setdefault) is loader
    assert shared_loader(alone := DataLoader(numbers), 0, 1, {}.setdefault) is alone


class Collated(DataLoader[Any]):
    """As those of PyTorch Geometric: its collate function is a method that reads an attribute."""

    def __init__(self, num: int, size: int | None, **options: Any) -> None:
        self.offset = 0
        super().__init__(Numbers(num), size, collate_fn=self.collate, **options)

    def collate(self, samples: Any) -> torch.Tensor:
        return torch.as_tensor(samples) + self.offset


class Streamed(DataLoader[Any]):
    """A subclass over a stream."""


class Shuffled(Collated):
    """As those of RecBole: it has its own __iter__ and __len__, and here an order of numpy's."""

    size = 4

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = np.random.permutation(len(self.dataset))
        for number in range(len(self)):
            yield self.collate(order[number * self.size : (number + 1) * self.size].tolist())

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self.size)


class Marked(Collated):
    """Calls DataLoader's own iteration."""

    def __iter__(self) -> Any:
        self.num_passes = getattr(self, "num_passes", 0) + 1
        return super().__iter__()


@each_of(
    "make",
    [
        lambda: Collated(26, 4, shuffle=True),
        lambda: Collated(26, None, shuffle=True),
        lambda: Collated(26, 4, shuffle=True, num_workers=1),
        lambda: Collated(26, 4, sampler=RandomSampler(range(26), generator=torch.Generator().manual_seed(3))),
        lambda: Streamed(Stream(26), 4),
        lambda: Streamed(Stream(26), None),
        lambda: Streamed(Numbers(26), batch_sampler=BatchSampler(RandomSampler(range(26)), 4, False)),
    ],
    ids=["shuffle", "no batches", "processes", "generator", "stream", "stream without batches", "batch sampler"],
)
@each_of("num", [2, 3])
def test_a_subclass_is_shared_as_a_loader_of_torch(make: Any, num: int) -> None:
    found = epochs(make, num)
    assert {number for worker in found for batch in worker for number in batch} == set(range(26))
    assert len({len(worker) for worker in found}) == 1
    counts = [sum(map(len, worker)) for worker in found]
    assert max(counts) - min(counts) <= 1
    torch.manual_seed(0)
    shared = shared_loader(alone := make(), 0, num, lambda name, data: data)
    assert type(shared) is type(alone)
    assert shared.batch_size == alone.batch_size


@each_of("make", [lambda: Shuffled(30, 4), lambda: Marked(30, 4, shuffle=True), lambda: Marked(30, 4)])
@pytest.mark.parametrize("each_pass", [True, False])
def test_batches_of_a_class_with_its_own_iteration_are_dealt_out_whole(make: Any, each_pass: bool) -> None:
    """Each worker's random numbers are other ones, of numpy too. 8 batches: of each, one worker makes use."""
    own: dict[int, Any] = {}

    def seeded() -> Any:
        np.random.seed(100 + len(own))
        return own.setdefault(len(own), make())

    found = epochs(seeded, 2, 2, each_pass)
    for start in (0, 4):
        batches = [batch for worker in found for batch in worker[start : start + 4]]
        assert sorted(number for batch in batches for number in batch) == list(range(30))
        assert sorted(map(len, batches)) == [2, *[4] * 7]


def test_a_short_last_round_of_whole_batches_is_repeated_or_dropped() -> None:
    found = epochs(lambda: Marked(17, 4), 3)
    assert [worker[-1] for worker in found] == [[12, 13, 14, 15], [16], [12, 13, 14, 15]]
    found = epochs(lambda: Marked(17, 4, drop_last=True), 3)
    assert [len(worker) for worker in found] == [1, 1, 1]


def test_code_that_makes_batches_sees_what_is_set_on_the_share() -> None:
    share: Any = shared_loader(Collated(8, 2), 0, 2, lambda name, data: data)
    share.offset = 100
    assert [batch.tolist() for batch in share] == [[100, 101], [104, 105]]
