"""One table's share of a push, and the mean of several workers' shares in one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.table import Table


@dataclass(slots=True)
class Section:
    """Gradients (or differences) for one table."""

    table: Table
    keys: npt.NDArray[np.uint64]  # empty for a dense table
    grads: npt.NDArray[np.float32]
    rate: float | None
    pulled_at: float | None  # the table's step when the values were pulled; None: unknown
    num_samples: float | None = None  # samples behind the gradients; None: unknown

    def check(self) -> None:
        """Raise TableError if the section cannot be applied."""
        self.table.check_push(self.keys, self.grads, self.rate)

    def apply(self) -> None:
        """Update the table. Call `check` first, and do not change the table in between."""
        if self.pulled_at is not None:
            self.note_staleness()
        self.table.update(self.keys, self.grads, self.rate)

    def staleness(self) -> int:
        """Updates of the table since the worker pulled the values; 0 if `pulled_at` is unknown."""
        step = self.table.step
        return 0 if self.pulled_at is None else int(step - min(max(self.pulled_at, 0.0), float(step)))

    def note_staleness(self) -> None:
        """Add the staleness to the table's statistics, if it is known."""
        if self.pulled_at is not None:
            self.table.staleness.note(self.staleness())


def mean_section(sections: list[Section]) -> Section:
    """One section with the mean gradient, weighted by each worker's number of samples.

    The weights are equal if a worker's number is unknown, or all numbers are the same. Rate and `pulled_at` are those
    of the first section.
    """
    first = sections[0]
    if any(section.table is not first.table for section in sections):
        raise TableError("the workers pushed different tables in one step: they must run the same model")
    numbers = [section.num_samples for section in sections]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or len(set(known)) == 1:
        pushes = [(section.keys, section.grads) for section in sections]
    else:  # the plain mean of the scaled gradients is the weighted mean
        mean = sum(known) / len(known)
        pushes = [(s.keys, _scaled(s, number / mean)) for s, number in zip(sections, known, strict=True)]
    keys, grads = first.table.mean(pushes)
    return Section(first.table, keys, grads, first.rate, first.pulled_at)


def _scaled(section: Section, factor: float) -> npt.NDArray[np.float32]:
    """Gradients times a factor. The statistics behind a row's gradients (shows, clicks) are counts and stay."""
    scaled: npt.NDArray[np.float32] = section.grads.copy()
    scaled[:, : scaled.shape[1] if section.table.spec.is_dense else section.table.spec.dim] *= np.float32(factor)
    return scaled
