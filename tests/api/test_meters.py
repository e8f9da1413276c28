"""Meters of rankings and click models in one process, against scikit-learn and plain recomputation. Those of several
workers: tests/integration/test_metrics_distributed.py."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extras import Late
from support.searches import examples

from torchfleet.base.errors import FleetError
from torchfleet.metrics import NDCG, Calibration, HitRate, LogLoss

oracle, calibration = Late("sklearn.metrics"), Late("sklearn.calibration")
Floats = npt.NDArray[np.float64]


def lists(seed: int, num_lists: int = 40, num: int = 12, levels: int = 5) -> tuple[Floats, Floats]:
    """Scores with ties, and gains; some lists have none above 0."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, levels, (num_lists, num)).astype(float), rng.integers(-3, 3, (num_lists, num)).clip(0) * 1.0


def hits_of_all_orders(scores: Floats, gains: Floats, k: int) -> float:
    """The share of the orders that agree with the scores in which a relevant candidate is among the first `k`."""
    orders = [
        order
        for order in itertools.permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    return float(np.mean([any(gains[place] > 0 for place in order[:k]) for order in orders]))


@pytest.mark.parametrize("k", [1, 2, 5, 100])
def test_ndcg_is_that_of_scikit_learn_with_ties_and_gains(k: int) -> None:
    scores, gains = lists(0)
    kept = gains.max(axis=1) > 0
    meter = NDCG(k)
    for part in np.array_split(np.arange(len(scores)), 3):
        returned = meter.update(torch.from_numpy(scores[part]), gains[part])
    expected = oracle.ndcg_score(gains[kept], scores[kept], k=k)
    assert returned == meter.compute() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_hit_is_counted_as_its_share_of_the_orders_that_ties_allow(k: int) -> None:
    rng = np.random.default_rng(1)
    scores, gains = rng.integers(0, 3, (12, 5)).astype(float), rng.integers(0, 2, (12, 5)).astype(float)
    gains[0] = 0  # left out
    expected = [hits_of_all_orders(*row, k) for row in zip(scores, gains, strict=True) if row[1].any()]
    assert HitRate(k).update(scores, gains) == pytest.approx(np.mean(expected), abs=1e-9)


def test_the_place_of_the_relevant_candidate_is_enough() -> None:
    rng = np.random.default_rng(2)
    scores, places = rng.normal(size=(30, 20)), rng.integers(0, 20, 30)
    one_hot = np.eye(20)[places]
    for make in (HitRate, NDCG):
        assert make(5).update(scores, places) == make(5).update(scores, one_hot)
    rank = (scores > scores[np.arange(30), places][:, None]).sum(axis=1)
    assert HitRate(5).update(scores, torch.from_numpy(places)) == np.mean(rank < 5)
    assert NDCG(5).update(scores, places) == pytest.approx(np.where(rank < 5, 1 / np.log2(rank + 2), 0).mean())


def test_equal_scores_are_not_rewarded_for_the_order_of_the_candidates() -> None:
    assert HitRate(10).update(np.zeros((3, 100)), np.zeros(3)) == pytest.approx(0.1)


def test_an_excluded_candidate_is_never_found() -> None:
    scores = np.array([[-np.inf, 1.0, 0.5]])
    assert HitRate(2).update(scores, [0]) == 0
    assert HitRate(2).update(scores, [2]) == 1


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.floats(-50, 50), st.integers(0, 1)), min_size=1, max_size=50))
def test_log_loss_is_that_of_all_samples(pairs: list[tuple[float, int]]) -> None:
    logits, labels = np.array([logit for logit, _ in pairs]), np.array([label for _, label in pairs])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(*map(torch.from_numpy, (logits, labels * 1.0)))
    assert LogLoss().update(logits, labels) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)


def test_log_loss_of_probabilities_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(3)
    likely, labels = rng.random(500), rng.integers(0, 2, 500)
    likely[:4], labels[:4] = [0, 1, 0, 1], [1, 0, 0, 1]
    meter = LogLoss(from_logits=False)
    meter.update(likely[:100], labels[:100])
    meter.update(likely[100:], labels[100:])
    assert meter.compute() == pytest.approx(oracle.log_loss(labels, likely), rel=1e-9)


def test_calibration_is_a_ratio_and_the_curve_of_scikit_learn() -> None:
    rng = np.random.default_rng(4)
    logits = rng.normal(size=2000)
    likely = 1 / (1 + np.exp(-logits))
    labels = (rng.random(2000) < likely**2).astype(int)
    meter = Calibration(num_bins=10)
    meter.update(logits[:700], labels[:700])
    ratio = meter.update(logits[700:], labels[700:])
    found = meter.compute()
    assert ratio == found.ratio == pytest.approx(likely.sum() / labels.sum())
    observed, predicted = calibration.calibration_curve(labels, likely, n_bins=10)
    assert found.observed[found.num > 0] == pytest.approx(observed)
    assert found.predicted[found.num > 0] == pytest.approx(predicted)
    weights = found.num[found.num > 0] / 2000
    assert found.error == pytest.approx((weights * np.abs(observed - predicted)).sum())
    assert math.isnan(Calibration().compute().ratio)


def test_reset_discards_all_samples() -> None:
    for meter, given_scores in ((HitRate(1), np.eye(3)), (LogLoss(), np.zeros(3))):
        meter.update(given_scores, [0, 1, 0])  # type: ignore[attr-defined]
        assert meter.compute() > 0  # type: ignore[attr-defined]
        meter.reset()
        assert meter.compute() == 0  # type: ignore[attr-defined]


WRONG: dict[str, tuple[Any, ...]] = {
    "a nan": (HitRate(1), [[float("nan"), 1.0]], [0]),
    "scores without candidates": (NDCG(1), [1.0, 2.0], [0, 1]),
    "a place that is none": (HitRate(1), [[1.0, 2.0]], [2]),
    "gains below 0": (NDCG(1), [[1.0, 2.0]], [[-1.0, 1.0]]),
    "too few places": (NDCG(1), [[1.0, 2.0], [1.0, 2.0]], [0]),
    "labels that are none": (LogLoss(), [0.5], [2]),
    "too many labels": (Calibration(), [0.5], [0, 1]),
    "no probability": (LogLoss(from_logits=False), [1.5], [1]),
    "text": (Calibration(), ["a"], [1]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_measured_is_an_error(case: str) -> None:
    meter, *given_values = WRONG[case]
    with pytest.raises(FleetError):
        meter.update(*given_values)


def test_k_and_bins_are_whole_numbers_from_1() -> None:
    for make in (lambda: HitRate(0), lambda: NDCG(1.5), lambda: Calibration(0)):  # type: ignore[arg-type]
        with pytest.raises(FleetError):
            make()
