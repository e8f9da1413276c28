"""Whether this process was asked to save and exit, by SIGUSR1, which schedulers send before they end a job."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from torchfleet.base.errors import FleetError

REQUEUE = 75  # the exit status of a job that saved because it was asked to end and must be started again


class StopRequest:
    """Handles SIGUSR1 from the first call of `has_come` on. Where the signal is blocked (launch/clusters/), it may
    come earlier.
    """

    def __init__(self) -> None:
        self._is_looking = self._came = False

    def has_come(self) -> bool:
        if not self._is_looking:
            self._begin()
        return self._came or signal.SIGUSR1 in signal.sigpending()

    def was_seen(self) -> bool:
        """Whether the request has come and the process has called `has_come` before."""
        return self._is_looking and self.has_come()

    def _begin(self) -> None:
        if signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            if threading.current_thread() is not threading.main_thread():
                raise FleetError("fleet.stop_if_asked: call it in the main thread first, which Python's signals need")
            signal.signal(signal.SIGUSR1, self._note)
        self._is_looking = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True


stop_request = StopRequest()  # one per process, as are signal handlers


def end_with_save(save: Callable[[], object], dirname: str) -> NoReturn:
    """Save and exit with the status that requests a restart. Raises the error of a failed save."""
    print(f"asked to end (SIGUSR1): saving to {dirname}", flush=True)
    save()
    print(f"saved to {dirname}; ending with status {REQUEUE}, to be started again", flush=True)
    raise SystemExit(REQUEUE)
