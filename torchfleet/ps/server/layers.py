"""What stands between a decoded request and its command: layers, each absent where it is off.

    Listener.serve → Server.handle → decode → layers → COMMANDS[…] → table → encode

    layer, outermost first   is there                                              what it adds
    TracedRequests           once a request of a traced step has come              times, for its reply and for spans
    Loading                  while the server loads, or waits for its backup       refuses all but PING
    LongPulls                while a long pull is under way                        its client's later requests wait
    Journal                  with a log on disk, or a backup                       an entry for each change

`Server.layers` is the list. Around the whole server, where its replies leave, stand LoggedServer, which holds replies
until their entries are safe, and Replica, which answers only for the shard that it is sure of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from torchfleet.base.errors import FleetError, ServerLoading
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Array, Command, pack

Answer = list[Array]  # the arrays of a reply
Result = Answer | FleetError | None  # None: the reply comes later, through State.finish
Run = Callable[[Request], Result]


class Layer(Protocol):
    """One of the above."""

    def around(self, inner: Run, request: Request) -> Result:
        """Call `inner` with the request once, or not at all, and return what it does, or something in its place. May
        raise FleetError instead of calling it; then nothing has changed."""


class Recorder(Layer, Protocol):
    """The layer that writes changes down. Time and long work change a server too, so these pass through it as well."""

    def advance(self, now: float, pause: float, run: Callable[[float, float], bool]) -> bool:
        """What the passing of time changes, of which `pause` seconds do not count; `run` takes both, and says whether
        anything changed. Returns whether time passes; False: it stands still, and `run` was not called."""

    def work(self, run: Callable[[], bool]) -> bool:
        """One slice of long work; returns what `run` does."""


class Loading:
    """The server does not serve yet."""

    def __init__(self, what: str) -> None:
        """`what`: it does, for the text that clients get."""
        self.what = what

    def around(self, inner: Run, request: Request) -> Result:
        """As Layer.around."""
        if request.message.command == Command.PING:
            return [pack({"loading": self.what})]
        raise ServerLoading(f"this server does not serve yet: {self.what}. Ask again later.")


def composed(layers: Sequence[Layer], run: Run) -> Run:
    """`run` with these around it, the first outermost. Without one it is `run` itself."""
    for layer in reversed(layers):
        run = functools.partial(layer.around, run)
    return run
