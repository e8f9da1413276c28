"""Asks a coordinator in a thread, so that a server's loop does not wait for a coordinator that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.ps.coordination.view import Coordinator, View

WAITS = "the coordinator gives no good answer"
_WAIT = 0.05  # seconds that a call waits for the answer; much less than the lease of a primary
_WAIT_AT_END = 2.0  # seconds for the last change of a job, after which there is nothing to serve
_KEPT = 0.5  # seconds after which an answer that no call has returned is outdated

Result = TypeVar("Result")


class BackgroundCoordinator:
    """A Coordinator that asks another one. Only one thread calls it.

    One request is under way at a time. A call raises CoordinatorUnreachable if its answer has not come within _WAIT.
    The request goes on; the same call returns its answer later. Until then, other calls raise at once. `say` gets a
    line when the coordinator ceases to answer, another when the reason changes, and one when it answers again.
    """

    def __init__(self, coordinator: Coordinator, say: Callable[[str], None]) -> None:
        self._coordinator, self._say = coordinator, say
        self._request: _Request | None = None
        self._told = ""  # why the coordinator does not answer; empty if it does

    def read(self, shard: int) -> View | None:
        return self._ask(("read", shard), lambda: self._coordinator.read(shard))

    def replace(self, shard: int, before: View | None, after: View) -> bool:
        wait = _WAIT_AT_END if after.is_last else _WAIT
        if after.is_last and self._request is not None:
            self._request.done.wait(wait)
        return self._ask(
            ("replace", shard, before, after), lambda: self._coordinator.replace(shard, before, after), wait
        )

    def renew(self) -> None:
        self._ask(("renew",), self._coordinator.renew)

    def _ask(self, what: tuple[object, ...], run: Callable[[], Result], wait: float = _WAIT) -> Result:
        request = self._request
        if request is None or (request.done.is_set() and (request.what != what or request.is_outdated)):
            request = self._request = _Request(what, run)
            request.done.wait(wait)
        if not request.done.is_set():
            raise CoordinatorUnreachable("the coordinator has not answered yet")
        self._request = None
        self._tell(request.error)
        if request.error is not None:
            raise request.error
        return request.result  # type: ignore[return-value]

    def _tell(self, error: Exception | None) -> None:
        text = "" if error is None else str(error)
        if text and text != self._told:
            self._say(f"{WAITS}; this server retries: {text}")
        elif self._told and not text:
            self._say("the coordinator answers again")
        self._told = text


class _Request:
    """A call in a thread of its own."""

    def __init__(self, what: tuple[object, ...], run: Callable[[], object]) -> None:
        self.what, self._run = what, run
        self.done = threading.Event()
        self.result: object = None
        self.error: Exception | None = None
        self._ended = 0.0
        threading.Thread(target=self._call, daemon=True, name="coordinator").start()

    @property
    def is_outdated(self) -> bool:
        return time.monotonic() - self._ended > _KEPT

    def _call(self) -> None:
        try:
            self.result = self._run()
        except Exception as error:  # the caller's thread raises it
            self.error = error
        self._ended = time.monotonic()
        self.done.set()
