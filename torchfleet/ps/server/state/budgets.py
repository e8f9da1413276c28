"""What clients may take of a server: bytes that are kept for one, requests that wait, rows that it creates, memory.

A client is a connection (a peer of the transport). What waits is held in its name as long as something refers to it:
the hold is an object that lives as long as what it counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from torchfleet.base.cgroups import memory_left
from torchfleet.base.errors import FleetError, ServerBusy, TableError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.transport import Peer
from torchfleet.ps.tables.rows.memory import physical_bytes

# Bytes of one client that wait, and of these and what was answered and is kept (pushes that are gathered, lists). A
# single request may be larger, if nothing else is held for its client.
MAX_HELD, MAX_KEPT = 1 << 27, 1 << 28
MAX_HELD_IN_ALL = 1 << 32
MAX_WAITING = 64  # requests of one client
NEW_ROWS = "FLEET_MAX_NEW_ROWS"
DEFAULT_NEW_ROWS = 10_000_000  # a second; more than a core can make
BURST = 4.0  # seconds' worth of rows that may be created at once
GROWTH = 2.0  # seconds for which a client is taken to go on creating rows
_OVERHEAD = 1024  # bytes of a request beside its arrays
LOOK = 0.25  # seconds between two looks at the memory that is left
SHARE, MOST = 1 / 64, 1 << 30  # of all memory, and bytes: so much is not for new rows


@dataclass(slots=True)
class Account:
    """What one client holds now, and when it may create rows again."""

    num_bytes: int = 0
    num_waiting: int = 0
    spent_until: float = 0.0  # rows so far are paid for by then
    grew_until: float = 0.0  # its pulls were mostly of new keys, and count as such until then

    def is_idle(self, now: float) -> bool:
        return not self.num_bytes and max(self.spent_until, self.grew_until) <= now


class Hold:
    """Counts bytes for a client as long as it lives."""

    __slots__ = ("_accounts", "_num_bytes", "_num_waiting", "_peer")

    def __init__(self, accounts: Budgets, peer: Peer, num_bytes: int, num_waiting: int) -> None:
        self._accounts, self._peer, self._num_bytes, self._num_waiting = accounts, peer, num_bytes, num_waiting
        accounts.add(peer, num_bytes, num_waiting)

    def __del__(self) -> None:
        self._accounts.add(self._peer, -self._num_bytes, -self._num_waiting)


class Budgets:
    """By client, those that hold something."""

    def __init__(self, max_new_rows: float | None = None) -> None:
        """`max_new_rows`: per client and second; None: FLEET_MAX_NEW_ROWS, or the default; 0: any number."""
        self._accounts: dict[Peer, Account] = {}
        self._num_bytes = 0
        self._max_new_rows = _given_new_rows() if max_new_rows is None else max_new_rows
        self.memory = SpareMemory()
        self.is_lenient = False  # no client is refused: what another server has taken in is only counted here

    def hold(self, request: Request, more: int = 0, waits: bool = True) -> None:
        """Keep the request, and so many bytes `more` of its answer, in its client's name. `waits`: it is not answered
        yet. Raises ServerBusy if that is too much; then nothing is kept."""
        if request.hold is None:
            request.hold = self.take(request.peer, request.num_bytes + more, waits)

    def take(self, peer: Peer, num_bytes: int, waits: bool = False) -> Hold:
        """As `hold`, for bytes that are kept beside a request."""
        account, num_bytes = self._accounts.get(peer, _NOTHING), num_bytes + _OVERHEAD
        if self.is_lenient:
            return Hold(self, peer, num_bytes, int(waits))
        if waits and account.num_waiting >= MAX_WAITING:
            raise ServerBusy(
                f"{account.num_waiting} requests of this client wait already, at most {MAX_WAITING}. Wait for answers."
            )
        limit = MAX_HELD if waits else MAX_KEPT
        if account.num_bytes and account.num_bytes + num_bytes > limit:
            raise ServerBusy(
                f"{account.num_bytes:,} bytes are kept for this client, and {num_bytes:,} more were to be: at most "
                f"{limit:,}. Wait for answers, or send less at once."
            )
        if self._num_bytes and self._num_bytes + num_bytes > MAX_HELD_IN_ALL:
            raise ServerBusy(f"{self._num_bytes:,} bytes are kept for all clients: at most {MAX_HELD_IN_ALL:,}")
        return Hold(self, peer, num_bytes, int(waits))

    def add(self, peer: Peer, num_bytes: int, num_waiting: int) -> None:
        account = self._accounts.setdefault(peer, Account())
        account.num_bytes += num_bytes
        account.num_waiting += num_waiting
        self._num_bytes += num_bytes
        if account.is_idle(0.0):
            del self._accounts[peer]

    def check_new_rows(self, peer: Peer, now: float) -> None:
        """Raise ServerBusy if this client has created too many rows in the last seconds, and TableError if there is no
        memory for new rows."""
        if self.is_lenient:
            return
        account = self._accounts.get(peer)
        if account is not None and account.spent_until > now + BURST:
            wait = account.spent_until - now - BURST
            raise ServerBusy(
                f"this client creates more than {self._max_new_rows:,.0f} rows a second. Ask again in {wait:.1f} s, or "
                f"raise {NEW_ROWS}."
            )
        self.memory.check(now)

    def note_new_rows(self, peer: Peer, num_rows: int, now: float) -> None:
        if num_rows and self._max_new_rows:
            account = self._accounts.setdefault(peer, Account())
            account.spent_until = max(now, account.spent_until) + num_rows / self._max_new_rows

    def note_pull(self, peer: Peer, num_keys: int, num_rows: int, now: float) -> None:
        """A pull of so many keys has created so many rows."""
        self.note_new_rows(peer, num_rows, now)
        if 2 * num_rows > num_keys:
            self._accounts.setdefault(peer, Account()).grew_until = now + GROWTH

    def is_growing(self, peer: Peer, now: float) -> bool:
        """Whether this client's next pull is likely to create rows: one takes as long as many that are there."""
        account = self._accounts.get(peer)
        return account is not None and account.grew_until > now

    def forget_idle(self, now: float) -> None:
        """Drop what is known of clients that hold nothing and have paid for their rows."""
        idle = [peer for peer, known in self._accounts.items() if known.is_idle(now)]
        for peer in idle:
            del self._accounts[peer]

    @property
    def num_bytes(self) -> int:
        """That are held for all clients."""
        return self._num_bytes


class SpareMemory:
    """The memory that is left. Clients cannot create rows to the end of all of it, in whatever number of tables."""

    def __init__(self) -> None:
        self._reserve = min(MOST, int(physical_bytes() * SHARE))
        self._looked_at = -LOOK
        self._left: int | None = None

    def check(self, now: float) -> None:
        """Raise TableError if there is no memory for new rows. Where the system does not say what is left, there is."""
        if now - self._looked_at >= LOOK:
            self._left, self._looked_at = memory_left(), now
        if self._left is not None and self._left < self._reserve:
            raise TableError(
                f"{self._left:,} bytes of memory are left on this machine or in its container, and {self._reserve:,} "
                "are kept free: no new rows. Use more servers or memory, evict (fleet.shrink), or admit fewer keys."
            )


_NOTHING = Account()


def _given_new_rows() -> float:
    text = os.environ.get(NEW_ROWS) or str(DEFAULT_NEW_ROWS)
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise FleetError(f"{NEW_ROWS} must be a number of rows a second, 0 for any number; found {text!r}")
    return number
