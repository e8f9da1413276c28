"""Meters of a ranking or click model, over the samples of this worker or of all workers: hit rate, NDCG, log loss,
calibration. A meter keeps sums, not samples.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api.metrics import Counts, as_numbers
from torchfleet.api.metrics import sum as sum_over_workers
from torchfleet.api.util import as_array
from torchfleet.base.errors import FleetError

_SMALLEST = float(np.finfo(np.float64).eps)  # probabilities are clipped to this distance from 0 and 1


class Meter:
    """Sums over samples. Several threads may call `update`."""

    def __init__(self, num_sums: int) -> None:
        self._sums: Counts = np.zeros(num_sums)
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Discard all samples."""
        with self._lock:
            self._sums = np.zeros_like(self._sums)

    def _add(self, sums: Counts) -> None:
        with self._lock:
            self._sums = self._sums + sums

    def _totals(self, all_workers: bool) -> Counts:
        with self._lock:
            own = self._sums.copy()
        return np.asarray(sum_over_workers(own)) if all_workers else own


class _RankingMeter(Meter):
    """The mean of a number per list of candidates, over the lists that have a relevant candidate."""

    def __init__(self, k: int) -> None:
        if not isinstance(k, int) or k < 1:
            raise FleetError(f"{type(self).__name__}: k is a whole number from 1, found {k!r}")
        super().__init__(2)
        self.k = k

    def update(self, scores: Any, relevant: Any) -> float:
        """Add lists of candidates: `scores` (lists, candidates), where -inf excludes a candidate.

        `relevant`: the position of each list's relevant candidate, (lists,), or how relevant each candidate is,
        (lists, candidates), from 0. Lists without a relevant candidate are left out. Returns the mean so far.
        """
        ranked, gains = _lists(type(self).__name__, scores, relevant)
        has_relevant = gains.max(axis=1, initial=0) > 0
        values = self._values(ranked[has_relevant], gains[has_relevant])
        self._add(np.array([values.sum(), len(values)]))
        return self.compute()

    def compute(self, all_workers: bool = False) -> float:
        """The mean over this worker's lists, or over those of all workers, who must all call it. 0 without lists."""
        total, num = self._totals(all_workers)
        return float(total / num) if num else 0.0

    def _values(self, scores: Counts, gains: Counts) -> Counts:
        raise NotImplementedError


class HitRate(_RankingMeter):
    """HR@k: the share of lists with a relevant candidate among the `k` of highest score.

    Candidates of equal score are in random order, and each list counts with its probability of a hit: a model that
    gives all candidates the same score is not rewarded for their order.
    """

    def _values(self, scores: Counts, gains: Counts) -> Counts:
        k = min(self.k, scores.shape[1])
        last = -np.partition(-scores, k - 1, axis=1)[:, k - 1 : k]  # the score of place k
        is_above, is_tied, is_relevant = scores > last, scores == last, gains > 0
        num_tied, tied_relevant = is_tied.sum(axis=1), (is_tied & is_relevant).sum(axis=1)
        missed = _share_without(num_tied, tied_relevant, k - is_above.sum(axis=1))
        return np.where((is_above & is_relevant).any(axis=1), 1.0, 1.0 - missed)


class NDCG(_RankingMeter):
    """NDCG@k: the sum of gain / log2(1 + place) over the `k` candidates of highest score, relative to this sum in the
    best order.

    Candidates of equal score share the mean of their gains, as in sklearn.metrics.ndcg_score.
    """

    def _values(self, scores: Counts, gains: Counts) -> Counts:
        num_lists, num = scores.shape
        discounts = np.where(np.arange(num) < self.k, 1 / np.log2(np.arange(num) + 2), 0.0)
        order = np.argsort(-scores, axis=1, kind="stable")
        ordered, own = np.take_along_axis(scores, order, 1), np.take_along_axis(gains, order, 1)
        starts = np.ones((num_lists, num), np.bool_)  # of runs of equal scores
        starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        runs = np.cumsum(starts) - 1
        means = np.bincount(runs, own.reshape(-1)) / np.bincount(runs)
        best = -np.sort(-gains, axis=1) @ discounts
        return np.asarray((means[runs].reshape(num_lists, num) @ discounts) / best)


class LogLoss(Meter):
    """The mean log loss (binary cross entropy) of scores: logits, or probabilities with from_logits=False."""

    def __init__(self, from_logits: bool = True) -> None:
        super().__init__(2)
        self._from_logits = from_logits

    def update(self, scores: Any, labels: Any) -> float:
        """Add a batch; labels are 0 or 1. Returns the loss so far."""
        values, positive = scores_and_labels("LogLoss", scores, labels)
        if self._from_logits:
            losses = np.logaddexp(0, np.where(positive == 1, -values, values))
        else:
            likely = np.clip(_checked_probabilities("LogLoss", values), _SMALLEST, 1 - _SMALLEST)
            losses = -np.where(positive == 1, np.log(likely), np.log1p(-likely))
        self._add(np.array([losses.sum(), len(losses)]))
        return self.compute()

    def compute(self, all_workers: bool = False) -> float:
        """The loss over this worker's samples, or over those of all workers, who must all call it. 0 without any."""
        total, num = self._totals(all_workers)
        return float(total / num) if num else 0.0


