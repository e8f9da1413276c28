"""Budgets of clients: bytes that the server keeps for a client, its waiting requests, its new rows, spare memory.

A client is a connection (a peer of the transport). A Hold charges the client's budget as long as the object lives, so
it is stored with the data that it counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from torchfleet.base.cgroups import memory_left
from torchfleet.base.errors import FleetError, ServerBusy, TableError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.transport import Peer
from torchfleet.ps.tables.rows.memory import physical_bytes

# Bytes of one client's waiting requests, and of these plus answered data that is kept (gathered pushes, lists). A
# single request may be larger if nothing else is held for its client.
MAX_HELD, MAX_KEPT = 1 << 27, 1 << 28
MAX_HELD_IN_ALL = 1 << 32
MAX_WAITING = 64  # waiting requests of one client
NEW_ROWS = "FLEET_MAX_NEW_ROWS"
DEFAULT_NEW_ROWS = 10_000_000  # a second; more than a core can make
BURST = 4.0  # seconds' worth of rows that may be created at once
GROWTH = 2.0  # seconds for which a client is assumed to continue creating rows
_OVERHEAD = 1024  # bytes of a request in addition to its arrays
LOOK = 0.25  # seconds between two checks of the free memory
SHARE, MOST = 1 / 64, 1 << 30  # share of all memory, and most bytes, that new rows may not use


@dataclass(slots=True)
class Account:
    """What the server holds for one client, and when the client may create rows again."""

    num_bytes: int = 0
    num_waiting: int = 0
    spent_until: float = 0.0  # time when the client's budget has paid for its rows so far
    grew_until: float = 0.0  # until then, its pulls are expected to be mostly of new keys

    def is_idle(self, now: float) -> bool:
        return not self.num_bytes and max(self.spent_until, self.grew_until) <= now


class Hold:
    """Charges bytes to a client's budget until it is deleted."""

    __slots__ = ("_accounts", "_num_bytes", "_num_waiting", "_peer")

    def __init__(self, accounts: Budgets, peer: Peer, num_bytes: int, num_waiting: int) -> None:
        self._accounts, self._peer, self._num_bytes, self._num_waiting = accounts, peer, num_bytes, num_waiting
        accounts.add(peer, num_bytes, num_waiting)

    def __del__(self) -> None:
        self._accounts.add(self._peer, -self._num_bytes, -self._num_waiting)


class Budgets:
    """The accounts of all clients that the server holds something for."""

    def __init__(self, max_new_rows: float | None = None) -> None:
        """`max_new_rows`: per client and second; None: FLEET_MAX_NEW_ROWS, or the default; 0: unlimited."""
        self._accounts: dict[Peer, Account] = {}
        self._num_bytes = 0
        self._max_new_rows = _given_new_rows() if max_new_rows is None else max_new_rows
        self.memory = SpareMemory()
        self.is_lenient = False  # only count, never refuse: another server has already accepted the requests

    def hold(self, request: Request, more: int = 0, waits: bool = True) -> None:
        """Charge the request, and `more` bytes of its answer, to its client's budget. `waits`: it is not answered yet.
        Raises ServerBusy, and charges nothing, if the budget has no room."""
        if request.hold is None:
            request.hold = self.take(request.peer, request.num_bytes + more, waits)

    def take(self, peer: Peer, num_bytes: int, waits: bool = False) -> Hold:
        """As `hold`, for bytes that are not part of a request. The caller keeps the Hold."""
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
        """Raise ServerBusy if this client has created too many rows recently, TableError if the server has no memory
        for new rows."""
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
        """A pull of `num_keys` keys has created `num_rows` rows."""
        self.note_new_rows(peer, num_rows, now)
        if 2 * num_rows > num_keys:
            self._accounts.setdefault(peer, Account()).grew_until = now + GROWTH

    def is_growing(self, peer: Peer, now: float) -> bool:
        """Whether this client's next pull is likely to create rows, which takes much longer than reading rows."""
        account = self._accounts.get(peer)
        return account is not None and account.grew_until > now

    def forget_idle(self, now: float) -> None:
        """Drop the accounts of clients that hold nothing and have paid for their rows."""
        idle = [peer for peer, known in self._accounts.items() if known.is_idle(now)]
        for peer in idle:
            del self._accounts[peer]

    @property
    def num_bytes(self) -> int:
        """The bytes held for all clients."""
        return self._num_bytes


class SpareMemory:
    """Watches the free memory, so that new rows cannot exhaust it, however many tables they are in."""

    def __init__(self) -> None:
        self._reserve = min(MOST, int(physical_bytes() * SHARE))
        self._looked_at = -LOOK
        self._left: int | None = None

    def check(self, now: float) -> None:
        """Raise TableError if there is no memory for new rows. Never raises if the system does not report it."""
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
