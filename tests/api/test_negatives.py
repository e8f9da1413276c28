"""Negatives in one process: how often items are drawn, what is excluded, and in-batch losses against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.messages import naming
from torch.nn import functional as F

import torchfleet as fleet
from torchfleet.base.errors import DataError

Popularity, Uniform = fleet.data.negatives.Popularity, fleet.data.negatives.Uniform
IDS, COUNTS = [7, -3, 2**62, 5], [1, 10, 100, 1000]


@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
def test_items_are_drawn_with_the_probability_that_log_q_says(power: float) -> None:
    sampler = Popularity(IDS, COUNTS, power, seed=0)
    expected = np.array(COUNTS) ** power / (np.array(COUNTS) ** power).sum()
    assert torch.exp(sampler.log_q(IDS)).tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    drawn = sampler.draw(100_000)
    shares = [(drawn.ids == item).double().mean().item() for item in IDS]
    assert shares == pytest.approx(expected.tolist(), abs=0.008)  # five standard deviations; the seed is fixed
    assert torch.equal(drawn.log_q, sampler.log_q(drawn.ids))


def test_a_sample_never_gets_its_own_item() -> None:
    own = torch.tensor([5, 5, 7, 2**62])
    drawn = Popularity(IDS, COUNTS, seed=1).draw(200, exclude=own)
    assert drawn.ids.shape == drawn.log_q.shape == (4, 200)
    assert not (drawn.ids == own.unsqueeze(1)).any()
    assert set(drawn.ids[0].tolist()) <= {7, -3, 2**62}


def test_uniform_draws_all_items_alike_and_takes_a_number_or_ids() -> None:
    drawn = Uniform(8, seed=2).draw(8000)
    counts = torch.bincount(drawn.ids, minlength=8)
    assert counts.min() > 850
    assert drawn.log_q.unique().tolist() == pytest.approx([-np.log(8)])
    assert set(Uniform(["a", "b"], seed=0).draw(50).ids.tolist()) == {
        int(np.uint64(fleet.hash_string(text)).astype(np.int64)) for text in "ab"
    }


def test_counts_are_those_of_the_occurrences_and_an_unseen_item_counts_as_one() -> None:
    sampler = Popularity.of(np.repeat(IDS, COUNTS), power=1.0)
    assert torch.exp(sampler.log_q(IDS)).tolist() == pytest.approx((np.array(COUNTS) / 1111).tolist(), rel=1e-5)
    assert torch.exp(sampler.log_q([999])).item() == pytest.approx(1 / 1111, rel=1e-5)


def test_the_same_seed_draws_the_same() -> None:
    first, second, other = (Popularity(IDS, COUNTS, seed=seed).draw(50).ids.tolist() for seed in (3, 3, 4))
    assert first == second != other


@pytest.mark.parametrize("corrects", [False, True])
def test_in_batch_is_a_softmax_over_the_items_of_the_batch(corrects: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    users, items = (torch.randn(6, 4, generator=rng, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ids, log_q = torch.tensor([1, 2, 1, 3, 4, 5]), torch.randn(6, generator=rng, dtype=torch.float64)
    loss = F.cross_entropy(*fleet.data.negatives.in_batch(users, items, ids, log_q if corrects else None, 0.5))
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(6):
        scores = [users[row] @ items[place] / 0.5 - (log_q[place] if corrects else 0) for place in range(6)]
        kept = [score for place, score in enumerate(scores) if place == row or ids[place] != ids[row]]
        expected = expected - (scores[row] - torch.logsumexp(torch.stack(kept), 0)) / 6
    torch.testing.assert_close(loss, expected)
    for found, wanted in zip(
        torch.autograd.grad(loss, [users, items]), torch.autograd.grad(expected, [users, items]), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_across_workers_a_process_alone_has_its_own_batch() -> None:
    users, items = torch.randn(3, 2), torch.randn(3, 2, requires_grad=True)
    alone, among = (
        fleet.data.negatives.in_batch(users, items, [1, 2, 3], across_workers=flag) for flag in (False, True)
    )
    assert torch.equal(alone.logits, among.logits)
    assert torch.equal(*(torch.autograd.grad(F.cross_entropy(*found), items)[0] for found in (alone, among)))


def test_across_workers_bfloat16_vectors_are_taken_and_get_gradients_of_their_own_type() -> None:
    users, items = (torch.randn(3, 2, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    log_q = torch.randn(3, dtype=torch.bfloat16)
    alone, among = (
        fleet.data.negatives.in_batch(users, items, [1, 2, 3], log_q, across_workers=flag) for flag in (False, True)
    )
    assert among.logits.dtype == torch.bfloat16
    assert torch.equal(alone.logits, among.logits)
    first, second = (torch.autograd.grad(F.cross_entropy(*found), items)[0] for found in (alone, among))
    assert second.dtype == torch.bfloat16
    assert torch.equal(first, second)


def test_what_cannot_be_drawn_is_an_error() -> None:
    with pytest.raises(DataError, match=naming(2, 1)):
        Popularity([1, 2], [1])
    with pytest.raises(DataError, match=naming("counts")):
        Popularity([1, 2], [1, 0])
    with pytest.raises(DataError, match=naming(5)):
        Uniform([5]).draw(2, exclude=[5])
    with pytest.raises(DataError, match=naming("ids")):
        Uniform([0.5, 1.5])
    with pytest.raises(DataError, match=naming("power")):
        Popularity([1, 2], [1, 1e300], 1.0).draw(2, exclude=[2])
    with pytest.raises(DataError, match=naming("in_batch", 3)):
        fleet.data.negatives.in_batch(torch.zeros(2, 3), torch.zeros(2, 3), [1, 2, 3])
