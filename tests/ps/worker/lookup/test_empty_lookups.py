"""Lookups without ids, beside others of the same table: as in plain torch, in every kind of table."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import each_of

import torchfleet as fleet

pytestmark = pytest.mark.slow

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"a_sync": True},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 1}},
}
PAIRS = [([0, 1, 2], [5, 6]), ([], [5, 6]), ([], []), ([3], []), ([], [7]), ([2, 1], [1, 1])]
BATCHES = [(torch.tensor(a, dtype=torch.long), torch.tensor(b, dtype=torch.long)) for a, b in PAIRS]


@contextlib.contextmanager
def job(model: torch.nn.Module, is_collective: bool = False, **strategy: Any) -> Iterator[tuple[Any, Any]]:
    fleet.init(is_collective=is_collective)
    try:
        model = fleet.distributed_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = [] if is_collective else [fleet.DistributedStrategy(**strategy)]
        distributed = fleet.distributed_optimizer(optimizer, *options)
        if not is_collective:
            fleet.init_worker()
        yield model, distributed
    finally:
        fleet.reset()


def step(model: Any, optimizer: Any, *batch: Any) -> torch.Tensor:
    out = model(*batch)
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return out.detach()


class Two(torch.nn.Module):
    """Two lookups in one layer; `shift` makes its ids computed ones."""

    def __init__(self, layer: torch.nn.Module, shift: int = 0) -> None:
        super().__init__()
        self.layer, self.shift, self.out = layer, shift, torch.nn.Linear(2, 1)

    def forward(self, history: Any, item: Any) -> torch.Tensor:
        shifted = history + self.shift if self.shift else history
        return self.out(self.layer(shifted).sum(0) + self.layer(item).sum(0))


@each_of("shift", [0, 1])
@each_of("padding_idx", [None, 1])
@each_of("mode", list(MODES))
def test_an_embedding_without_ids_is_as_in_torch(mode: str, padding_idx: int | None, shift: int) -> None:
    torch.manual_seed(0)
    model = Two(torch.nn.Embedding(20, 2, sparse=True, padding_idx=padding_idx), shift)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with job(model, **MODES[mode]) as (model, optimizer):
        for batch in BATCHES:
            found = step(model, optimizer, *batch)
            fleet.flush() if mode == "async" else None
            torch.testing.assert_close(found, step(plain, plain_optimizer, *batch))
            with torch.no_grad():
                torch.testing.assert_close(model(*batch), plain(*batch))


class Weighted(torch.nn.Module):
    """Bags with learned weights, or without, and another lookup in the same layer."""

    def __init__(self, layer: torch.nn.Module, is_weighted: bool) -> None:
        super().__init__()
        self.layer, self.is_weighted, self.scale = layer, is_weighted, torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        weights = {"per_sample_weights": self.scale.expand(len(ids))} if self.is_weighted else {}
        return self.layer(ids, offsets, **weights).sum() + self.scale * self.layer(other).sum()


@each_of("is_weighted", [False, True])
def test_empty_bags_are_as_in_torch(is_weighted: bool) -> None:
    torch.manual_seed(0)
    model = Weighted(torch.nn.EmbeddingBag(20, 2, mode="sum", sparse=True), is_weighted)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    two, none = torch.zeros(2, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    other = torch.tensor([[5, 6]])
    batches = [(torch.arange(3), two, other), (none, two, other), (none, none, other), (none, two, other[:0])]
    with job(model) as (model, optimizer):
        for batch in [*batches, *batches]:
            torch.testing.assert_close(step(model, optimizer, *batch), step(plain, plain_optimizer, *batch))
        state = model.state_dict()
    torch.testing.assert_close(dict(state), dict(plain.state_dict()))


class Joined(torch.nn.Module):
    """A collection, called as `Two` calls its layer."""

    def __init__(self, make: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.tables = fleet.nn.SparseEmbeddingCollection({name: make() for name in ("history", "item")})
        self.out = torch.nn.Linear(2, 1)

    def forward(self, history: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        found = self.tables({"history": history, "item": item})
        return self.out(found["history"].sum(0) + found["item"].sum(0))


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "any id": lambda: Two(fleet.nn.SparseEmbedding(2)),
    "admission": lambda: Two(fleet.nn.SparseEmbedding(2, entry=fleet.CountFilterEntry(1))),
    "int8": lambda: Two(fleet.nn.SparseEmbedding(2, dtype="int8")),
    "a cache": lambda: Two(fleet.nn.SparseEmbedding(2, cache="1MB")),
    "two parts": lambda: Two(fleet.nn.TwoPartEmbedding(2, 1)),
    "a collection": lambda: Joined(lambda: fleet.nn.SparseEmbedding(2)),
    "a device": lambda: Two(fleet.nn.SparseEmbedding(2, device="cpu")),
    "a collection on a device": lambda: Joined(lambda: fleet.nn.SparseEmbedding(2, device="cpu")),
}


@each_of("kind", list(LAYERS))
def test_every_kind_of_table_takes_no_ids(kind: str) -> None:
    model = LAYERS[kind]()
    with job(model, is_collective="a device" in kind) as (model, optimizer):
        bias = model.out.bias.detach().clone()
        for history, item in BATCHES:
            found = step(model, optimizer, history, item)
            if not len(history) and not len(item):
                torch.testing.assert_close(found, bias)
            bias = model.out.bias.detach().clone()


def test_empty_arrays_of_strings_are_ids() -> None:
    with job(Two(fleet.nn.SparseEmbedding(2))) as (model, optimizer):
        for none in (np.array([], "U3"), np.array([], object)):
            for history, item in ((["a", "b"], ["c"]), (none, ["c"]), (none, none)):
                found = step(model, optimizer, history, item)
            assert found.shape == (1,)
            assert model.layer(none).shape == (0, 2)
