"""Admission of ids to a table on a device: ids without a row are counted here until the table's entry lets them in.

Candidates, the ids that appeared and have no row, are the rows of a second table on the device: the words of such a row
are 32-bit statistics. The same ids get rows as on servers (ps/tables/policies/admission.py). Calls wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.base.errors import TableError
from torchfleet.ps.gpu.change_tracking import ChangeTracking
from torchfleet.ps.gpu.integers import mix, shift_right, signed
from torchfleet.ps.gpu.row_blocks import RowBlock
from torchfleet.ps.gpu.table_memory import TableMemory
from torchfleet.ps.kernels.hashing import _CHOICE_SALT
from torchfleet.ps.tables.rows.row_statistics import Columns, candidate_columns, decay_powers, expression_values
from torchfleet.ps.tables.settings.clock import DAY
from torchfleet.ps.tables.settings.expressions import parse
from torchfleet.ps.tables.settings.policy import ADMISSION_NAMES, Shrink
from torchfleet.ps.tables.settings.spec import TableSpec

_NAMES = frozenset({"count", "age_days", "unseen_days"})  # that a predicate may read on devices


class CandidateTable(Protocol):
    """A table whose rows are statistics (implemented by DeviceTable)."""

    memory: TableMemory
    tracking: ChangeTracking | None

    @property
    def device(self) -> torch.device: ...

    def find(self, keys: torch.Tensor, insert: bool = False) -> torch.Tensor: ...

    def mark(self, slots: torch.Tensor) -> None: ...

    def remove(self, keys: torch.Tensor) -> int: ...

    def rows(self, num_rows: int = ...) -> Iterator[RowBlock]: ...

    def put(self, keys: torch.Tensor, words: torch.Tensor) -> None: ...


def check_entry(spec: TableSpec) -> None:
    """Raise TableError for entries that only tables on servers have."""
    entry, unknown = spec.entry, sorted(spec.entry.names - _NAMES)
    found = "WindowCountEntry" if entry.window_hours else "ShowClickEntry" if entry.show else ""
    found = found or (f"a PredicateEntry that looks at {', '.join(unknown)}" if unknown else "")
    if found:
        raise TableError(
            f"table '{spec.name}': on a device, entry= is CountFilterEntry, ProbabilityEntry, a PredicateEntry that "
            f"looks at {', '.join(sorted(_NAMES))}, or a list of them; found {found}. Leave out device= to have the "
            "rows on servers, which have all entries."
        )


def candidate_spec(spec: TableSpec) -> TableSpec | None:
    """The table of the candidates; None if nothing is counted per id."""
    columns = candidate_columns(spec)
    return TableSpec(spec.name, dim=len(columns)) if columns else None


def chosen(keys: torch.Tensor, probability: float) -> torch.Tensor:
    """The twin of kernels/hashing.chosen."""
    return shift_right(mix(keys ^ signed(int(_CHOICE_SALT))), 11) < int(probability * (1 << 53))


class Admission:
    """The admission of one table whose entry does not admit every id at once."""

    def __init__(self, spec: TableSpec, candidates: CandidateTable | None) -> None:
        """`candidates`: an empty table by `candidate_spec`."""
        self._entry, self._names, self.candidates = spec.entry, candidate_columns(spec), candidates
        self._predicate = parse(spec.entry.predicate, ADMISSION_NAMES) if spec.entry.predicate else None
        self._powers = decay_powers(1.0)  # no shows are kept

    def admit(self, keys: torch.Tensor, now: int) -> torch.Tensor:
        """Count an appearance, at second `now`, of each of these distinct keys, none of which has a row. Returns those
        that are admitted.
        """
        if self._entry.probability < 1:
            keys = keys[chosen(keys, self._entry.probability)]
        if self.candidates is None or not len(keys):
            return keys
        slots = self.candidates.find(keys, insert=True).long()
        columns = self._read(slots)
        is_new = columns["count"] == 0
        columns["count"] += 1
        for name in ("seen", "born"):
            if name in columns:
                columns[name].masked_fill_(is_new, now)
        is_in = columns["count"] >= self._entry.count
        if self._predicate is not None:
            values = expression_values(_arrays(columns), now, self._entry, self._powers)
            is_in &= torch.from_numpy(self._predicate(values)).to(is_in.device)
        if "seen" in columns:
            columns["seen"].clamp_(min=now)
        self._write(slots, columns)
        self.candidates.remove(keys[is_in])
        return keys[is_in]

    def forget(self, policy: Shrink, now: int) -> None:
        """Drop the candidates that are unseen for too long or too old by a policy."""
        if self.candidates is None:
            return
        victims = [torch.empty(0, dtype=torch.int64, device=self.candidates.device)]
        for block in self.candidates.rows():
            columns, is_out = self.columns_of(block), torch.zeros_like(block.keys, dtype=torch.bool)
            for name, days in (("seen", policy.delete_after_unseen_days), ("born", policy.ttl_days)):
                if days is not None and name in columns:
                    is_out |= (now - columns[name].long()) > days * DAY
            victims.append(block.keys[is_out])
        self.candidates.remove(torch.cat(victims))

    def columns_of(self, block: RowBlock) -> dict[str, torch.Tensor]:
        """The statistics of a block of candidates: int32 with the bits of uint32."""
        words = block.words.contiguous().view(torch.int32)
        return dict(zip(self._names, words.unbind(1), strict=True))

    def arrays_of(self, block: RowBlock) -> Columns:
        """The statistics of a block of candidates, as servers save them."""
        return _arrays(self.columns_of(block))

    def load(self, keys: torch.Tensor, columns: dict[str, npt.NDArray[np.uint32]], now: int) -> None:
        """Insert or overwrite candidates. If the saved statistics have no times, they count as seen now."""
        if self.candidates is None:
            return
        times = np.full(len(keys), now, np.uint32)
        known = {"seen": times, "born": times, **columns}
        zeros = np.zeros(len(keys), np.uint32)
        words = np.stack([known.get(name, zeros) for name in self._names], 1).view(np.float32)
        self.candidates.put(keys, torch.from_numpy(words))

    def forget_keys(self, keys: torch.Tensor) -> None:
        """Drop these candidates."""
        if self.candidates is not None:
            self.candidates.remove(keys)

    def _read(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self.candidates is not None
        words = self.candidates.memory.rows.read(slots, 0, len(self._names)).view(torch.int32)
        return {name: words[:, place].clone() for place, name in enumerate(self._names)}

    def _write(self, slots: torch.Tensor, columns: dict[str, torch.Tensor]) -> None:
        assert self.candidates is not None
        words = torch.stack([columns[name] for name in self._names], 1).view(torch.float32)
        self.candidates.memory.rows.write(slots, 0, words)
        self.candidates.mark(slots)


def _arrays(columns: dict[str, torch.Tensor]) -> Columns:
    return {name: column.cpu().contiguous().numpy().view(np.uint32) for name, column in columns.items()}
