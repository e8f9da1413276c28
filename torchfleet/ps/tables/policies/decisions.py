"""What a table decides while it applies a request, by more than the request: who must go, who is let in.

Which rows are the oldest depends on where rows lie, and who has appeared often enough on all requests before. A server
that repeats the requests of another does not decide again: it follows what was noted.
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
    """Of one request, or one slice of long work."""

    dropped: Keys = field(default_factory=lambda: _NONE)  # rows, before the request or after its keys were served
    gone: Keys = field(default_factory=lambda: _NONE)  # those of them that are not back at the end
    forgotten: Keys = field(default_factory=lambda: _NONE)  # keys without a row that are not counted any longer
    let_in: Keys = field(default_factory=lambda: _NONE)  # by the table's entry
    carried: Columns = field(default_factory=dict)  # what was known of these
    left_out: Keys = field(default_factory=lambda: _NONE)  # keys for which there was no room, let in or not
    saved: Keys = field(default_factory=lambda: _NONE)  # rows that a save has read: what they gathered for it is zero

    @property
    def is_empty(self) -> bool:
        return not any(map(len, (self.dropped, self.forgotten, self.let_in, self.left_out, self.saved)))


class Decisions:
    """Notes them while it is told to, or hands out those that are to be followed."""

    def __init__(self) -> None:
        self.followed: Noted | None = None
        self._is_noting = False
        self._keys: dict[str, list[Keys]] = {}
        self._carried: list[Columns] = []

    def begin(self) -> None:
        """Note from now on."""
        self._is_noting = True

    def note(self, what: str, keys: Keys, carried: Columns | None = None) -> None:
        """`what`: a field of Noted. Keys are copied."""
        if self._is_noting and len(keys):
            self._keys.setdefault(what, []).append(keys.copy())
            if what == "let_in" and carried is not None:
                self._carried.append({name: column.copy() for name, column in carried.items()})

    def end(self) -> Noted | None:
        """What was noted since `begin`, but for `gone`; None: nothing."""
        self._is_noting = False
        if not self._keys:
            return None
        found = Noted(carried=_joined(self._carried))
        for what, pieces in self._keys.items():
            setattr(found, what, np.concatenate(pieces))
        self._keys, self._carried = {}, []
        return found

    def chosen(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of these keys were let in, by what is followed."""
        assert self.followed is not None
        return np.isin(keys, self.followed.let_in)

    def carried(self, keys: Keys) -> Columns:
        """What was known of these keys, all of which were let in."""
        assert self.followed is not None
        order = np.argsort(self.followed.let_in, kind="stable")
        at = order[np.searchsorted(self.followed.let_in, keys, sorter=order)]
        return {name: column[at] for name, column in self.followed.carried.items()}

    def with_room(self, keys: Keys) -> Keys:
        """Those of these keys for which there was room."""
        assert self.followed is not None
        found: Keys = keys[~np.isin(keys, self.followed.left_out)]
        return found


def _joined(pieces: Sequence[Columns]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in (pieces[0] if pieces else ())}
