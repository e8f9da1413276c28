"""A part: the samples of an hour, or so, that one pass trains on; and where parts come from."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Protocol

import msgspec

DAY, HOUR = 86400, 3600


class Part(msgspec.Struct, frozen=True):
    """What one pass trains on. `position` is JSON-able, and all that a source needs to go on behind this part."""

    name: str  # no two parts of a source have the same
    time: float  # seconds since 1970
    day: str  # 20261115
    hour: int
    position: Any
    files: list[str] = []  # of all workers; empty where every worker makes its own
    detail: Any = None  # what else files_of needs


class Source(Protocol):
    """Where parts come from. Worker 0 asks for the next one; every worker asks for its own files of it."""

    def next(self, position: Any) -> Part | None:
        """The first finished part behind `position` (None: from the beginning). None: there is none yet."""

    def is_over(self, position: Any) -> bool:
        """Whether there will never be a part behind `position`; asked when `next` has found none."""

    def files_of(self, part: Part, worker: int, num_workers: int) -> list[str]:
        """This worker's files: local paths or fsspec URLs. Every sample is in the files of exactly one worker."""

    def done(self, part: Part) -> None:
        """The part has been trained and saved; its temporary files may go."""


def time_of(day: str, hour: int) -> float:
    """Seconds since 1970. Raises ValueError for a day that the calendar does not have."""
    if not 0 <= hour < 24:
        raise ValueError(f"a day has 24 hours from 0, found {hour}")
    return datetime.strptime(day, "%Y%m%d").replace(hour=hour, tzinfo=timezone.utc).timestamp()


def day_and_hour(seconds: float) -> tuple[str, int]:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.strftime("%Y%m%d"), moment.hour
