"""A summary of a table's rows: their number, magnitude, age and shows, and the top keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.rows.row_statistics import Columns, decay_powers, expression_values, row_columns
from torchfleet.ps.tables.settings.spec import TableSpec

Counts = npt.NDArray[np.int64]

# Bins of real numbers: negative, zero, and one per power of two.
_NEGATIVE, _ZERO, _FIRST = 0, 1, 2
_LEAST, _MOST = -20, 40  # powers of two; smaller numbers share the first bin, larger ones the last
_NUM_REALS = _FIRST + _MOST - _LEAST + 2
_DAY_BINS = np.array([(day - 1).bit_length() + 1 if day else 0 for day in range(1 << 16)])  # 0, 1, 2, 3-4, 5-8, ...
_NUM_DAYS = int(_DAY_BINS[-1]) + 1  # bins up to 2^16 days, more than 32 bits of seconds contain


class Summary:
    """Filled by `add`, some thousand rows at a time, and by `merge` with the summaries of other servers.

    `now`: the time in seconds since 1970 for days and decayed shows. `top`: the number of keys to list: those of the
    highest score if the table counts shows, otherwise the most recently looked up, otherwise those of the largest norm.
    """

    def __init__(self, spec: TableSpec, now: int, top: int) -> None:
        self._entry, self._now, self._top = spec.entry, now, top
        self._powers = decay_powers(spec.entry.show_click_decay_rate)
        columns = row_columns(spec)
        self._top_by = "score" if "show" in columns else "tick" if "tick" in columns else "norm"
        self._rows, self._norm_sum, self._norm_max = 0, 0.0, 0.0
        self._counts: dict[str, Counts] = {"norm": np.zeros(_NUM_REALS, np.int64)}
        self._best: list[dict[str, Any]] = []

    def add(self, keys: Keys, values: npt.NDArray[np.float32], statistics: Columns) -> None:
        """Add new rows: values (n, dim), and statistics as tables and saved models keep them."""
        if not len(keys):
            return
        numbers: Columns = {"norm": _norms(values), **self._values(statistics)}
        self._rows += len(keys)
        self._norm_sum += float(numbers["norm"].sum(dtype=np.float64))
        self._norm_max = max(self._norm_max, float(numbers["norm"].max()))
        for name in ("norm", "score"):
            if name in numbers:
                self._count(name, _bins_of_reals(numbers[name]), _NUM_REALS)
        for name in ("unseen_days", "age_days"):
            if name in numbers:
                self._count(name, _bins_of_days(numbers[name]), _NUM_DAYS)
        if self._top:
            self._look_for_best(keys, numbers)

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add the rows of another shard of the table, from its summary's `as_dict`."""
        if not self._rows:
            self._top_by = other["top_by"]
        self._rows += other["rows"]
        self._norm_sum += other["norm_sum"]
        self._norm_max = max(self._norm_max, other["norm_max"])
        for name, bins in other["histograms"].items():
            limits = bin_limits(name)
            for counted in bins:
                place = limits.index((counted["from"], counted["to"]))
                self._count(name, np.full(1, place), len(limits), counted["rows"])
        self._keep_best([dict(line) for line in other["top"]])

    def as_dict(self) -> dict[str, Any]:
        """The summary as plain numbers, strings and lists.

        A bin of days counts `from` ... `to`, both included; a bin of other numbers counts `from` <= x < `to`, where
        None is no limit, and 0 to 0 is exactly zero. Empty bins are left out. Keys are signed, as in exports.
        """
        return {
            "rows": self._rows,
            "norm_sum": self._norm_sum,
            "norm_mean": self._norm_sum / max(self._rows, 1),
            "norm_max": self._norm_max,
            "histograms": {name: _as_bins(name, counts) for name, counts in self._counts.items()},
            "top_by": self._top_by,
            "top": [dict(line) for line in self._best],
        }

    def _values(self, statistics: Columns) -> Columns:
        columns = dict(statistics)
        if "show" in columns and "seen" not in columns:
            columns["seen"] = np.full(len(columns["show"]), self._now, np.uint32)  # so that nothing decays
        found = expression_values(columns, self._now, self._entry, self._powers)
        return found if "tick" not in columns else {**found, "tick": columns["tick"]}

    def _count(self, name: str, places: Counts, num_bins: int, rows: int = 1) -> None:
        counts = self._counts.setdefault(name, np.zeros(num_bins, np.int64))
        counts += rows * np.bincount(places, minlength=num_bins)

    def _look_for_best(self, keys: Keys, numbers: Columns) -> None:
        by = numbers.get(self._top_by)
        by = np.zeros(len(keys)) if by is None else by.astype(np.float64)
        chosen = np.arange(len(keys))
        if len(self._best) == self._top:
            chosen = np.flatnonzero(by > self._best[-1].get(self._top_by, 0.0))
        if len(chosen) > self._top:
            chosen = chosen[np.argpartition(by[chosen], -self._top)[-self._top :]]
        if len(chosen):
            columns = {"key": keys[chosen].view(np.int64), **{name: array[chosen] for name, array in numbers.items()}}
            lines = zip(*(column.tolist() for column in columns.values()), strict=True)
            self._keep_best([dict(zip(columns, line, strict=True)) for line in lines])

    def _keep_best(self, lines: list[dict[str, Any]]) -> None:
        lines = sorted([*self._best, *lines], key=lambda line: (-line.get(self._top_by, 0.0), line["key"]))
        self._best = lines[: self._top]


def _norms(values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        norms: npt.NDArray[Any] = np.sqrt(np.einsum("ij,ij->i", values, values))
    if not np.isfinite(norms).all():  # the sum of float32 squares may overflow
        wide = values.astype(np.float64)
        norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    return norms


def _bins_of_reals(numbers: npt.NDArray[Any]) -> Counts:
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(numbers, np.float32)
    exponents = (floats.view(np.int32) >> 23 & 0xFF) - 127  # 2^e <= x < 2^(e+1)
    places: Counts = np.clip(exponents - _LEAST + 1, 0, _MOST - _LEAST + 1) + _FIRST
    places[floats == 0] = _ZERO
    places[floats < 0] = _NEGATIVE
    return places


def _bins_of_days(days: npt.NDArray[np.float64]) -> Counts:
    places: Counts = _DAY_BINS[np.minimum(days, len(_DAY_BINS) - 1).astype(np.int64)]
    return places


def merged(shards: Sequence[Mapping[str, Any]], top: int) -> dict[str, Any]:
    """Merge the summaries of all servers of a table."""
    whole = Summary(TableSpec("any"), 0, top)
    for shard in shards:
        whole.merge(shard)
    return whole.as_dict()


def bin_limits(name: str) -> list[tuple[float | None, float | None]]:
    """`from` and `to` of all bins of a histogram, in order."""
    if name.endswith("_days"):
        return [(0, 0), (1, 1), (2, 2), *(((1 << i) + 1, 2 << i) for i in range(1, _NUM_DAYS - 2))]
    powers = [2.0**power for power in range(_LEAST, _MOST + 1)]
    return [(None, 0.0), (0.0, 0.0), *zip([0.0, *powers], [*powers, None], strict=True)]


def _as_bins(name: str, counts: Counts) -> list[dict[str, Any]]:
    limits = bin_limits(name)
    return [{"from": limits[i][0], "to": limits[i][1], "rows": int(counts[i])} for i in np.flatnonzero(counts).tolist()]
