"""Who stands between a server and its state, so that every change can be written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torchfleet.base.errors import FleetError
from torchfleet.ps.net.request import Request
from torchfleet.ps.server.state.state import Answer


class Recorder(Protocol):
    """Each method makes the change by calling `run`, once or not at all, and may note it."""

    def apply(self, request: Request, run: Callable[[], Answer | FleetError | None]) -> Answer | FleetError | None:
        """A request. May raise FleetError instead; then nothing has changed."""

    def advance(self, now: float, pause: float, run: Callable[[float], bool]) -> bool:
        """What the passing of time changes, of which `pause` seconds do not count; `run` takes these, and says whether
        anything changed. Returns whether time passes; False: it stands still, and `run` was not called."""

    def work(self, run: Callable[[], bool]) -> bool:
        """One slice of long work; returns what `run` does."""


class Unrecorded:
    """Changes are made, and nobody notes them."""

    def apply(self, request: Request, run: Callable[[], Answer | FleetError | None]) -> Answer | FleetError | None:
        """As Recorder.apply."""
        return run()

    def advance(self, now: float, pause: float, run: Callable[[float], bool]) -> bool:
        """As Recorder.advance."""
        run(pause)
        return True

    def work(self, run: Callable[[], bool]) -> bool:
        """As Recorder.work."""
        return run()
