"""Measures the silence of the other replica, and decides when it is too long to be explained by a busy machine."""

from __future__ import annotations

from torchfleet.ps.net.transport import TICK

_ON_TIME = 2 * TICK  # seconds between two looks that count; the rest of a longer pause is this process's own delay
_WINDOW = 15.0  # seconds for which the longest silence is remembered; then for as long again
_MARGIN = 2.5  # a silence is too long if it is this many times the longest one that a message has ended
_MOST = 8  # limits grow at most this many times


class Silence:
    """Seconds without a message of the other replica, in which this process itself ran on schedule.

    A process that is not scheduled reads no messages, so a late look counts as _ON_TIME seconds at most, and decides
    nothing before the next one. Where messages come late, because the other process waits for a core, limits grow with
    the longest recent silence. On an idle machine they do not: messages then come every BEAT seconds.

    The counted time is never more than the time since the last message, so that a lease shorter than a limit is over
    when the limit is exceeded.
    """

    def __init__(self, now: float) -> None:
        self._looked = self._window = now
        self._counted = self._before = 0.0  # seconds up to the last look, and up to the one before
        self._is_heard = False  # a message has come since the last look
        self._longest = (0.0, 0.0)  # silence that a message has ended: in this window, in the one before

    @property
    def seconds(self) -> float:
        return self._counted

    def hear(self) -> None:
        """A message has come."""
        self._longest = max(self._longest[0], self._counted), self._longest[1]
        self._counted = self._before = 0.0
        self._is_heard = True

    def forget(self) -> None:
        """Earlier silences say nothing about later ones."""
        self._longest = (0.0, 0.0)

    def look(self, now: float) -> None:
        """Count the time since the last call. Call it every TICK seconds, after reading what has arrived."""
        self._before = self._counted
        if not self._is_heard:  # else a part of this time was before the message
            self._counted += min(max(0.0, now - self._looked), _ON_TIME)
        self._looked, self._is_heard = now, False
        if now - self._window > _WINDOW:
            self._window, self._longest = now, (0.0, self._longest[0])

    def exceeds(self, limit: float) -> bool:
        """Whether the silence is longer than `limit` seconds, or than what `limit` has grown to on a busy machine."""
        grown = min(max(limit, _MARGIN * max(self._longest)), _MOST * limit)
        return self._before > grown - TICK and self._counted > grown
