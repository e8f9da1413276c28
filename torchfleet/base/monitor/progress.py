"""Progress lines on stderr, for operations that take longer than a second."""

from __future__ import annotations

import sys
import time

_FIRST, _ON_TERMINAL, _ELSEWHERE = 1.0, 0.5, 10.0  # seconds before the first line, and between lines


class Progress:
    """Shows the progress of an operation: one line, rewritten, on a terminal; a line every ten seconds elsewhere."""

    def __init__(self, what: str) -> None:
        self._what, self._start = what, time.monotonic()
        self._next = self._start + _FIRST
        self._shown = False

    def show(self, text: str) -> None:
        """Show `text`, unless the last line is too recent."""
        now = time.monotonic()
        if now < self._next:
            return
        is_terminal = sys.stderr.isatty()
        self._next = now + (_ON_TERMINAL if is_terminal else _ELSEWHERE)
        self._write(text, end="" if is_terminal else "\n")

    def end(self, text: str) -> None:
        """Show the last line, if an earlier one was shown or the operation took long enough for one."""
        if self._shown or time.monotonic() - self._start >= _FIRST:
            self._write(text, end="\n")

    def _write(self, text: str, end: str) -> None:
        self._shown = True
        seconds = time.monotonic() - self._start
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{start}{self._what}: {text} ({seconds:.0f} s)", end=end, file=sys.stderr, flush=True)
