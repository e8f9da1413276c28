"""Keeps, for each process that follows the tables, what changed since it last asked."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torchfleet.base.errors import ServerBusy
from torchfleet.ps.server.state.pending import Pending
from torchfleet.ps.tables.rows.keymap import Keys, Rows

MAX_SUBSCRIBERS = 16
LEASE = 300.0  # seconds without a request after which a subscriber is forgotten


@dataclass(slots=True)
class Subscription:
    """The changes that one subscriber has not received: rows by table, and dense tables."""

    number: int  # of the last reply
    asked: float  # when it last asked, by the server's clock
    changed_at: float = 0.0  # time.time() of the last change
    rows: dict[int, Pending] = field(default_factory=dict)
    blocks: set[int] = field(default_factory=set)
    sent_blocks: set[int] = field(default_factory=set)

    def settle(self, is_received: bool) -> None:
        """As Pending.settle, for all tables."""
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

    def note(self, table: int, keys: Keys, at: Rows | None) -> None:
        """Record a change for all subscribers. Tables call it as their `watch`, with its arguments."""
        now = time.time()
        for subscription in self._known.values():
            subscription.changed_at = now
            if not len(keys):
                subscription.blocks.add(table)
                continue
            if table not in subscription.rows:
                subscription.rows[table] = Pending()
            subscription.rows[table].note(keys, at)

    def ask(self, subscriber: int, received: int, now: float) -> tuple[Subscription, bool]:
        """(the subscription, whether it has all changes since the subscriber's reply number `received`).

        An unknown subscriber is registered: its changes are kept from now on. A repeat of its first request
        (`received` 0) does not register it again. Raises ServerBusy if there are too many subscribers.
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
        """Forget the subscribers that have not asked for LEASE seconds. Returns their number."""
        silent = [key for key, found in self._known.items() if now - found.asked > LEASE]
        for subscriber in silent:
            del self._known[subscriber]
        return len(silent)

    def forget(self) -> None:
        """Forget all subscribers, because the tables were replaced. Each is registered again when it asks."""
        self._known.clear()
