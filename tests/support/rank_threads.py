"""Ranks as threads of this process, for code that only gathers bytes. A rank that gathers after another one has left
fails the test at once, where real ranks would wait for their time-out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_SECONDS = 60.0  # that a rank may take until it gathers too, on busy cores


class LeftAlone(BaseException):
    """A rank gathers, and another rank is at its end. Not an Exception: the code under test does not catch it."""


class _Meeting:
    def __init__(self, size: int) -> None:
        self.size, self.gone = size, set[int]()
        self.changed = threading.Condition()
        self.rounds: list[dict[int, bytes]] = []

    def gather(self, number: int, rank: int, data: bytes) -> list[bytes]:
        with self.changed:
            if number == len(self.rounds):
                self.rounds.append({})
            given = self.rounds[number]
            given[rank] = data
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: len(given) == self.size or self.gone - given.keys(), _SECONDS):
                raise LeftAlone(f"rank {rank} waited {_SECONDS} s")
            if len(given) < self.size:
                raise LeftAlone(f"rank {rank} gathers, and has left: {sorted(self.gone - given.keys())}")
            return [given[one] for one in range(self.size)]

    def leave(self, rank: int) -> None:
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


class RankThread:
    """A `Gathering` of torchfleet/collective/world.py."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._num_gathered = meeting, 0

    def gather(self, data: bytes) -> list[bytes]:
        self._num_gathered += 1
        return self._meeting.gather(self._num_gathered - 1, self.rank, data)


def on_threads(size: int, call: Callable[[RankThread], Any]) -> list[Any]:
    """What `call` returned on each rank, or the exception that it raised."""
    meeting = _Meeting(size)

    def run(rank: int) -> Any:
        try:
            return call(RankThread(rank, size, meeting))
        except Exception as error:
            return error
        finally:
            meeting.leave(rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
