"""Keeps, for each process that follows the tables, the keys whose rows changed or went since it last asked."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from torchfleet.base.errors import ServerBusy
from torchfleet.ps.kernels.levels import take_new
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.tables.rows.keymap import Keys

MAX_SUBSCRIBERS = 16
LEASE = 300.0  # seconds without a request after which a subscriber is forgotten
_COMPACT_AT = 1 << 18  # keys
_NOTED = 1 << 15  # keys that are not noted a second time: 256 KiB, which stay in the cache
_NONE: Keys = np.empty(0, np.uint64)


@dataclass(slots=True)
class PendingKeys:
    """Keys of one table that a subscriber has not got. Repeats are removed whenever they double, so that there are at
    most twice as many as the table ever had rows."""

    pieces: deque[Keys] = field(default_factory=deque)
    num: int = 0
    sent: Keys = field(default_factory=lambda: _NONE)  # in replies that may be lost
    compact_at: int = _COMPACT_AT
    noted: Keys = field(default_factory=lambda: np.zeros(_NOTED, np.uint64))  # most keys that were noted since `take`

    def note(self, keys: Keys) -> None:
        """Keys are copied."""
        new = np.empty(len(keys), np.uint64)
        self._add(new[: take_new(self.noted, keys, new)])

    def _add(self, keys: Keys) -> None:
        self.pieces.append(keys)
        self.num += len(keys)
        if self.num > self.compact_at:
            self.pieces = deque([unique(np.concatenate(self.pieces))[0].copy()])
            self.num = len(self.pieces[0])
            self.compact_at = max(_COMPACT_AT, 2 * self.num)

    def take(self, most: int) -> Keys:
        """At most `most` keys, the oldest first; few repeat. They are `sent` from now on."""
        self.noted[:] = 0
        taken, num = [_NONE], 0
        while self.pieces and num < most:
            piece = self.pieces.popleft()
            if num + len(piece) > most:
                self.pieces.appendleft(piece[most - num :])
                piece = piece[: most - num]
            taken.append(piece)
            num += len(piece)
        self.num -= num
        self.sent = np.concatenate(taken)
        return self.sent

    def settle(self, is_received: bool) -> None:
        """The last reply was received, or its keys must be sent again."""
        if not is_received and len(self.sent):
            self._add(self.sent)
        self.sent = _NONE


@dataclass(slots=True)
class Subscription:
    """What one subscriber has not got: keys by table, and the dense tables that changed."""

    number: int  # of the last reply
    asked: float  # when it last asked, by the server's clock
    changed_at: float = 0.0  # time.time() of the last change
    rows: dict[int, PendingKeys] = field(default_factory=dict)
    blocks: set[int] = field(default_factory=set)
    sent_blocks: set[int] = field(default_factory=set)

    def settle(self, is_received: bool) -> None:
        """As PendingKeys.settle, for all tables."""
        for pending in self.rows.values():
            pending.settle(is_received)
        if not is_received:
            self.blocks |= self.sent_blocks
        self.sent_blocks = set()


class Subscriptions:
    """All subscribers by their numbers."""

    def __init__(self) -> None:
        self._known: dict[int, Subscription] = {}

    def __len__(self) -> int:
        return len(self._known)

    def note(self, table: int, keys: Keys) -> None:
        """The rows of these keys changed, or went; no keys: the block of a dense table changed. Keys are copied."""
        now = time.time()
        for subscription in self._known.values():
            subscription.changed_at = now
            if len(keys):
                subscription.rows.setdefault(table, PendingKeys()).note(keys)
            else:
                subscription.blocks.add(table)

    def ask(self, subscriber: int, received: int, now: float) -> tuple[Subscription, bool]:
        """(what the subscriber has not got, whether it is all that changed since its reply number `received`).

        A subscriber that is not known begins here: changes are kept from now on. A repeat of its first request, 0,
        begins nothing again. Raises ServerBusy if there are too many.
        """
        found = self._known.get(subscriber)
        if found is not None and received <= found.number:
            found.asked = now
            if received:
                found.settle(received == found.number)
                found.number += 1
            return found, received > 0
        self.expire(now)
        if len(self._known) >= MAX_SUBSCRIBERS and found is None:
            raise ServerBusy(f"{len(self._known)} processes follow this server, which is the limit")
        made = self._known[subscriber] = Subscription(1, now, time.time())
        return made, False

    def expire(self, now: float) -> int:
        """Forget those that have not asked for long; returns how many."""
        silent = [key for key, found in self._known.items() if now - found.asked > LEASE]
        for subscriber in silent:
            del self._known[subscriber]
        return len(silent)

    def forget(self) -> None:
        """Forget all: the tables were replaced. Each begins again when it asks."""
        self._known.clear()
