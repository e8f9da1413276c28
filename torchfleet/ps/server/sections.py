"""One table's share of a push: checked, applied, or averaged over the workers of a synchronous step."""

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
    keys: npt.NDArray[np.uint64]  # none for a dense table
    grads: npt.NDArray[np.float32]
    rate: float | None
    pulled_at: float | None  # the table's step when the values were pulled; None: the worker does not say
    num_samples: float | None = None  # that the gradients come from; None: the worker does not say

    def check(self) -> None:
        """Raise TableError if it could not be applied."""
        self.table.check_push(self.keys, self.grads, self.rate)

    def apply(self) -> None:
        """After `check`, and with nothing done to the table in between."""
        if self.pulled_at is not None:
            self.note_staleness()
        self.table.update(self.keys, self.grads, self.rate)

    def staleness(self) -> int:
        """Updates of the table since the values were pulled that the gradients come from; 0 if that is not known."""
        step = self.table.step
        return 0 if self.pulled_at is None else int(step - min(max(self.pulled_at, 0.0), float(step)))

    def note_staleness(self) -> None:
        """Count it in the table's statistics, if it is known."""
        if self.pulled_at is not None:
            self.table.staleness.note(self.staleness())


def mean_section(sections: list[Section]) -> Section:
    """One section with the mean gradient of all, each worker counting by its samples.

    If one does not say how many, or all have the same number, they count alike. Rate and `pulled_at` are the first's.
    """
    first = sections[0]
    if any(section.table is not first.table for section in sections):
        raise TableError("the workers pushed different tables in one step: they must run the same model")
    numbers = [section.num_samples for section in sections]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or len(set(known)) == 1:
        pushes = [(section.keys, section.grads) for section in sections]
    else:  # the plain mean of these is the one that is weighted
        mean = sum(known) / len(known)
        pushes = [(s.keys, _scaled(s, number / mean)) for s, number in zip(sections, known, strict=True)]
    keys, grads = first.table.mean(pushes)
    return Section(first.table, keys, grads, first.rate, first.pulled_at)


def _scaled(section: Section, factor: float) -> npt.NDArray[np.float32]:
    """Gradients times a factor; what stands behind those of a row (shows, clicks) is counted, and stays."""
    scaled: npt.NDArray[np.float32] = section.grads.copy()
    scaled[:, : scaled.shape[1] if section.table.spec.is_dense else section.table.spec.dim] *= np.float32(factor)
    return scaled
