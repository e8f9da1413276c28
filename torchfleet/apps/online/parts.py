"""Part, the data that one pass trains on, and Source, the protocol of classes that yield parts."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Protocol

import msgspec

DAY, HOUR = 86400, 3600


class Part(msgspec.Struct, frozen=True):
    """The samples that one pass trains on, often those of one hour.

    `position` can be stored as JSON. A source needs nothing else to find the next part.
    """

    name: str  # unique within a source
    time: float  # seconds since 1970
    day: str  # 20261115
    hour: int
    position: Any
    files: list[str] = []  # of all workers; empty if each worker fetches its own
    detail: Any = None  # further data for Source.files_of


class Source(Protocol):
    """Yields the parts of a stream. Worker 0 calls `next`, all workers call `files_of`."""

    def next(self, position: Any) -> Part | None:
        """Return the first finished part after `position` (None: from the start), or None if no part is finished."""

    def is_over(self, position: Any) -> bool:
        """Whether no further part will come after `position`. Called when `next` has returned None."""

    def files_of(self, part: Part, worker: int, num_workers: int) -> list[str]:
        """This worker's files: local paths or fsspec URLs. Every sample is in the files of exactly one worker."""

    def done(self, part: Part) -> None:
        """Called when the part has been trained and saved: its temporary files can be removed."""


def time_of(day: str, hour: int) -> float:
    """Seconds since 1970. Raises ValueError for a day that the calendar does not have."""
    if not 0 <= hour < 24:
        raise ValueError(f"a day has 24 hours from 0, found {hour}")
    return datetime.strptime(day, "%Y%m%d").replace(hour=hour, tzinfo=timezone.utc).timestamp()


def day_and_hour(seconds: float) -> tuple[str, int]:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.strftime("%Y%m%d"), moment.hour
