"""A line on stderr for whatever takes longer than a second."""

from __future__ import annotations

import sys
import time

_FIRST, _ON_TERMINAL, _ELSEWHERE = 1.0, 0.5, 10.0  # seconds before the first line, and between lines


class Progress:
    """Shows how far something has come: in one line on a terminal, now and then a line elsewhere."""

    def __init__(self, what: str) -> None:
        self._what, self._start = what, time.monotonic()
        self._next = self._start + _FIRST
        self._shown = False

    def show(self, text: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        is_terminal = sys.stderr.isatty()
        self._next = now + (_ON_TERMINAL if is_terminal else _ELSEWHERE)
        self._write(text, end="" if is_terminal else "\n")

    def end(self, text: str) -> None:
        """The last line, if there was a first one or it took long."""
        if self._shown or time.monotonic() - self._start >= _FIRST:
            self._write(text, end="\n")

    def _write(self, text: str, end: str) -> None:
        self._shown = True
        seconds = time.monotonic() - self._start
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{start}{self._what}: {text} ({seconds:.0f} s)", end=end, file=sys.stderr, flush=True)
