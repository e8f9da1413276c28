"""What fleet.prepare(sparse="auto") learns from a batch, and which tables it moves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import each_of
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchfleet as fleet
from torchfleet.api.prepare.first_batch import num_lookups

SIZES = {"users": 6040, "films": 3883, "occupations": 21, "zips": 3439}


class Films(torch.nn.Module):
    """The tables of MovieLens-1M: less than 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleDict({name: torch.nn.Embedding(size, 8) for name, size in SIZES.items()})


def ratings(num: int = 5000) -> TensorDataset:
    ids = [torch.randint(size, (num,)) for size in SIZES.values()]
    return TensorDataset(*ids, torch.rand(num))


class Drawing(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        return super().__getitem__(index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a stream is read")


@each_of(
    ("make", "expected"),
    [
        (lambda data: DataLoader(data, 256, shuffle=True), 256),
        (lambda data: DataLoader(data, 9000), 5000),
        (lambda data: DataLoader(TensorDataset(torch.zeros(9, 7, dtype=torch.int32), torch.rand(9, 50)), 4), 28),
        (lambda data: DataLoader(data, 4, num_workers=1, collate_fn=lambda x: {"ids": torch.zeros(4, 11).long()}), 44),
        (lambda data: DataLoader(data, None), 1),
        (lambda data: DataLoader(TensorDataset(torch.rand(9)), 4), None),
        (lambda data: DataLoader(Stream(), 4), None),
        (lambda data: DataLoader(data, 4, sampler=[3, 1, 2]), None),
        (lambda data: DataLoader([], 4), None),
    ],
    ids=["columns", "all", "block", "collated", "no batches", "floats", "stream", "own sampler", "empty"],
)
def test_lookups_are_the_numbers_of_the_largest_integer_tensor(make: Any, expected: int | None) -> None:
    assert num_lookups(make(ratings())) == expected


def test_random_numbers_stay_as_they_were() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    found = []
    for look in (False, True):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        loader = DataLoader(Drawing(torch.arange(9)), 4, shuffle=True)
        if look:
            assert num_lookups(loader) == 4
        found.append(drawn())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("size", "moved"), [(256, {"users", "films", "zips"}), (2048, {"users", "films", "zips"}), (4096, {"users"})]
)
def test_auto_moves_tables_of_which_a_batch_leaves_most_rows_untouched(
    size: int, moved: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model = Films()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        fleet.prepare(model, optimizer, DataLoader(ratings(), size, shuffle=True), sparse="auto")
        found = {name for name, table in model.tables.items() if isinstance(table, fleet.nn.SparseEmbedding)}
        assert found == moved
    finally:
        fleet.reset()
