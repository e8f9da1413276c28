"""Layers between a decoded request and its command. A layer that is off is absent.

    Listener.serve → Server.handle → decode → layers → COMMANDS[…] → table → encode

    layer, outermost first   present                                               what it does
    TracedRequests           after the first request of a traced step              records times for replies and spans
    Loading                  while the server loads, or waits for its backup       refuses all but PING and TABLES
    ReadOnly                 on a server of a saved model (read_only.py)           refuses every change
    LongPulls                while a long pull is in progress                      holds that client's later requests
    Journal                  with a log on disk, or a backup                       writes an entry for each change

`Server.layers` is the list. Two classes wrap the whole server. LoggedServer holds replies until their entries are safe.
Replica answers only while it is sure to be the primary of its shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from torchfleet.base.errors import FleetError, ServerLoading
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Array, Command, pack

Answer = Sequence[Array]  # the arrays of a reply
Result = Answer | FleetError | None  # None: the reply comes later, through State.finish
Run = Callable[[Request], Result]


class Layer(Protocol):
    """One layer of the table above."""

    def around(self, inner: Run, request: Request) -> Result:
        """Call `inner` with the request at most once, and return its result or a replacement.

        May raise FleetError instead of calling `inner`; then nothing has changed.
        """


class Recorder(Layer, Protocol):
    """The layer that logs changes. Passing time and long work change a server too, so they also go through it."""

    def advance(self, now: float, pause: float, run: Callable[[float, float], bool]) -> bool:
        """Call `run(now, pause)`, which advances the server's time and returns whether anything changed.

        `pause`: seconds before `now` in which the server itself stood still. Returns False, without a call of `run`, if
        the server's time stands still now.
        """

    def work(self, run: Callable[[], bool]) -> bool:
        """Call `run`, which does one slice of long work, and return its result."""


class Loading:
    """Refuses all commands but PING while the server does not serve yet, and TABLES if it waits for them."""

    def __init__(self, what: str, take_tables: Callable[[Request], None] | None = None) -> None:
        """`what`: what the server is doing, for the text of the refusal. `take_tables`: takes a request TABLES."""
        self.what, self._take_tables = what, take_tables

    def around(self, inner: Run, request: Request) -> Result:
        """As Layer.around."""
        if request.message.command == Command.PING:
            return [pack({"loading": self.what})]
        if request.message.command == Command.TABLES and self._take_tables is not None:
            self._take_tables(request)
            return []
        raise ServerLoading(f"this server does not serve yet: {self.what}. Ask again later.")


def composed(layers: Sequence[Layer], run: Run) -> Run:
    """`run` wrapped in `layers`, the first outermost. Without layers it is `run` itself."""
    for layer in reversed(layers):
        run = functools.partial(layer.around, run)
    return run
