"""How long a server whose workers have all left still answers.

A worker without an answer in time connects anew and sends its request again. If that is the last LEAVE, the answer to
the first copy goes to a connection that is closed by then. A server that has been slow therefore stays for a moment,
and answers the second copy. A server that was always there in time has answered before any worker could ask again.
"""

from __future__ import annotations

import math
import time

from torchfleet.ps.net.transport import TICK

SLOW = 4 * TICK  # seconds of one turn of the loop; a worker waits longer before it asks again (Patience.resend_at)
STAYS = 2.0  # seconds


class Farewell:
    """Watches the turns of a server's loop, of which there is one every TICK without requests."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._was_slow = -math.inf  # when a slow turn ended last
        self._ends: float | None = None

    def is_over(self, is_stopping: bool) -> bool:
        """Call it at every turn. Whether the server can end: `is_stopping`, and no worker is about to ask again."""
        now = time.monotonic()
        if now - self._looked > SLOW:
            self._was_slow = now
        self._looked = now
        if not is_stopping:
            return False
        if self._ends is None:
            self._ends = now + STAYS if now - self._was_slow < STAYS else now
        return now >= self._ends
