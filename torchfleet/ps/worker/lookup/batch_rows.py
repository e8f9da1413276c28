"""The rows of one batch: pulled once for all lookups, differentiated through, and their gradients collected for the
push.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.ps.kernels import lookup, pooling
from torchfleet.ps.kernels.merge import SALT, segment_sum, unique, unique_places
from torchfleet.ps.tables.rows.row_statistics import NUM_PUSHED
from torchfleet.ps.worker.batch.bags import Bags
from torchfleet.ps.worker.batch.batch_tensors import Stamp
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.device_copies import to_host

Index = npt.NDArray[np.int32]

_FEW = 4096  # keys; up to this number, comparing bytes is faster than numpy's functions
_NO_KEYS: Keys = np.empty(0, np.uint64)
_NO_INDEX: Index = np.empty(0, np.int32)


@functools.cache
def _no_values(dim: int) -> Floats:
    return np.empty((0, dim), np.float32)


class BatchRows:
    """One table's rows for one batch: distinct keys, their values, and their accumulated gradients."""

    def __init__(self, dim: int, on_gradient: Callable[[BatchRows], None]) -> None:
        self.dim = dim
        self._on_gradient = on_gradient  # called at the first gradient
        self.keys = _NO_KEYS
        self.values = _no_values(dim)  # (rows, dim)
        self.versions: list[float] = []
        self._kept_places: npt.NDArray[np.int32] | None = None  # None: not made yet
        self.expected_index = _NO_INDEX  # index of a lookup for exactly the predicted ids
        self._expected = _NO_KEYS  # the keys in their original order, if there is no stamp
        self.stamp: Stamp | None = None  # of the predicted ids; None: their keys are compared
        self._grads: Floats | None = None
        self._touched: npt.NDArray[np.bool_] | None = None  # rows with a gradient; None: all of them
        self._shows: Floats | None = None  # show, click and slot of each key, if the table keeps them
        self.creates = True  # pulled for training
        self._is_foreseen = False  # pulled before a lookup
        self._is_used: npt.NDArray[np.bool_] | bool = False  # of foreseen rows: whether they, or which, were looked up
        self._left: Keys | None = None  # of merged rows: their `without_gradient` and `doubtful`
        self._doubtful: Keys | None = None

    def expect(self, keys: Keys, stamp: Stamp | None) -> None:
        """Start with these keys, which may repeat. Their distinct ones become `keys`; the caller sets the values.

        `stamp` identifies a lookup of exactly these ids, in this order, whose index is `expected_index`. Without a
        stamp the keys are compared, and must not change.
        """
        self.keys, self.expected_index, self._kept_places = unique_places(keys)
        self._expected, self.stamp = (keys if stamp is None else self._expected), stamp

        self._is_foreseen = True

    def expect_as(self, others: BatchRows) -> None:
        """Start with the keys of another table's rows, which have just been started."""
        self._is_foreseen = True
        self.keys, self.expected_index, self._kept_places = others.keys, others.expected_index, others._kept_places
        self._expected, self.stamp = others._expected, others.stamp

    def expect_part(self, keys: Keys, index: Index, expected: Keys, is_used: bool) -> None:
        """As `expect(expected, None)`, if the distinct keys of `expected` and their index are known already. `is_used`:
        they were looked up.
        """
        self.keys, self.expected_index, self._expected = keys, index, expected
        self._is_foreseen, self._is_used = True, is_used

    def note_used(self, index: Index) -> None:
        """Record a lookup for training at these positions."""
        if not self._is_foreseen or self._is_used is True:
            return
        if index is self.expected_index:
            self._is_used = True
            return
        if self._is_used is False:
            self._is_used = np.zeros(len(self.keys), np.bool_)
        self._is_used[index[index >= 0]] = True

    def without_gradient(self) -> Keys:
        """The foreseen keys that were looked up for training and have no gradient, though other rows have one."""
        if self._left is not None:
            return self._left
        if not self._is_foreseen or self._touched is None or self._is_used is False or self._touched.all():
            return _NO_KEYS
        is_left = ~self._touched if self._is_used is True else self._is_used & ~self._touched
        return self.keys[is_left]

    @property
    def doubtful(self) -> Keys:
        """The keys that a prediction read as zeros: perhaps they have no row."""
        if self._doubtful is not None:
            return self._doubtful
        return _NO_KEYS if self.creates else self.keys[~self.values.any(axis=1)]

    @property
    def _places(self) -> npt.NDArray[np.int32]:
        """Where a search for a key among `keys` begins."""
        if self._kept_places is None:
            self._kept_places = unique_places(self.keys)[2]
        return self._kept_places

    def is_expected(self, keys: Keys) -> bool:
        """Whether these are the predicted keys, in their order, which were kept because there is no stamp."""
        if len(keys) != len(self._expected) or not len(keys):
            return False
        return keys.tobytes() == self._expected.tobytes() if len(keys) <= _FEW else bool((keys == self._expected).all())

    def find(self, keys: Keys) -> tuple[Index, Keys | None]:
        """(the position of each key among the rows, the distinct keys without a row here or None if all have one)."""
        if self.is_expected(keys):
            return self.expected_index, None
        index = np.empty(len(keys), np.int32)
        if not lookup.index_of(keys, self._places, self.keys, index, SALT):
            return index, None
        return index, unique_places(keys[index < 0])[0]

    def append(self, keys: Keys, values: Floats, versions: list[float]) -> None:
        """Append rows of distinct keys that are new here."""
        num = len(keys)
        if not isinstance(self._is_used, bool):
            self._is_used = np.concatenate([self._is_used, np.ones(num, np.bool_)])  # they have their rows
        self.keys, _, self._kept_places = unique_places(np.concatenate([self.keys, keys]))
        self.values = np.concatenate([self.values, values])
        self.versions = [min(pair) for pair in zip(self.versions, versions, strict=True)] if self.versions else versions
        if self._grads is not None:
            self._grads = np.concatenate([self._grads, np.full((num, self.dim), lookup.NOTHING, np.float32)])
            self._touched = np.concatenate([self._whole_touched(len(self.keys) - num), np.zeros(num, np.bool_)])
        if self._shows is not None:
            self._shows = np.concatenate([self._shows, np.zeros((num, NUM_PUSHED), np.float32)])

    def copy_from(self, others: BatchRows, keys: Keys | None) -> Keys | None:
        """Append the rows of these new keys that `others` have; returns the keys that `others` lack."""
        if keys is None or others is self:
            return keys
        index, missing = others.find(keys)
        is_there = index >= 0
        if is_there.any():
            self.append(keys[is_there], others.values[index[is_there]], others.versions)
        return missing

    def gradients(self) -> tuple[Keys, Floats] | None:
        """(keys, summed gradients) of the rows that took part in a backward pass, or None."""
        if self._grads is None:
            return None
        grads = self._grads if self._shows is None else np.concatenate([self._grads, self._shows], axis=1)
        if self._touched is None or self._touched.all():
            return self.keys, grads
        return self.keys[self._touched], grads[self._touched]

    def whole_gradients(self) -> Floats:
        """The gradients of all rows, (rows, dim), without a copy; zeros for rows without a gradient."""
        assert self._grads is not None
        if self._touched is not None and not self._touched.all():
            self._grads[~self._touched] = 0
        return self._grads

    def drop_gradients(self) -> None:
        self._grads = self._shows = None

    def take_gradients(self, keys: Keys, grads: Floats, shows: Floats | None, versions: list[float]) -> None:
        """Replace all pending gradients with those of these distinct keys."""
        self.keys, self.versions = keys, versions
        self._grads, self._shows, self._touched = grads, shows, None

    def note_shows(self, index: Index, offsets: npt.NDArray[Any], by_slot: bool, shows: Floats, clicks: Floats) -> None:
        """Record a lookup for training in samples with these shows and clicks."""
        if self._shows is None:
            self._shows = np.zeros((len(self.keys), NUM_PUSHED), np.float32)
        lookup.add_shows(index, offsets, len(shows), by_slot, shows, clicks, self._shows)

    def add(self, index: Index, grads: torch.Tensor) -> None:
        """`grads`: shape (ids, dim)."""
        flat, stride = _by_sample(grads.unsqueeze(1))
        sums, touched = self._sums()
        lookup.add_rows(flat, self.dim, stride, index, sums, touched)

    def add_pooled(self, index: Index, bags: Bags, grads: torch.Tensor) -> None:
        """`grads`: shape (samples, slots, dim)."""
        flat, stride = _by_sample(grads)
        is_mean, (sums, touched) = bags.pooling == "mean", self._sums()
        lookup.unpool(flat, self.dim, stride, index, bags.offsets, bags.num_slots, is_mean, sums, touched)

    def add_weighted(self, index: Index, bags: Bags, weights: Floats, grads: Floats) -> None:
        """`weights`: by id. `grads`: sample by sample, slot by slot."""
        (sums, touched), offsets = self._sums(), bags.offsets
        pooling.unpool_weighted(grads, self.dim, index, weights, offsets, bags.num_slots, sums, touched)

    def add_largest(self, winners: Index, grads: Floats) -> None:
        """`winners`: the row that each number came from, -1 if it came from no row."""
        pooling.unpool_max(grads, self.dim, winners, *self._sums())

    def _sums(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """(the gradients, flat; which rows have one), to be added to."""
        if self._grads is None:
            self._grads = np.full((len(self.keys), self.dim), lookup.NOTHING, np.float32)
            self._touched = np.zeros(len(self.keys), np.bool_)
            self._on_gradient(self)
        self._touched = self._whole_touched(len(self.keys))
        return self._grads.reshape(-1), self._touched

    def _whole_touched(self, num: int) -> npt.NDArray[np.bool_]:
        return np.ones(num, np.bool_) if self._touched is None else self._touched


def merged(batches: Sequence[BatchRows]) -> BatchRows:
    """Merge the pending gradients of several lookups or batches, summed per key. A slot is not summed: the last one
    counts.
    """
    found = [gradient for rows in batches if (gradient := rows.gradients()) is not None]
    dim, width = batches[0].dim, max(grads.shape[1] for _, grads in found)  # eval mode records no show, click and slot
    wide = np.concatenate([np.pad(grads, ((0, 0), (0, width - grads.shape[1]))) for _, grads in found])
    keys, inverse = unique(np.concatenate([keys for keys, _ in found]))
    sums = np.empty((len(keys), width), np.float32)
    segment_sum(wide, inverse, sums)
    if width > dim:
        sums[inverse, -1] = wide[:, -1]
    known = [rows.versions for rows in batches if rows.versions]
    together = BatchRows(dim, lambda rows: None)
    shows = np.ascontiguousarray(sums[:, dim:]) if width > dim else None
    versions = [min(seen) for seen in zip(*known, strict=True)]
    together.take_gradients(keys, np.ascontiguousarray(sums[:, :dim]), shows, versions)
    together._left = np.concatenate([rows.without_gradient() for rows in batches])
    together._doubtful = doubtful_of(batches)
    return together


def doubtful_of(batches: Sequence[BatchRows]) -> Keys:
    """The keys that only predictions have looked up, and read as zeros."""
    doubtful = np.concatenate([rows.doubtful for rows in batches])
    known = [rows.keys for rows in batches if rows.creates and rows._doubtful is None]
    return doubtful[~np.isin(doubtful, np.concatenate(known))] if known and len(doubtful) else doubtful


def with_padding(index: Index, is_real: npt.NDArray[np.bool_]) -> Index:
    """Expand the index of the ids that are not padding to all ids, with -1 for padding."""
    out = np.full(len(is_real), -1, np.int32)
    out[is_real] = index
    return out


def _by_sample(grads: torch.Tensor) -> tuple[Floats, int]:
    """(the numbers as a flat array, the stride between samples) of a tensor of shape (samples, slots, dim).

    No copy if each sample's numbers are contiguous, even if the model appended others to them.
    """
    grads = grads.detach()
    num_samples, num_slots, dim = grads.shape
    size, (stride, *inner) = num_slots * dim, grads.stride()
    if grads.device.type != "cpu" or not grads.numel() or inner != [dim, 1] or stride < size:
        return to_host(grads).reshape(-1), size
    flat: Floats = grads.as_strided(((num_samples - 1) * stride + size,), (1,)).numpy()
    return flat, stride
