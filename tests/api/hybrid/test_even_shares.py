"""Batches that follow the speeds of the workers: shares, and loaders cut anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from torchfleet.api.hybrid.even_shares import Recut, Shares, joined, part_of
from torchfleet.api.hybrid.server_rounds import Told
from torchfleet.base.errors import DataError
from torchfleet.data.slots import Batch, Ragged


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def made(start: int, num: int) -> dict[str, Any]:
    numbers = torch.arange(start, start + num)
    return {"a": numbers, "pair": Pair(numbers * 2, numbers.view(-1, 1)), "list": [numbers.float()]}


def told(speeds: dict[int, float], samples: float = 100.0) -> dict[int, Told]:
    return {worker: Told(samples, samples / speed) for worker, speed in speeds.items()}


def shares(worker: int, speeds: dict[int, float], usual: int = 100) -> Shares:
    found = Shares(worker)
    found.usual = usual
    found.note(told(speeds))
    return found


def test_shares_follow_the_speeds_and_add_up_to_the_global_batch() -> None:
    speeds = {0: 1000.0, 1: 1000.0, 2: 200.0, 3: 1000.0}
    sizes = [shares(worker, speeds).next_size() for worker in speeds]
    assert sizes == [125, 125, 25, 125]
    assert shares(0, {0: 1.0, 1: 1e9}).next_size() == 1
    assert Shares(0).next_size() == 0  # nothing is known yet: recut takes the loader's size


def test_a_speed_follows_its_measurements_and_a_worker_that_is_gone_has_none() -> None:
    own = shares(0, {0: 1000.0, 1: 1000.0})
    own.note(told({0: 1000.0, 1: 500.0}))
    assert own.next_size() == round(200 * 1000 / 1900)
    own.note(told({0: 700.0}))
    assert own.next_size() == 100


def test_every_sample_counts_alike_in_rows() -> None:
    own = shares(0, {0: 1000.0, 1: 1000.0})
    assert own.row_share({0: Told(50.0, 1.0)}) == 0.5
    assert own.row_share({1: Told(50.0, 1.0)}) == 1.0


@pytest.mark.parametrize("sizes", [[10], [3, 17, 1, 9, 10], [25]])
def test_a_loader_is_cut_anew_without_losing_a_sample(sizes: list[int]) -> None:
    class Planned(Shares):
        def next_size(self) -> int:
            return sizes[len(found) % len(sizes)]

    found: list[dict[str, Any]] = []
    for batch in Recut((made(10 * i, 10) for i in range(7)), Planned(0)):
        found.append(batch)
        assert isinstance(batch["pair"], Pair)
    whole, expected = joined(found), made(0, 70)
    assert torch.equal(whole["a"], expected["a"])
    assert torch.equal(whole["pair"].y, expected["pair"].y)
    assert torch.equal(whole["list"][0], expected["list"][0])
    assert [len(batch["a"]) for batch in found[:-1]] == [sizes[i % len(sizes)] for i in range(len(found) - 1)]


def test_batches_of_datasets_are_cut_too() -> None:
    values, lengths = torch.arange(12), torch.tensor([2, 0, 5, 1, 4])
    batch = Batch({"ids": Ragged(values, lengths.cumsum(0) - lengths), "y": torch.arange(5)}, 5)
    parts = [part_of(batch, start, stop) for start, stop in [(0, 1), (1, 2), (2, 5)]]
    assert [[part.tolist() for part in each["ids"].split()] for each in parts] == [
        [[0, 1]], [[]], [[2, 3, 4, 5, 6], [7], [8, 9, 10, 11]],
    ]  # fmt: skip
    assert [part.num_samples for part in parts] == [1, 1, 3]
    again = joined(parts)
    assert torch.equal(again["ids"].offsets, batch["ids"].offsets)
    assert torch.equal(again["ids"].values, values)
    assert torch.equal(again["y"], batch["y"])


@pytest.mark.parametrize("batch", ["text", {"x": torch.ones(3), "y": torch.ones(4)}, [torch.tensor(1.0)], {"x": 3}])
def test_what_cannot_be_cut_says_so(batch: Any) -> None:
    def loader() -> Iterator[Any]:
        yield batch

    with pytest.raises(DataError, match="balance"):
        next(Recut(loader(), Shares(0)))
