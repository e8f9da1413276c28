"""The replica that answers for its shard, alone or with a backup that has every acknowledged change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.ps.coordination.view import RENEWAL, Coordinator, View
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import MAX_BODY, Message, unpack
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.replicas.backup_sink import BackupSink
from torchfleet.ps.server.replicas.between import IN_VIEW, FollowBody, Identity, LostBody, replica_of, seconds
from torchfleet.ps.server.replicas.pace import BEAT, GIVE_UP, LEASE, OWN_PAUSE, PATIENCE

_WINDOW = 8  # pieces of the state on their way to a new backup


class Primary:
    """Belongs to the server's loop. `connect`: a channel to the replica of this number."""

    def __init__(
        self,
        logged: LoggedServer,
        own: Identity,
        coordinator: Coordinator,
        connect: Callable[[int], Channel],
        view: View,
        now: float,
    ) -> None:
        self.logged, self._own, self._coordinator, self._connect = logged, own, coordinator, connect
        self._sink: BackupSink | None = None
        self._backup = ""  # name of the replica that the sink leads to
        self._session = 0  # and its incarnation
        self._mark: int | None = None  # a message to the new backup on which the next step to its being one waits
        self._heard = self._lease = self._looked = self._beaten = now
        self._renewed = now
        self._is_backup_lost = False
        self._may_be_named = False  # the new backup, in a view that was asked for without an answer
        self.is_deposed = False
        self._say = logged.server.state.say
        self.view = view
        self._use(view)

    @property
    def has_backup(self) -> bool:
        """Whether another replica is known to be able to take over at any moment, and has all."""
        return bool(self.view.backup)

    @property
    def _may_be_replaced(self) -> bool:
        return self.has_backup or self._may_be_named

    def is_sure(self, now: float) -> bool:
        """Whether no other replica can have taken over by now."""
        return not self.is_deposed and (not self._may_be_replaced or now < self._lease)

    def follow(self, message: Message, now: float) -> None:
        """A replica asks to be filled. The one that is there stays until it is given up."""
        body = unpack(message.arrays[0], FollowBody, MAX_BODY)
        if self._sink is not None or self.is_deposed or replica_of(body.name) in (-1, self._own.replica):
            return
        self._backup, self._session = body.name, message.client
        self._heard, self._mark, self._is_backup_lost = now, None, False
        sink = BackupSink(self._connect(replica_of(body.name)), self._own, message.client, self.logged.index)
        self._sink, sink.term = sink, self.view.term
        self.logged.add_sink(sink)
        sink.beat()
        self.logged.copy_to(sink.append, lambda: sink.num_waiting < _WINDOW)
        self._say(f"replica {replica_of(body.name)} is being filled")

    def listen(self, now: float) -> None:
        """Take in what the backup has confirmed."""
        while self._sink is not None and (message := self._sink.hear()) is not None:
            if message.term > self.view.term:
                self.check_view()
            else:
                self.confirm(message, now)

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes."""
        return self.logged.wakes() + (self._sink.wakes() if self._sink is not None else ())

    def confirm(self, message: Message, now: float) -> None:
        """The backup has all up to a number."""
        if self._sink is None or message.client != self._session:
            return
        self._heard = now
        self._lease = max(self._lease, seconds(message.sequence) + LEASE)
        self._sink.confirm(message.call)
        if not self.has_backup:
            self._join()

    def hear_of_loss(self, body: LostBody) -> None:
        """The launcher says that a process has ended."""
        if body.is_about(self._backup):
            self._is_backup_lost, self._beaten = True, 0.0

    def tick(self, now: float) -> None:
        """Signs of life; a backup that is silent is given up."""
        if now - self._looked > OWN_PAUSE:
            self._heard = now  # this process stood still; the backup may not have been silent
        self._looked = now
        if now - self._renewed > RENEWAL:
            self._renewed = now
            with contextlib.suppress(CoordinatorUnreachable):
                self._coordinator.renew()
        if self._sink is None or now - self._beaten < BEAT:
            return
        self._beaten = now
        if self._is_backup_lost or now - self._heard > (PATIENCE if self._sink.is_counted else GIVE_UP):
            self._go_on_alone(self._sink)
            return
        self._sink.beat()
        if not self.has_backup:
            self._join()

    def check_view(self) -> None:
        """Read the view again, because a message had a later term."""
        with contextlib.suppress(CoordinatorUnreachable):
            view = self._coordinator.read(self._own.shard)
            if view is None or view.primary != self._own.name:
                self.is_deposed = True
            elif view != self.view:  # changed by this one, and the answer was lost
                self._use(view)

    def end(self) -> None:
        """End the job in the view, so that no replica takes over."""
        with contextlib.suppress(CoordinatorUnreachable):
            self._coordinator.replace(self._own.shard, self.view, self.view.over())

    def close(self) -> None:
        self.logged.close()

    def _use(self, view: View) -> None:
        self.view, self._may_be_named = (
            view,
            False,
        )  # a request for another view that is still on its way comes too late
        self.logged.term = self.logged.server.term = view.term
        if self._sink is not None:
            self._sink.term, self._sink.flags = view.term, IN_VIEW if view.backup else 0

    def _join(self) -> None:
        """Name the new backup in the view, once it has every acknowledged change.

        When it has the whole state, replies begin to wait for it. When it also has every change that was acknowledged
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
        self._may_be_named = True
        if self._replace(self.view.joined_by(self._backup)):
            sink.beat()
            self._say(f"replica {replica_of(self._backup)} is the backup now (term {self.view.term})")

    def _go_on_alone(self, sink: BackupSink) -> None:
        if self._may_be_replaced and not self._replace(self.view.alone()):
            return
        self.logged.remove_sink(sink)
        self.logged.end_copy(sink.append)
        sink.close()
        self._sink = None
        self._say(f"replica {replica_of(self._backup)} is gone; this one goes on alone (term {self.view.term})")

    def _replace(self, view: View) -> bool:
        """Change the view. If another replica has changed it, this one is deposed. If the outcome is unknown, it is
        tried again."""
        with contextlib.suppress(CoordinatorUnreachable):
            if self._coordinator.replace(self._own.shard, self.view, view):
                self._use(view)
            else:
                self.check_view()
        return self.view == view
