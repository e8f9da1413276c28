"""What a server refused because somebody asked for too much: told in its log, a line a second at most."""

from __future__ import annotations

import sys

PAUSE = 1.0  # seconds between two lines


class Refusals:
    def __init__(self) -> None:
        self.num = 0
        self._told_at = -PAUSE
        self._num_untold = 0

    def note(self, text: str, now: float) -> None:
        """`text`: who, and why."""
        self.num += 1
        if now - self._told_at < PAUSE:
            self._num_untold += 1
            return
        more = f" ({self._num_untold:,} more refusals since the last line)" if self._num_untold else ""
        self._told_at, self._num_untold = now, 0
        print(f"torchfleet server: refused: {text}{more}", file=sys.stderr, flush=True)
