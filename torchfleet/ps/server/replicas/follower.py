"""A replica that is not primary. It receives the primary's state and entries, and takes over if the primary is lost."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from enum import Enum

from torchfleet.base.errors import CoordinatorUnreachable, FleetError
from torchfleet.ps.coordination.view import ENDED, Coordinator, View
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import Frame, Message
from torchfleet.ps.server.log.log_entry import Entry, decode_entry
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.replicas.between import IN_VIEW, Identity, LostBody, confirm, follow, replica_of
from torchfleet.ps.server.replicas.pace import BEAT, GIVE_UP, OWN_PAUSE, RECHECK, SILENCE
from torchfleet.ps.server.server import Server

_MOST_WAITING = 16  # entries; they take memory, and a take-over must apply them first
_LOST_WITH_PRIMARY = (
    "the primary of this server was lost before this backup had received its whole state, so the rows are lost. "
    "Restart the job from the last checkpoint."
)
_LOST_WITHOUT_BACKUP = (
    "this server was lost when it had no backup, or together with it, so its rows are lost. Restart the job from the "
    "last checkpoint; with --coordinator etcd://..., under another NAME."
)


class Fate(Enum):
    """What a follower does next."""

    WAITS = "waits"
    TAKES_OVER = "takes over"
    DROPPED = "dropped"  # its state is outdated: the process must be restarted
    ENDS = "ends"  # the job is over


class Follower:
    """Only the server's loop calls it. `connect(number)`: a channel to that replica, which is only sent over.

    An entry is confirmed when it arrives, and applied later. If _MOST_WAITING entries wait, they are applied before the
    next one is confirmed. A take-over applies all of them first.
    """

    def __init__(
        self, server: Server, own: Identity, coordinator: Coordinator, connect: Callable[[int], Channel], now: float
    ) -> None:
        self.replay = Replay(server)
        self._own, self._coordinator, self._connect = own, coordinator, connect
        self.view: View | None = None
        self._channel: Channel | None = None
        self._primary = ""  # name of the primary that sends the entries
        self._number = self._stamp = 0  # of the last message in order; the latest stamp
        self._waiting: deque[Entry] = deque()  # received entries that are not applied yet
        self._told = 0  # the highest term in the primary's messages
        self._heard = self._looked = self._asked = now
        self._losses: list[LostBody] = []  # processes that have ended, as the launcher has reported
        self._claimed = 0  # the term in which it has asked to be primary, until the view has that term; 0: it has not
        self._has_won = False  # the view names it as primary; it takes over when the lease of the old one has ended
        self.is_in_view = False

    @property
    def term(self) -> int:
        return max(self._told, self.view.term if self.view else 0)

    def take(self, message: Message, now: float) -> list[Frame] | None:
        """Take an APPEND, and return the CONFIRM; None if it is not for this process. An entry that is not the next one
        is ignored. Raises LogError if the entry is malformed, or an earlier one cannot be applied."""
        if message.client != self._own.incarnation or self._channel is None:
            return None  # meant for an earlier process at this address
        if self._has_won:
            return None  # a confirmation would extend the lease of the old primary
        self._heard, self._stamp = now, max(self._stamp, message.sequence)
        self._told = max(self._told, message.term)
        self.is_in_view |= bool(message.flags & IN_VIEW)
        if message.call == self._number + 1:
            if len(self._waiting) >= _MOST_WAITING:
                self.catch_up()
            self._waiting.append(decode_entry([array.data.reshape(-1) for array in message.arrays]))
            self._number += 1
        return confirm(self._own, message.term, self._number, self._stamp)

    def work(self) -> bool:
        """Apply the next entry, if there is one. Returns whether more are left. Raises LogError."""
        if self._waiting:
            self.replay.apply(self._waiting.popleft())
        return bool(self._waiting)

    def catch_up(self) -> None:
        """Apply all received entries. Raises LogError."""
        while self.work():
            pass

    def hear_of_loss(self, body: LostBody) -> None:
        """Take the launcher's report that a process has ended. It counts if that is the primary, once one is known."""
        self._losses.append(body)

    def tick(self, now: float) -> Fate:
        """Look for a primary, or check whether the primary is lost, and decide what to do next. Raises FleetError if no
        replica has the state any longer."""
        if now - self._looked > OWN_PAUSE:
            self._heard = now  # this process stood still, so messages of the primary may still be unread
        self._looked = now
        with contextlib.suppress(CoordinatorUnreachable):  # the next tick asks again
            if not self._number:
                return self._look_for_primary(now)
            is_due = self._claimed and now - self._asked > RECHECK
            if is_due or self._is_silent(now) or self.replay.server.is_stopping:
                return self._look_for_end(now)
        return Fate.WAITS

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _look_for_primary(self, now: float) -> Fate:
        if now - self._asked < BEAT:
            return Fate.WAITS
        self._asked = now
        view = self.view = self._coordinator.read(self._own.shard)
        if view is None:
            return Fate.WAITS
        if view.primary == ENDED:
            return Fate.ENDS
        replica = replica_of(view.primary)
        if replica == self._own.replica:
            if not view.backup or self._is_lost(view.backup):
                raise FleetError(_LOST_WITHOUT_BACKUP)
            return Fate.WAITS
        if replica != 1 - self._own.replica:
            return Fate.WAITS  # not a name that a replica has written
        if self._is_lost(view.primary):
            raise FleetError(_LOST_WITH_PRIMARY)
        if view.primary != self._primary:
            self.close()
            self._primary, self._channel = view.primary, self._connect(replica)
        assert self._channel is not None
        self._channel.send(follow(self._own, view.term))
        return Fate.WAITS

    def _look_for_end(self, now: float) -> Fate:
        self._asked = now
        view = self.view = self._coordinator.read(self._own.shard)
        if view is None or view.primary == ENDED:
            return Fate.ENDS
        if view.primary == self._own.name:  # it has taken over, and the coordinator's answer was lost
            self._has_won = True
            return Fate.TAKES_OVER if self._is_silent(now) else Fate.WAITS
        if view.term >= self._claimed:
            self._claimed = 0
        if view.primary != self._primary:
            return Fate.DROPPED
        if view.backup == self._own.name:
            return self._take_over(view) if self._is_silent(now) else Fate.WAITS
        if self._is_lost(self._primary):
            raise FleetError(_LOST_WITH_PRIMARY)
        is_late = self.is_in_view or now - self._heard > GIVE_UP
        return Fate.DROPPED if is_late else Fate.WAITS

    def _take_over(self, view: View) -> Fate:
        """Ask for the shard. Without an answer, or after a refusal, a later read of the view tells who has it."""
        self._claimed = view.term + 1
        if not self._coordinator.replace(self._own.shard, view, view.taken_over()):
            return Fate.WAITS
        self.view = view.taken_over()
        return Fate.TAKES_OVER

    def _is_silent(self, now: float) -> bool:
        """Whether the primary has ended, or its lease has."""
        return now - self._heard > SILENCE or self._is_lost(self._primary)

    def _is_lost(self, name: str) -> bool:
        return any(body.is_about(name) for body in self._losses)
