"""GAUC: the AUC within each group of samples, such as those of one user, averaged over the groups."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchfleet.api.meters import scores_and_labels
from torchfleet.api.metrics import sum as sum_over_workers
from torchfleet.api.util import as_array
from torchfleet.api.worker_arrays import gathered
from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.batch.string_ids import are_strings, hash_strings

Groups = npt.NDArray[np.int64]


class Samples(NamedTuple):
    groups: Groups
    scores: npt.NDArray[np.float64]
    labels: npt.NDArray[np.bool_]

    def where(self, mask: npt.NDArray[np.bool_]) -> Samples:
        return Samples(self.groups[mask], self.scores[mask], self.labels[mask])


class GAUC:
    """The mean of the groups' AUC, weighted by their numbers of samples. Groups with one kind of label are left out.

    It is exact, and keeps every sample: 17 bytes each. A group is an id: a whole number or a string.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Discard all samples."""
        self._parts: list[Samples] = []

    def update(self, scores: Any, labels: Any, groups: Any) -> None:
        """Add a batch: scores of any scale, labels 0 or 1, and the group of each sample."""
        values, positive = scores_and_labels("GAUC", scores, labels)
        ids = hash_strings(groups) if are_strings(groups) else as_array(groups)
        ids = ids.reshape(-1)
        if ids.dtype.kind not in "iu" or len(ids) != len(values):
            raise FleetError(
                f"GAUC: expected a whole number or a string for each of {len(values)} samples as its group, found "
                f"{len(ids)} of {ids.dtype}"
            )
        with self._lock:
            self._parts.append(Samples(ids.astype(np.int64), values.copy(), positive.astype(np.bool_)))

    def compute(self, all_workers: bool = False) -> float:
        """The mean for this worker's samples, or for those of all workers, who must all call it. 0.5 without a pair.

        Only samples of groups that several workers have are sent, to all workers: nothing if workers share no group.
        """
        with self._lock:
            own = _joined(self._parts)
        sums = _sums(own) if not all_workers else _sums_of_all(own)
        return float(sums[0] / sums[1]) if sums[1] else 0.5


def _joined(parts: list[Samples]) -> Samples:
    none = Samples(np.empty(0, np.int64), np.empty(0, np.float64), np.empty(0, np.bool_))
    return Samples(*(np.concatenate(columns) for columns in zip(none, *parts, strict=True)))


def _sums(samples: Samples) -> npt.NDArray[np.float64]:
    """(sum of AUC × samples, sum of samples) over the groups that have both labels."""
    if not len(samples.groups):
        return np.zeros(2)
    order = np.lexsort((samples.scores, samples.groups))
    groups, scores, labels = (column[order] for column in samples)
    is_first = np.append(True, groups[1:] != groups[:-1])
    starts, of_group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
    tie_starts = np.flatnonzero(is_first | np.append(True, scores[1:] != scores[:-1]))
    tie_sizes = np.diff(np.append(tie_starts, len(scores)))
    ranks = np.repeat(tie_starts + (tie_sizes + 1) / 2, tie_sizes) - starts[of_group]  # mean ranks of ties, from 1
    num = np.bincount(of_group).astype(np.float64)
    positive = np.bincount(of_group, labels)
    pairs = positive * (num - positive)
    above = np.bincount(of_group, ranks * labels) - positive * (positive + 1) / 2
    has_both = pairs > 0
    return np.array([(above[has_both] / pairs[has_both] * num[has_both]).sum(), num[has_both].sum()])


def _sums_of_all(own: Samples) -> npt.NDArray[np.float64]:
    """As `_sums`, of all workers' samples. Only samples of groups that several workers have are sent."""
    every = np.concatenate(gathered("GAUC", np.unique(own.groups)))
    ids, counts = np.unique(every, return_counts=True)
    is_shared = np.isin(own.groups, ids[counts > 1])
    shared = own.where(is_shared)
    columns = [np.concatenate(gathered("GAUC", column)) for column in shared]
    alone = np.asarray(sum_over_workers(_sums(own.where(~is_shared))))
    return alone + _sums(Samples(*columns))