class Calibrated(NamedTuple):
    """What a Calibration found. Bins without samples have NaN."""

    ratio: float  # predicted positives / positives: 1 is calibrated; NaN without positives
    error: float  # the expected calibration error: mean of |predicted - observed| over bins, by their samples
    predicted: Counts  # per bin: mean probability
    observed: Counts  # per bin: share of positives
    num: Counts  # per bin: samples


class Calibration(Meter):
    """How far probabilities are from shares of positives, overall and in `num_bins` bins of equal width."""

    def __init__(self, num_bins: int = 10, from_logits: bool = True) -> None:
        if not isinstance(num_bins, int) or num_bins < 1:
            raise FleetError(f"Calibration: num_bins is a whole number from 1, found {num_bins!r}")
        super().__init__(3 * num_bins)
        self._num_bins, self._from_logits = num_bins, from_logits

    def update(self, scores: Any, labels: Any) -> float:
        """Add a batch of logits (or probabilities) and labels, 0 or 1. Returns the ratio so far."""
        values, positive = scores_and_labels("Calibration", scores, labels)
        likely = torch.sigmoid(torch.from_numpy(values)).numpy() if self._from_logits else values
        bins = (_checked_probabilities("Calibration", likely) * self._num_bins).astype(np.int64)
        bins = np.minimum(bins, self._num_bins - 1)  # 1.0 belongs to the last bin
        columns = (likely, positive, np.ones(len(likely)))
        self._add(np.concatenate([np.bincount(bins, column, self._num_bins) for column in columns]))
        return self.compute().ratio

    def compute(self, all_workers: bool = False) -> Calibrated:
        """The result for this worker's samples, or for those of all workers, who must all call it."""
        predicted, positive, num = self._totals(all_workers).reshape(3, -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = float(predicted.sum() / positive.sum()) if positive.any() else float("nan")
            error = float(np.abs(predicted - positive).sum() / num.sum()) if num.any() else 0.0
            return Calibrated(ratio, error, predicted / num, positive / num, num)


def scores_and_labels(name: str, scores: Any, labels: Any) -> tuple[Counts, Counts]:
    """One score and one label, 0 or 1, per sample."""
    values, given = as_numbers(f"{name}: scores", scores), as_array(labels).reshape(-1)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values.reshape(-1)
    if values.ndim != 1 or len(values) != len(given):
        raise FleetError(f"{name}: expected one score per label, found scores {values.shape} and {len(given)} labels")
    if np.isnan(values).any():
        raise FleetError(f"{name}: expected numbers as scores, found nan")
    if not np.isin(given, (0, 1)).all():
        raise FleetError(f"{name}: labels must be 0 or 1")
    return values, given.astype(np.float64)


def _checked_probabilities(name: str, values: Counts) -> Counts:
    if not ((values >= 0) & (values <= 1)).all():
        raise FleetError(f"{name}: expected probabilities from 0 to 1; logits need from_logits=True")
    return values


def _lists(name: str, scores: Any, relevant: Any) -> tuple[Counts, Counts]:
    """(scores, gains), both (lists, candidates)."""
    values, given = as_numbers(f"{name}: scores", scores), as_numbers(f"{name}: relevant", relevant)
    if values.ndim != 2 or not values.shape[1] or np.isnan(values).any():
        raise FleetError(f"{name}: expected scores (lists, candidates) without nan, found shape {values.shape}")
    if given.ndim == 2 and given.shape == values.shape and (given >= 0).all() and np.isfinite(given).all():
        return values, given
    if given.shape != values.shape[:1] or not _are_positions(given, values.shape[1]):
        raise FleetError(
            f"{name}: expected the position of one candidate per list, from 0 below {values.shape[1]}, or a finite "
            f"number from 0 for each, {values.shape}; found shape {given.shape}"
        )
    gains = np.zeros_like(values)
    gains[np.arange(len(gains)), given.astype(np.int64)] = 1
    return values, gains


def _are_positions(given: Counts, num: int) -> bool:
    return bool(((given >= 0) & (given < num) & (given == np.floor(given))).all())


def _share_without(
    num: npt.NDArray[np.int64], num_relevant: npt.NDArray[np.int64], drawn: npt.NDArray[np.int64]
) -> Counts:
    """The probability that `drawn` of `num` candidates, `num_relevant` of them relevant, are all irrelevant."""
    others = num - num_relevant
    counts = [torch.from_numpy(np.asarray(n, np.float64)) for n in (others, others - drawn, num, num - drawn)]
    all_others, left_others, every, left = (torch.lgamma(n.clamp(min=0) + 1).numpy() for n in counts)
    return np.where(others >= drawn, np.exp(all_others - left_others - every + left), 0.0)
