"""Looks at requests that wait in the queue: their tables begin to read the rows of these requests from the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torchfleet.base.errors import FleetError
from torchfleet.ps.net.wire import Command, Frame, decode
from torchfleet.ps.server.arrays import key_sections
from torchfleet.ps.server.state.state import State


class LookAhead:
    """As transport.LookAhead. It affects only when rows are read, so a request that is refused later does no harm."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._num_tables, self._is_on = 0, False

    @property
    def is_on(self) -> bool:
        """Whether a table has rows on disk."""
        tables = self._state.tables
        if len(tables) != self._num_tables:
            self._num_tables, self._is_on = len(tables), any(table.foresees for table in tables.values())
        return self._is_on

    def note(self, frames: Sequence[Frame]) -> None:
        """Begin to read the rows of a pull that waits behind other requests. Other requests are ignored."""
        with contextlib.suppress(FleetError):  # the answer to the request reports it
            message = decode(frames)
            if message.command == Command.PULL:
                for table, keys in key_sections(self._state, message.arrays):
                    table.foresee(keys)
