"""The replica that answers for its shard, either alone or with a backup that has every acknowledged change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.ps.coordination.view import RENEWAL, Coordinator, View
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import MAX_BODY, Message, unpack
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.replicas.backup_sink import BackupSink
from torchfleet.ps.server.replicas.between import IN_VIEW, STUCK, FollowBody, Identity, LostBody, replica_of, seconds
from torchfleet.ps.server.replicas.liveness import Liveness
from torchfleet.ps.server.replicas.pace import BEAT, GIVE_UP, LEASE, MISSED, PATIENCE
from torchfleet.ps.server.replicas.signs_of_life import SignsOfLife
from torchfleet.ps.server.replicas.silence import Silence

_WINDOW = 8  # pieces of the state are sent only while fewer messages than this are unconfirmed


class Primary:
    """Only the server's loop calls it. `connect(number)`: a channel to that replica."""

    def __init__(
        self,
        logged: LoggedServer,
        own: Identity,
        coordinator: Coordinator,
        connect: Callable[[int], Channel],
        view: View,
        now: float,
        liveness: Liveness,
    ) -> None:
        self.logged, self._own, self._coordinator, self._connect = logged, own, coordinator, connect
        self._sink: BackupSink | None = None
        self._liveness, self._silence = liveness, Silence(now)
        self._signs: SignsOfLife | None = None
        self._backup = ""  # name of the replica that the sink sends to
        self._session = 0  # incarnation of that replica
        self._mark: int | None = None  # number of the message that a new backup must confirm next in `_join`
        self._lease = self._beaten = now
        self._renewed = now
        self._suspected = now - BEAT  # when a client last made it read the view
        self._is_backup_lost = False
        self._is_unanswered = False  # it is unknown whether a change that this replica asked for was or will be made
        self._may_have_dropped = False  # one of those changes removes the backup from the view
        self.is_deposed = False
        self._say = logged.server.state.say
        self.view = view
        self._use(view)

    @property
    def has_backup(self) -> bool:
        """Whether the view names a backup, which has every acknowledged change and may take over."""
        return bool(self.view.backup)

    @property
    def _may_be_replaced(self) -> bool:
        return self.has_backup or self._is_unanswered

    def is_sure(self, now: float) -> bool:
        """Whether it is certain that no other replica has taken over by the time `now`, and that the backup, if there
        is one, may take over: a backup that the view may no longer name has every change, and still may not. If there
        is a log, it must have the term, too."""
        if self.is_deposed or self._may_have_dropped or not self.logged.is_noted:
            return False
        has_lease = now < self._lease or (self._signs is not None and now < self._signs.lease)
        return has_lease or not self._may_be_replaced

    def follow(self, message: Message, now: float) -> None:
        """Take a FOLLOW: begin to send state and entries to the replica. Ignored while there is a sink already."""
        body = unpack(message.arrays[0], FollowBody, MAX_BODY)
        if self._sink is not None or self.is_deposed or replica_of(body.name) in (-1, self._own.replica):
            return
        self._backup, self._session = body.name, message.client
        self._silence, self._mark, self._is_backup_lost = Silence(now), None, False
        number = replica_of(body.name)
        sink = BackupSink(self._connect(number), self._own, message.client, self.logged.index)
        self._sink, sink.term = sink, self.view.term
        if self._liveness.has_thread:
            self._signs = SignsOfLife(lambda: self._connect(number), sink.sign, self._own.shard, message.client, now)
        self.logged.add_sink(sink)
        sink.beat()
        self.logged.copy_to(sink.append_piece, lambda: sink.num_waiting < _WINDOW)
        self._say(f"replica {number} is being filled")

    def listen(self, now: float) -> None:
        """Handle all CONFIRM messages that have arrived. Does not block."""
        while self._sink is not None and (message := self._sink.hear()) is not None:
            if message.term > self.view.term:
                self.check_view()
            else:
                self.confirm(message, now)

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes."""
        return self.logged.wakes() + (self._sink.wakes() if self._sink is not None else ())

    def confirm(self, message: Message, now: float) -> None:
        """Take a CONFIRM of the backup: extend the lease, and drop the confirmed messages."""
        if self._sink is None or message.client != self._session:
            return
        self._silence.hear()
        self._lease = max(self._lease, seconds(message.sequence) + LEASE)
        self._sink.is_stuck = bool(message.flags & STUCK)
        self._sink.confirm(message.call)
        if not self.has_backup or self._is_unanswered:
            self._join()

    def hear_of_loss(self, body: LostBody) -> None:
        """Take the launcher's report that a process has ended. If it was the backup, the next tick goes on alone."""
        if body.is_about(self._backup):
            self._is_backup_lost, self._beaten = True, 0.0

    def tick(self, now: float) -> None:
        """Renew the job at the coordinator, send the backup a sign of life, and give up a backup that is silent."""
        self._silence.look(now)
        if self._signs is not None and self._signs.turn(now):
            self._silence.hear()
        if now - self._renewed > RENEWAL:
            self._renewed = now
            with contextlib.suppress(CoordinatorUnreachable):
                self._coordinator.renew()
        if self._sink is None or now - self._beaten < BEAT:
            return
        self._beaten = now
        if self._is_backup_gone(self._sink):
            self._go_on_alone(self._sink)
            return
        self._sink.beat()
        if not self.has_backup or self._is_unanswered:
            self._join()

    def _is_backup_gone(self, sink: BackupSink) -> bool:
        if not self._is_backup_lost and self._silence.seconds > MISSED:
            self._is_backup_lost = self._liveness.is_refused(replica_of(self._backup))
        is_lost = self._is_backup_lost or sink.is_hopeless
        return is_lost or self._silence.exceeds(PATIENCE if sink.is_counted else GIVE_UP)

    def suspect(self, now: float) -> None:
        """A client has seen a later term. Reads the view, at most every BEAT seconds: a client may make terms up."""
        if now - self._suspected >= BEAT:
            self._suspected = now
            self.check_view()

    def check_view(self) -> None:
        """Read the view again, because another replica may have changed it. If so, this one is deposed."""
        with contextlib.suppress(CoordinatorUnreachable):
            view = self._coordinator.read(self._own.shard)
            if view is None or view.primary != self._own.name:
                self.is_deposed = True
            elif view.term > self.view.term:  # this replica has changed it, and the coordinator's answer was lost
                self._use(view)

    def end(self, desertion: str = "") -> None:
        """Write into the view that the job is over, or which workers are lost, so that no replica takes over. Tried
        once."""
        last = self.view.left_by(desertion) if desertion else self.view.over()
        with contextlib.suppress(CoordinatorUnreachable):
            self._coordinator.replace(self._own.shard, self.view, last)

    def close(self, is_over: bool = False) -> None:
        """`is_over`: as in LoggedServer.close."""
        if self._signs is not None:
            self._signs.close(wait=True)
        self.logged.close(is_over)

    def begin_log(self, make: Callable[[], LoggedServer]) -> None:
        """Use the LoggedServer that `make` returns. Called before the first request, and without a backup."""
        assert self._sink is None
        self.logged.close()
        self.logged = make()
        self._use(self.view)

    def _use(self, view: View) -> None:
        # A change of the old view that is still on its way will fail, because it expects the old term.
        self.view, self._is_unanswered, self._may_have_dropped = view, False, False
        self.logged.lead(view.term)
        self.logged.server.term = view.term
        if self._sink is not None:
            self._sink.term, self._sink.flags = view.term, IN_VIEW if view.backup else 0

    def _join(self) -> None:
        """Name the backup in the view, once it has every acknowledged change. Also does so for a backup that answers
        again, if it is unknown whether the view still names it.

        When the backup has the whole state, replies begin to wait for it. When it also has every change that was made
        before that, the view names it.
        """
        sink = self._sink
        if sink is None or self.logged.is_copying:
            return
        if self._mark is None:
            self._mark = sink.last_number
        if sink.confirmed_number < self._mark:
            return
        if not sink.is_counted:
            self._mark, sink.is_counted = sink.last_number, True
        if sink.confirmed_number < self._mark:
            return
        if self._replace(self.view.joined_by(self._backup)):
            sink.beat()
            self._silence.forget()  # filling has held up its answers
            self._say(f"replica {replica_of(self._backup)} is the backup now (term {self.view.term})")

    def _go_on_alone(self, sink: BackupSink) -> None:
        if self._may_be_replaced:
            self._may_have_dropped = True
            if not self._replace(self.view.alone()):
                return
        self.logged.remove_sink(sink)
        self.logged.end_copy(sink.append_piece)
        sink.close()
        if self._signs is not None:
            self._signs.close()
        self._sink = self._signs = None
        self._say(f"replica {replica_of(self._backup)} is gone; this one goes on alone (term {self.view.term})")

    def _replace(self, view: View) -> bool:
        """Change the view, and return whether it is `view` now. If another replica has changed it, this one is deposed.
        If the coordinator does not answer, a later tick tries again."""
        self._is_unanswered = True
        with contextlib.suppress(CoordinatorUnreachable):
            if self._coordinator.replace(self._own.shard, self.view, view):
                self._use(view)
            else:
                self.check_view()
        return self.view == view
