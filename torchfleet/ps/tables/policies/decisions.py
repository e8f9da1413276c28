"""Decisions of a table that depend on more than the request: which rows are evicted, which keys are admitted.

Which rows are the oldest depends on where rows lie in memory, and whether a key has appeared often enough depends on
all earlier requests. A server that repeats the requests of another does not decide again: it follows the recorded
decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.rows.row_statistics import Columns

_NONE: Keys = np.empty(0, np.uint64)


@dataclass(slots=True)
class Noted:
    """The decisions of one request, or of one slice of a long operation."""

    # keys of evicted rows, before the request or after its keys were served
    dropped: Keys = field(default_factory=lambda: _NONE)
    gone: Keys = field(default_factory=lambda: _NONE)  # the dropped keys that have no row again at the end
    forgotten: Keys = field(default_factory=lambda: _NONE)  # candidate keys that are no longer counted
    let_in: Keys = field(default_factory=lambda: _NONE)  # keys that the table's entry admitted
    carried: Columns = field(default_factory=dict)  # statistics of the admitted keys
    left_out: Keys = field(default_factory=lambda: _NONE)  # keys for which there was no room, admitted or not
    # rows that a save has read: their delta statistic is reset to zero
    saved: Keys = field(default_factory=lambda: _NONE)

    @property
    def is_empty(self) -> bool:
        return not any(map(len, (self.dropped, self.forgotten, self.let_in, self.left_out, self.saved)))


class Decisions:
    """Records decisions between `begin` and `end`, or replays the ones to follow."""

    def __init__(self) -> None:
        self.followed: Noted | None = None
        self._is_noting = False
        self._keys: dict[str, list[Keys]] = {}
        self._carried: list[Columns] = []

    def begin(self) -> None:
        """Start recording."""
        self._is_noting = True

    def note(self, what: str, keys: Keys, carried: Columns | None = None) -> None:
        """Record keys under `what`, a field of Noted. Keys are copied."""
        if self._is_noting and len(keys):
            self._keys.setdefault(what, []).append(keys.copy())
            if what == "let_in" and carried is not None:
                self._carried.append({name: column.copy() for name, column in carried.items()})

    def end(self) -> Noted | None:
        """The decisions since `begin`, without `gone`; None if nothing was decided."""
        self._is_noting = False
        if not self._keys:
            return None
        found = Noted(carried=_joined(self._carried))
        for what, pieces in self._keys.items():
            setattr(found, what, np.concatenate(pieces))
        self._keys, self._carried = {}, []
        return found

    def chosen(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Mask of the keys that the followed decisions admitted."""
        assert self.followed is not None
        return np.isin(keys, self.followed.let_in)

    def carried(self, keys: Keys) -> Columns:
        """The statistics of these keys, all of which were admitted."""
        assert self.followed is not None
        order = np.argsort(self.followed.let_in, kind="stable")
        at = order[np.searchsorted(self.followed.let_in, keys, sorter=order)]
        return {name: column[at] for name, column in self.followed.carried.items()}

    def with_room(self, keys: Keys) -> Keys:
        """The keys for which there was room."""
        assert self.followed is not None
        found: Keys = keys[~np.isin(keys, self.followed.left_out)]
        return found


def _joined(pieces: Sequence[Columns]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in (pieces[0] if pieces else ())}
