"""One table's share of a push: checked, applied, or averaged over the workers of a synchronous step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.table import Table


@dataclass(slots=True)
class Section:
    """Gradients (or differences) for one table. `version`: how many updates it had seen when the rows were pulled."""

    table: Table
    keys: npt.NDArray[np.uint64]  # none for a dense table
    grads: npt.NDArray[np.float32]
    rate: float | None
    version: float | None
    num_samples: float | None = None  # that the gradients come from; None: the worker does not say

    def check(self) -> None:
        """Raise TableError if it could not be applied."""
        self.table.check_push(self.keys, self.grads, self.rate)

    def check_add(self) -> None:
        """Raise TableError if its differences could not be added."""
        self.table.check_add(self.keys, self.grads)

    def apply(self) -> None:
        """After `check`, and with nothing done to the table in between."""
        self.note_age()
        self.table.update(self.keys, self.grads, self.rate)

    @property
    def age(self) -> int | None:
        """Updates of the table since the values were pulled that the gradients come from; None: not known."""
        if self.version is None:
            return None
        return int(self.table.step - min(max(self.version, 0.0), float(self.table.step)))

    def note_age(self) -> None:
        """Count its age in the table's statistics."""
        if self.age is not None:
            self.table.staleness.note(self.age)

    def add(self) -> None:
        """As `apply`, for differences instead of gradients."""
        self.table.add(self.keys, self.grads)


def mean_section(sections: list[Section]) -> Section:
    """One section with the mean gradient of all, each worker counting by its samples; rate and version of the first.

    If one does not say how many, or all have the same number, they count alike.
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
    return Section(first.table, keys, grads, first.rate, first.version)


def _scaled(section: Section, factor: float) -> npt.NDArray[np.float32]:
    """Gradients times a factor; what stands behind those of a row (shows, clicks) is counted, and stays."""
    scaled: npt.NDArray[np.float32] = section.grads.copy()
    scaled[:, : scaled.shape[1] if section.table.spec.is_dense else section.table.spec.dim] *= np.float32(factor)
    return scaled
