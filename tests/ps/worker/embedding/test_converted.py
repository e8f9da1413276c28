"""A torch embedding whose rows are on the servers is still torch's: its class, attributes, hooks, and a user's subclass
with what it has. What cannot hold on servers is an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.cases import each_of
from support.jobs import fleet_optimizer, one_worker
from support.messages import names, naming

import torchfleet as fleet
from torchfleet.base.errors import ModelError

EMBEDDING = ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
BAG = (*EMBEDDING, "mode", "include_last_offset")
IDS = torch.tensor([[1, 2], [2, 0], [5, 1]])


class Items(torch.nn.Embedding):
    """A subclass with a method and an attribute of its own."""

    def __init__(self, num: int, dim: int) -> None:
        super().__init__(num, dim, padding_idx=0, sparse=True)
        self.dim, self.scale = dim, 0.5

    def scaled(self, ids: torch.Tensor) -> torch.Tensor:
        return self(ids) * self.scale


class Sequences(torch.nn.Module):
    """Reads the attributes of its embeddings in forward, as models of sequences do."""

    def __init__(self) -> None:
        super().__init__()
        self.items = Items(6, 4)
        self.words = torch.nn.Embedding(7, 4, scale_grad_by_freq=True)
        self.bags = torch.nn.EmbeddingBag(8, 4, mode="mean", padding_idx=3, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.items.scaled(ids) * self.items.embedding_dim**0.5 + self.words(input=ids)
        return rows.sum(1) + self.bags(ids) * (ids != self.items.padding_idx).sum(1, keepdim=True)


def attributes(model: torch.nn.Module) -> dict[str, Any]:
    found = {f"items.{name}": getattr(model.items, name) for name in (*EMBEDDING, "scale")}
    found |= {f"words.{name}": getattr(model.words, name) for name in EMBEDDING}
    return found | {f"bags.{name}": getattr(model.bags, name) for name in BAG}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(4):
        loss = model(IDS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made() -> Sequences:
    torch.manual_seed(0)
    return Sequences()


def test_class_attributes_and_results_are_those_of_torch() -> None:
    """The objects, too: what held an embedding before holds the converted one. And a hook on it is still called."""
    plain = made()
    expected, said = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1)), attributes(plain)
    model = made()
    held, calls = list(model.children()), []
    model.items.register_forward_hook(lambda *_: calls.append(1))
    model.words.sparse = True
    with one_worker(model, fleet_optimizer("sgd", lr=0.1), num_servers=2) as part:
        assert list(part.model.children()) == held
        assert attributes(part.model) == {**said, "words.sparse": True}
        assert isinstance(part.model.words, torch.nn.Embedding)
        assert isinstance(part.model.bags, torch.nn.EmbeddingBag)
        assert isinstance(part.model.items, Items)
        assert all(isinstance(module, fleet.nn.SparseEmbedding) for module in held)
        assert train(part.model, part.optimizer) == pytest.approx(expected, rel=1e-5)
        assert len(calls) == 4
        assert list(part.model.state_dict()) == list(plain.state_dict())
        torch.testing.assert_close(part.model.state_dict(), plain.state_dict())
        assert names(repr(part.model.bags), 8, 4, "mean", "'bags'")
        copied = copy.deepcopy(part.model).eval()
        assert isinstance(copied.items, Items)
        assert attributes(copied) == attributes(part.model)
        torch.testing.assert_close(copied(IDS), plain(IDS))
        again = fleet.to_plain(part.model)
    assert [type(module) for module in again.children()] == [Items, torch.nn.Embedding, torch.nn.EmbeddingBag]
    assert attributes(again) == {**said, "items.sparse": False, "bags.sparse": False}
    torch.testing.assert_close(again(IDS), plain(IDS))
    assert sorted(vars(again.items)) == sorted(vars(plain.items))


@each_of(
    ("name", "value"),
    [("max_norm", 1.0), ("num_embeddings", 60), ("embedding_dim", 8), ("padding_idx", None), ("sparse", False)],
)
def test_what_cannot_change_on_servers_is_an_error(name: str, value: Any) -> None:
    model = fleet.nn.convert(made())
    before = getattr(model.items, name)
    with pytest.raises(ModelError, match=naming("'items'", f"{name}={value!r}", before, "fleet.distributed_model")):
        setattr(model.items, name, value)
    assert getattr(model.items, name) == before
    setattr(model.items, name, before)


def test_a_mode_that_is_set_later_is_followed() -> None:
    plain, model = made(), made()
    model.bags.load_state_dict(plain.bags.state_dict())
    with one_worker(model) as part:
        part.model.bags.mode = plain.bags.mode = "sum"
        torch.testing.assert_close(part.model.bags(IDS), plain.bags(IDS))
        part.model.bags.mode = "median"
        with pytest.raises(ModelError, match=naming("'bags'", "'median'", "'mean'")):
            part.model.bags(IDS)


class Named(torch.nn.Embedding):
    def __init__(self) -> None:
        super().__init__(4, 2, sparse=True)
        self.name = "films"


class Placed(torch.nn.Embedding):
    def place(self) -> str:
        return "here"


class Counted(torch.nn.Embedding):
    def __init__(self) -> None:
        super().__init__(4, 2, sparse=True)
        self.register_buffer("counts", torch.zeros(4))


@pytest.mark.parametrize(
    ("embedding", "name"),
    [(Named, "name"), (lambda: Placed(4, 2, sparse=True), "place"), (Counted, "counts")],
    ids=["attribute", "method", "buffer"],
)
def test_a_subclass_that_would_lose_something_is_refused_by_its_name(embedding: Any, name: str) -> None:
    model = torch.nn.Sequential(embedding())
    with pytest.raises(ModelError, match=naming("'0'", f"'{name}'")):
        fleet.nn.convert(model)
    assert not isinstance(model[0], fleet.nn.SparseEmbedding)
