"""Asks all heter workers for their load from time to time, beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError, ServerRestarted, ServerUnreachable
from torchfleet.ps.net.wire import Command, unpack
from torchfleet.ps.worker.client.connection import Call, Connection
from torchfleet.ps.worker.heter.messages import Load

PERIOD = 5.0  # seconds between two looks
TIMEOUT = 2.0  # seconds for a reply; a heter worker that takes longer is left out of this look


class LoadWatch:
    """`loads` has the number of workers of each heter worker that answered the last look, by its index.

    The connections belong to the thread of the watch. A connection that fails is replaced at the next look.
    """

    def __init__(self, connect: Callable[[int], Connection], num: int) -> None:
        """`connect`: makes a connection to a heter worker by its index."""
        self._connect, self._num = connect, num
        self._open: dict[int, Connection] = {}
        self._is_over = threading.Event()
        self.loads: dict[int, int] = {}
        self._thread = BackgroundThreads([self._run], "the watch over heter workers")
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the watch, if one did."""
        self._thread.check()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over.wait(PERIOD):
                self.loads = self._look()
        finally:
            for connection in self._open.values():
                connection.close()

    def _look(self) -> dict[int, int]:
        asked = [(index, self._ask(index)) for index in range(self._num)]
        return {index: load for index, call in asked if (load := self._answer(index, call)) is not None}

    def _ask(self, index: int) -> Call:
        if index not in self._open:
            self._open[index] = self._connect(index)
        return self._open[index].submit(Command.STATS, [], timeout=TIMEOUT)

    def _answer(self, index: int, call: Call) -> int | None:
        return load_in(self._open[index], call, lambda: self._open.pop(index).close())


def load_in(connection: Connection, call: Call, on_failure: Callable[[], None]) -> int | None:
    """The number of workers in the reply to STATS; None, after `on_failure`, if the heter worker does not reply."""
    try:
        return unpack(connection.wait(call)[0], Load).sessions
    except (ServerUnreachable, ServerRestarted):
        on_failure()
        return None
    except IndexError:
        raise FleetError(f"{connection.name} gave no load: is it a heter worker?") from None
