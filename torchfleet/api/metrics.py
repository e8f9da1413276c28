"""Metrics over all workers, from each worker's own statistics, and a streaming AUC that produces such statistics."""

from __future__ import annotations

import builtins
import math
import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api.util import as_array, reduced
from torchfleet.base.errors import FleetError
from torchfleet.base.paddle_names import Absent, with_paddle_arguments

Counts = npt.NDArray[np.float64]

_ARGUMENTS = {
    "scope": Absent((None,), "torch has no scopes: give the value itself, not the name of a variable"),
    "util": Absent((None, "torchfleet.util"), "all workers take part: leave it out, or give fleet.util"),
}


@with_paddle_arguments(_ARGUMENTS)
def sum(input: Any) -> Any:
    """The elementwise sum over all workers."""
    return _reduced("sum", input)


@with_paddle_arguments(_ARGUMENTS)
def max(input: Any) -> Any:
    """The elementwise maximum over all workers."""
    return _reduced("max", input)


@with_paddle_arguments(_ARGUMENTS)
def min(input: Any) -> Any:
    """The elementwise minimum over all workers."""
    return _reduced("min", input)


@with_paddle_arguments(_ARGUMENTS)
def auc(stat_pos: Any, stat_neg: Any) -> float:
    """The area under the ROC curve of all workers' samples, from histograms of positive and negative scores."""
    positive, negative = (np.asarray(sum(stat), np.float64).reshape(-1) for stat in (stat_pos, stat_neg))
    if len(positive) != len(negative):
        raise FleetError(f"fleet.metrics.auc: {len(positive)} bins of positives and {len(negative)} of negatives")
    return area(positive, negative)


@with_paddle_arguments(_ARGUMENTS)
def acc(correct: Any, total: Any) -> float:
    """The accuracy over all workers, from numbers of correct answers and of samples."""
    return _ratio("acc", correct, total)


@with_paddle_arguments(_ARGUMENTS)
def mae(abserr: Any, total_ins_num: Any) -> float:
    """The mean absolute error, from sums of absolute errors and numbers of samples."""
    return _ratio("mae", abserr, total_ins_num)


@with_paddle_arguments(_ARGUMENTS)
def mse(sqrerr: Any, total_ins_num: Any) -> float:
    """The mean squared error, from sums of squared errors and numbers of samples."""
    return _ratio("mse", sqrerr, total_ins_num)


@with_paddle_arguments(_ARGUMENTS)
def rmse(sqrerr: Any, total_ins_num: Any) -> float:
    """The root mean squared error, from sums of squared errors and numbers of samples."""
    return math.sqrt(_ratio("rmse", sqrerr, total_ins_num))


class AUC:
    """A streaming AUC of this worker's samples: over all of them, and over the last `slide_steps` updates.

    Scores are counted in `num_thresholds` + 1 bins. `update` takes logits: with shape (n, 2) it applies a softmax, with
    shape (n,) or (n, 1) a sigmoid. With from_logits=False it takes probabilities of the same shapes.
    """

    def __init__(self, num_thresholds: int = 4095, slide_steps: int = 20, from_logits: bool = True) -> None:
        if not all(isinstance(given, int) and given >= 1 for given in (num_thresholds, slide_steps)):
            raise FleetError(
                f"AUC: num_thresholds and slide_steps are whole numbers from 1, found {num_thresholds!r}, "
                f"{slide_steps!r}"
            )
        self._num, self._from_logits = num_thresholds, from_logits
        self._slides: deque[Counts] = deque(maxlen=slide_steps)
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Discard all samples, for example before prediction begins."""
        with self._lock:
            self._counts: Counts = np.zeros((2, self._num + 1))
            self._slides.clear()

    def update(self, scores: Any, labels: Any) -> float:
        """Add a batch. Returns the AUC so far."""
        probabilities, positive = self._probabilities(scores), as_array(labels).reshape(-1)
        if len(probabilities) != len(positive):
            raise FleetError(f"AUC: {len(probabilities)} scores and {len(positive)} labels")
        if not np.isin(positive, (0, 1)).all():
            raise FleetError("AUC: labels must be 0 or 1")
        bins = (probabilities * self._num).astype(np.int64) + (positive.astype(np.int64) == 0) * (self._num + 1)
        counts = np.bincount(bins, minlength=2 * (self._num + 1)).reshape(2, -1).astype(np.float64)
        with self._lock:
            self._counts += counts
            self._slides.append(counts)
            total = self._counts.copy()
        return area(*total)

    def compute(self) -> tuple[float, float, list[Counts]]:
        """(auc, batch_auc, [batch_stat_pos, batch_stat_neg, stat_pos, stat_neg]); batch: over the last `slide_steps`
        updates.
        """
        with self._lock:
            slide = np.sum(list(self._slides), axis=0) if self._slides else np.zeros_like(self._counts)
            total = self._counts.copy()
        return area(*total), area(*slide), [slide[0], slide[1], total[0], total[1]]

    def _probabilities(self, scores: Any) -> Counts:
        values = as_numbers("AUC: scores", scores)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN is found below
            if values.ndim == 2 and values.shape[1] == 2:
                found = 1 / (1 + np.exp(values[:, 0] - values[:, 1])) if self._from_logits else values[:, 1]
            elif values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1):
                found = 1 / (1 + np.exp(-values.reshape(-1))) if self._from_logits else values.reshape(-1)
            else:
                raise FleetError(f"AUC: scores have the shape (n,), (n, 1) or (n, 2), found {values.shape}")
        if not ((found >= 0) & (found <= 1)).all():
            raise FleetError("AUC: scores that are not probabilities, or not numbers; logits need from_logits=True")
        return np.asarray(found)


def area(positive: Counts, negative: Counts) -> float:
    """The area under the ROC curve of two histograms. Pairs in one bin are ties and count half. 0.5 without pairs."""
    above = np.concatenate([np.cumsum(positive[::-1])[::-1][1:], [0.0]])
    pairs = positive.sum() * negative.sum()
    return float((negative * (above + positive / 2)).sum() / pairs) if pairs else 0.5


def _ratio(name: str, numerator: Any, total: Any) -> float:
    value, count = (float(np.asarray(sum(given)).sum()) for given in (numerator, total))
    if count <= 0:
        raise FleetError(f"fleet.metrics.{name}: there are no samples (total {count:g})")
    return value / count


def _reduced(name: str, value: Any) -> Any:
    """Combine `value` over all workers. A tensor gives a tensor, an array or list an array, a number a float."""
    total = reduced("fleet.metrics", as_numbers(f"fleet.metrics.{name}", value), name, "worker")
    if isinstance(value, torch.Tensor):
        return torch.from_numpy(total).to(value.dtype if value.is_floating_point() else torch.float64)
    return total if isinstance(value, (np.ndarray, list, tuple)) else builtins.float(total)


def as_numbers(what: str, value: Any) -> Counts:
    """Convert to an array of the same shape, also for a single number."""
    try:
        array = as_array(value)
    except (TypeError, ValueError) as error:
        raise FleetError(f"{what}: expected numbers; {error}") from None
    if array.dtype.kind not in "iufb":
        raise FleetError(f"{what}: expected numbers, found {array.dtype}")
    return np.asarray(array, np.float64)
