"""A push is made of sections, one per table: what each wants of its table, and the mean of several workers' wishes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchfleet.errors import TableError
from torchfleet.tables.dense_table import DenseTable
from torchfleet.tables.sparse_table import SparseTable


@dataclass(slots=True)
class Section:
    """Gradients (or differences) for one table. `version`: how many updates it had seen when the rows were pulled."""

    table: SparseTable | DenseTable
    keys: npt.NDArray[np.uint64]  # none for a dense table
    grads: npt.NDArray[np.float32]
    rate: float | None
    version: float | None

    def check(self) -> None:
        """Raise TableError if it could not be applied."""
        if isinstance(self.table, DenseTable):
            if len(self.keys):
                raise TableError(f"dense table '{self.table.spec.name}' takes a whole block and no keys")
            self.table.check_push(self.grads, self.rate)
        else:
            self.table.check_push(self.keys, self.grads, self.rate)

    def apply(self) -> None:
        """After `check`, and with nothing done to the table in between."""
        if self.version is not None:
            seen = min(max(self.version, 0.0), float(self.table.step))
            self.table.staleness.note(self.table.step - int(seen))
        if isinstance(self.table, DenseTable):
            self.table.update(self.grads, self.rate)
        else:
            self.table.update(self.keys, self.grads, self.rate)

    def add(self) -> None:
        if isinstance(self.table, DenseTable):
            self.table.add(self.grads)
        else:
            self.table.add(self.keys, self.grads)


def mean_section(sections: list[Section]) -> Section:
    """One section with the mean gradient of all, each worker counting alike; rate and version of the first."""
    first = sections[0]
    if any(section.table is not first.table for section in sections):
        raise TableError("the workers pushed different tables in one step: they must run the same model")
    share = np.float32(1.0 / len(sections))
    if isinstance(first.table, DenseTable):
        total = first.grads.copy()
        for section in sections[1:]:
            total += section.grads
        return Section(first.table, first.keys, total * share, first.rate, first.version)
    keys = np.concatenate([section.keys for section in sections])
    grads = np.concatenate([section.grads for section in sections])
    grads[:, : first.table.spec.dim] *= share  # shows and clicks behind the gradients are sums
    return Section(first.table, keys, grads, first.rate, first.version)
