"""A replica that is not primary. It receives the primary's state and entries, and takes over if the primary is lost."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from torchfleet.base.errors import CoordinatorUnreachable, FleetError
from torchfleet.ps.coordination.view import ENDED, Coordinator, View
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import Frame, Message
from torchfleet.ps.server.log.log_entry import Entry, decode_entry
from torchfleet.ps.server.log.replay import Replay
from torchfleet.ps.server.replicas.between import IN_VIEW, STUCK, Identity, LostBody, confirm, follow, replica_of
from torchfleet.ps.server.replicas.liveness import Liveness
from torchfleet.ps.server.replicas.pace import BEAT, GIVE_UP, MISSED, RECHECK, RESTORE, SILENCE
from torchfleet.ps.server.replicas.replica_log import ReplicaLog
from torchfleet.ps.server.replicas.silence import Silence
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
    DESERTED = "deserted"  # all workers are lost, as the view says
    RESTORES = "restores"  # no replica has the state in memory any longer: this one has it in its log


class Follower:
    """Only the server's loop calls it. `connect(number)`: a channel to that replica, used only to send.

    An entry is confirmed when it arrives, and applied later. If _MOST_WAITING entries wait, they are applied before the
    next one is confirmed. A take-over applies all of them first. With a log, an entry is confirmed when the log has it.
    """

    def __init__(
        self,
        server: Server,
        own: Identity,
        coordinator: Coordinator,
        connect: Callable[[int], Channel],
        now: float,
        liveness: Liveness,
        log: ReplicaLog | None = None,
    ) -> None:
        self._log, self._begun, self._num_confirmed = log, now, 0
        self._met = ""  # name of the other replica's process, if it has asked this one for its state
        self.replay, self._liveness, self._silence = Replay(server), liveness, Silence(now)
        self._own, self._coordinator, self._connect = own, coordinator, connect
        self.view: View | None = None
        self._channel: Channel | None = None
        self._primary = ""  # name of the primary that sends the entries
        self.number = self._stamp = 0  # of the last message in order, and its latest stamp
        self._waiting: deque[Entry] = deque()  # received entries that are not applied yet
        self._told = 0  # the highest term in the primary's messages
        self._asked = now
        self._losses: list[LostBody] = []  # processes that have ended, as the launcher has reported
        self._claimed = 0  # the term in which it has asked to be primary, until the view has that term; 0: it has not
        self._has_won = False  # the view names it as primary; it takes over when the lease of the old one has ended
        self.is_in_view = self._is_primary_refused = False

    @property
    def term(self) -> int:
        return max(self._told, self.view.term if self.view else 0)

    def take(self, message: Message) -> list[Frame] | None:
        """Take an APPEND, and return the CONFIRM; None if it is not for this process, or is an entry that is not in the
        log yet: `confirmation` returns it later. An entry that is not the next one is ignored. Raises LogError if the
        entry is malformed, or an earlier one cannot be applied."""
        if message.client != self._own.incarnation or self._channel is None:
            return None  # meant for an earlier process at this address
        if self._has_won:
            return None  # a confirmation would extend the lease of the old primary
        self._silence.hear()
        self._stamp = max(self._stamp, message.sequence)
        self._told = max(self._told, message.term)
        self.is_in_view |= bool(message.flags & IN_VIEW)
        if message.call == self.number + 1:
            if len(self._waiting) >= _MOST_WAITING:
                self.catch_up()
            frames: list[Frame] = [array.data.reshape(-1) for array in message.arrays]
            self._waiting.append(decode_entry(frames))
            self.number += 1
            if self._log is not None:
                self._write(self._log, frames)
        if self._log is None:
            return confirm(self._own, message.term, self.number, self._stamp)
        if message.flags & IN_VIEW:
            self._log.note(message.term)
        return None if message.call else self._confirm(self._log, message.term, self._log.confirmed)

    @property
    def has_confirmation(self) -> bool:
        """Whether `confirmation` has something to confirm."""
        return self._log is not None and not self._has_won and self._log.confirmed > self._num_confirmed

    def confirmation(self) -> list[Frame] | None:
        """The CONFIRM of the messages that came into the log since the last CONFIRM; None if no message did."""
        if self._log is None or not self.has_confirmation:
            return None
        self._num_confirmed = self._log.confirmed
        return self._confirm(self._log, self._told, self._num_confirmed)

    def _confirm(self, log: ReplicaLog, term: int, number: int) -> list[Frame]:
        return confirm(self._own, term, number, self._stamp, STUCK if log.is_stuck else 0)

    def _write(self, log: ReplicaLog, frames: Sequence[Frame]) -> None:
        """Give the message with the number `number` to the log."""
        if self.number == 1:
            log.begin_backup()
        log.append(self.number, frames)
        if not log.has_copy:  # to learn at once which piece is the last
            self.catch_up()
            if self.replay.is_complete:
                log.end_copy()

    def work(self) -> bool:
        """Apply the next entry, if there is one. Returns whether more are left. Raises LogError."""
        if self._waiting:
            self.replay.apply(self._waiting.popleft())
        if self._log is not None and self._log.is_cut_due():
            self.catch_up()
            self._log.cut(self.replay, self.number)
            return True
        return bool(self._waiting)

    def rest(self) -> None:
        """No request waits: the log need not wait for more entries."""
        if self._log is not None:
            self._log.flush()

    def catch_up(self) -> None:
        """Apply all received entries. Raises LogError."""
        while self._waiting:
            self.replay.apply(self._waiting.popleft())

    def hear_of_loss(self, body: LostBody) -> None:
        """Take the launcher's report that a process has ended. It counts if that is the primary, once one is known."""
        self._losses.append(body)

    def meet(self, name: str) -> None:
        """The other replica's process has this name, and asks for the state, so it has no state itself."""
        self._met = name

    def tick(self, now: float) -> Fate:
        """Look for a primary, or check whether the primary is lost, and decide what to do next. Raises FleetError if no
        replica has the state any longer, and LogError if the log cannot be written."""
        if self._log is not None:
            self._log.check()
        self._silence.look(now)
        if self.number and not self._is_primary_lost and self._silence.seconds > MISSED:
            self._is_primary_refused = self._liveness.is_refused(replica_of(self._primary))
        with contextlib.suppress(CoordinatorUnreachable):  # the next tick asks again
            if not self.number:
                return self._look_for_primary(now)
            is_due = self._claimed and now - self._asked > RECHECK
            if is_due or self._is_silent or self.replay.server.is_stopping:
                return self._look_for_end(now)
        return Fate.WAITS

    @property
    def _is_primary_lost(self) -> bool:
        return self._is_primary_refused or self._is_lost(self._primary)

    @property
    def _is_silent(self) -> bool:
        """Whether the primary has ended, or its lease has."""
        return self._is_primary_lost or self._silence.exceeds(SILENCE)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _look_for_primary(self, now: float) -> Fate:
        if now - self._asked < BEAT:
            return Fate.WAITS
        self._asked = now
        view = self.view = self._coordinator.read(self._own.shard)
        if view is not None and view.primary == ENDED:
            return Fate.ENDS
        if self._may_restore(view, now):
            return Fate.RESTORES
        if view is not None and view.deserted and self._log is None:
            return Fate.DESERTED
        if view is not None:
            self._check_kept(view)
            self._ask(view)
        return Fate.WAITS

    def _check_kept(self, view: View) -> None:
        """Raise FleetError if no replica has the state any longer."""
        if replica_of(view.primary) == self._own.replica:
            is_nowhere = not view.backup or (self._log is None and self._is_lost(view.backup))
            if is_nowhere and not self._has_log:
                raise FleetError(_LOST_WITHOUT_BACKUP)
        elif self._log is None and self._is_lost(view.primary):
            raise FleetError(_LOST_WITH_PRIMARY)

    def _ask(self, view: View) -> None:
        """Ask the primary for its state, if it is the other replica and has not ended."""
        replica = replica_of(view.primary)
        if replica != 1 - self._own.replica or self._is_lost(view.primary):
            return  # or the name is not one that a replica has written
        if view.primary != self._primary:
            self.close()
            self._primary, self._channel = view.primary, self._connect(replica)
            self._is_primary_refused = False
        assert self._channel is not None
        self._channel.send(follow(self._own, view.term))

    @property
    def _has_log(self) -> bool:
        return self._log is not None and self._log.is_whole

    def _may_restore(self, view: View | None, now: float) -> bool:
        """Whether to go on from the log. The view must name an earlier process of this replica: its log then has every
        acknowledged change. If the view also names the other replica, that process must have ended, or must not act.
        Without a view, the terms of the logs decide."""
        if view is None:
            return self._log is not None and self._log.is_newest
        names = view.primary, view.backup
        if self._own.replica not in map(replica_of, names) or not self._has_log:
            return False
        is_primary = replica_of(view.primary) == self._own.replica
        other = view.backup if is_primary else view.primary
        patience = RESTORE if is_primary else 3 * RESTORE  # the primary's log goes first
        return not other or self._is_lost(other) or self._is_replaced(other) or now - self._begun > patience

    def _is_replaced(self, name: str) -> bool:
        """Whether another process, which has no state, has replaced the process of this name."""
        return bool(self._met) and self._met != name and replica_of(self._met) == replica_of(name)

    def _look_for_end(self, now: float) -> Fate:
        self._asked = now
        view = self.view = self._coordinator.read(self._own.shard)
        if view is None or view.is_last:
            return Fate.DESERTED if view is not None and view.deserted else Fate.ENDS
        if view.primary == self._own.name:  # it has taken over, and the coordinator's answer was lost
            self._has_won = True
            return Fate.TAKES_OVER if self._is_silent else Fate.WAITS
        if view.term >= self._claimed:
            self._claimed = 0
        if view.primary != self._primary:
            return Fate.DROPPED
        if view.backup == self._own.name:
            return self._take_over(view) if self._is_silent else Fate.WAITS
        if self._is_primary_lost:
            if self._log is None:
                raise FleetError(_LOST_WITH_PRIMARY)
            return Fate.DROPPED  # the primary is restored from its log, and fills a new backup
        is_late = self.is_in_view or self._silence.exceeds(GIVE_UP)
        return Fate.DROPPED if is_late else Fate.WAITS

    def _take_over(self, view: View) -> Fate:
        """Ask for the shard. Without an answer, or after a refusal, a later read of the view tells who has it."""
        self._claimed = view.term + 1
        if not self._coordinator.replace(self._own.shard, view, view.taken_over()):
            return Fate.WAITS
        self.view = view.taken_over()
        return Fate.TAKES_OVER

    def _is_lost(self, name: str) -> bool:
        return any(body.is_about(name) for body in self._losses)
