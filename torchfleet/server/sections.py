"""One table's share of a push: checked, applied, or averaged over the workers of a synchronous step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchfleet.errors import TableError
from torchfleet.tables.table import Table


@dataclass(slots=True)
class Section:
    """Gradients (or differences) for one table. `version`: how many updates it had seen when the rows were pulled."""

    table: Table
    keys: npt.NDArray[np.uint64]  # none for a dense table
    grads: npt.NDArray[np.float32]
    rate: float | None
    version: float | None

    def check(self) -> None:
        """Raise TableError if it could not be applied."""
        self.table.check_push(self.keys, self.grads, self.rate)

    def apply(self) -> None:
        """After `check`, and with nothing done to the table in between."""
        if self.version is not None:
            seen = min(max(self.version, 0.0), float(self.table.step))
            self.table.staleness.note(self.table.step - int(seen))
        self.table.update(self.keys, self.grads, self.rate)

    def add(self) -> None:
        """As `apply`, for differences instead of gradients."""
        self.table.add(self.keys, self.grads)


def mean_section(sections: list[Section]) -> Section:
    """One section with the mean gradient of all, each worker counting alike; rate and version of the first."""
    first = sections[0]
    if any(section.table is not first.table for section in sections):
        raise TableError("the workers pushed different tables in one step: they must run the same model")
    keys, grads = first.table.mean([(section.keys, section.grads) for section in sections])
    return Section(first.table, keys, grads, first.rate, first.version)
