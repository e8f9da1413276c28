"""Every option of torch.nn.EmbeddingBag and torch.nn.Embedding that is converted, against torch: values, gradients of
the rows, and gradients of the weights of samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import one_worker
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import ModelError

NUM, DIM = 7, 3


class Holder(torch.nn.Module):
    def __init__(self, rows: torch.nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, *args: Any) -> torch.Tensor:
        out: torch.Tensor = self.rows(*args)
        return out


def pair(kind: type[torch.nn.Module], **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(one to be converted, one that stays): torch itself has no sparse gradients with some of these options."""
    torch.manual_seed(2)
    plain = kind(NUM, DIM, **options)
    ours = copy.deepcopy(plain)
    ours.sparse = True
    return Holder(ours), plain


def assert_equal_to_torch(kind: type[torch.nn.Module], batches: list[tuple[Any, ...]], **options: Any) -> None:
    """Three steps of SGD; 1e-5: sums of a few numbers around 1, in another order."""
    model, plain = pair(kind, **options)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    with one_worker(model, num_servers=2) as part:
        for batch in batches:
            inputs = batch[:2]
            weights = [[one.clone().requires_grad_() for one in batch[2:]] for _ in range(2)]
            ours, expected = model(*inputs, *weights[0]), plain(*inputs, *weights[1])
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
            factors = torch.arange(1.0, expected.numel() + 1).view_as(expected) / 7
            (ours * factors).sum().backward()
            (expected * factors).sum().backward()
            for found, wanted in zip(*weights, strict=True):
                torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-5)
            part.optimizer.step()
            part.optimizer.zero_grad()
            reference.step()
            reference.zero_grad()
        torch.testing.assert_close(part.rows("rows", range(NUM)), plain.weight.detach(), rtol=1e-5, atol=1e-5)


BAGS = st.lists(st.lists(st.integers(0, NUM - 1), max_size=4), min_size=1, max_size=5)


def flat(bags: list[list[int]], last: bool, weights: bool) -> tuple[Any, ...]:
    ids = torch.tensor([number for bag in bags for number in bag], dtype=torch.int64)
    ends = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    batch = ids, ends if last else ends[:-1]
    return (*batch, torch.linspace(-1, 2, len(ids))) if weights else batch


@pytest.mark.slow
@given(
    bags=BAGS,
    mode=st.sampled_from(["sum", "mean", "max"]),
    padding=st.sampled_from([None, 2]),
    last=st.booleans(),
    weights=st.booleans(),
)
@settings(max_examples=examples(15))
def test_bags_of_any_options_equal_torch(
    bags: list[list[int]], mode: str, padding: int | None, last: bool, weights: bool
) -> None:
    options = {"mode": mode, "padding_idx": padding, "include_last_offset": last}
    batch = flat(bags, last, weights and mode == "sum")
    assert_equal_to_torch(torch.nn.EmbeddingBag, [batch] * 2, **options)


class PooledEmbedding(torch.nn.Embedding):
    """Bags over torch's Embedding: its EmbeddingBag (2.13) divides by the count of another id where ids repeat."""

    mode = "sum"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = super().forward(ids)
        return rows.sum(dim=1) if self.mode == "sum" else rows.mean(dim=1)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_of_bags_are_divided_by_how_often_an_id_appears(mode: str) -> None:
    model, _ = pair(torch.nn.EmbeddingBag, mode=mode, scale_grad_by_freq=True)
    plain = PooledEmbedding(NUM, DIM, scale_grad_by_freq=True, _weight=model.rows.weight.detach().clone())
    plain.mode = mode
    ids = torch.tensor([[1, 1, 3], [4, 1, 6], [6, 0, 0]])
    with one_worker(model) as part:
        found, expected = model(ids), plain(ids)
        torch.testing.assert_close(found, expected)
        for out in (found, expected):
            (out**2).sum().backward()
        part.optimizer.step()
        moved = plain.weight.detach() - 0.5 * plain.weight.grad
        torch.testing.assert_close(part.rows("rows", range(NUM)), moved)


def test_two_dimensional_bags_with_weights_equal_torch() -> None:
    ids = torch.tensor([[1, 1, 3], [4, 5, 6]])
    weights = torch.tensor([[0.5, 2.0, -1.0], [1.0, 0.0, 3.0]])
    assert_equal_to_torch(torch.nn.EmbeddingBag, [(ids, None, weights), (ids, None)], mode="sum")


def test_the_first_of_equal_rows_is_the_largest() -> None:
    model, plain = pair(torch.nn.EmbeddingBag, mode="max")
    for module in (model.rows, plain):
        torch.nn.init.ones_(module.weight)
    ids = torch.tensor([[3, 1, 2], [0, 4, 4]])
    with one_worker(model) as part:
        model(ids).sum().backward()
        part.optimizer.step()
        plain(ids).sum().backward()
        expected = plain.weight.detach() - 0.5 * plain.weight.grad
        torch.testing.assert_close(part.rows("rows", range(NUM)), expected)


def test_gradients_of_an_embedding_are_divided_by_how_often_an_id_appears() -> None:
    batches = [(torch.tensor([[1, 1, 3], [4, 1, 6]]),), (torch.tensor([2, 2]),)]
    assert_equal_to_torch(torch.nn.Embedding, batches, scale_grad_by_freq=True)


def test_weights_of_a_frozen_table_still_learn() -> None:
    model, plain = pair(torch.nn.EmbeddingBag, mode="sum")
    model.rows.weight.requires_grad_(False)
    model.extra = torch.nn.Linear(1, 1)
    with one_worker(model) as part:
        weights = torch.ones(1, 3, requires_grad=True)
        model(torch.tensor([[1, 2, 3]]), None, weights).sum().backward()
        torch.testing.assert_close(weights.grad, plain.weight[1:4].sum(dim=1).detach()[None])
        assert not part.worker.engine.take_gradients(["rows"])[0]


@pytest.mark.parametrize(
    ("mode", "arguments", "text"),
    [
        ("mean", ([[1, 2]], None, [[1.0, 1.0]]), "pooling 'mean'"),
        ("sum", ([[1, 2]], None, [[1.0]]), "(1, 1)"),
        ("sum", ([1, 2], [0], [1, 1]), "(2,) torch.int64"),
    ],
)
def test_weights_that_torch_would_refuse_are_refused(mode: str, arguments: tuple[Any, ...], text: str) -> None:
    model, _ = pair(torch.nn.EmbeddingBag, mode=mode)
    with one_worker(model), pytest.raises(ModelError, match=naming(*text.split())):
        model(*(None if value is None else torch.tensor(value) for value in arguments))


def test_a_last_offset_that_is_not_the_number_of_ids_is_refused() -> None:
    model, _ = pair(torch.nn.EmbeddingBag, include_last_offset=True)
    with (
        one_worker(model),
        pytest.raises(ModelError, match=naming(3, "[2]")),
    ):
        model(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]))
