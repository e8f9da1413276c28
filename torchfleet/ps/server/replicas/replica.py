"""One of the two replicas of a server: a follower or the primary. It stands between the transport and the Server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torchfleet.base.errors import FleetError, LogError, NotPrimary, PermissionRefused, WireError
from torchfleet.ps.coordination.view import Coordinator, View
from torchfleet.ps.net.replica_channels import Envelope, envelope_of
from torchfleet.ps.net.transport import Channel, Peer
from torchfleet.ps.net.wire import (
    ERROR,
    OK,
    Command,
    Frame,
    Message,
    Reply,
    Role,
    decode,
    encode_reply,
    error_arrays,
)
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.replicas.between import REQUESTS, Identity, LostBody, lost_process
from torchfleet.ps.server.replicas.claim import claim
from torchfleet.ps.server.replicas.follower import Fate, Follower
from torchfleet.ps.server.replicas.pace import BEAT, FAREWELL
from torchfleet.ps.server.replicas.primary import Primary
from torchfleet.ps.server.server import Server

Replies = list[tuple[Peer, list[Frame]]]
_NO_BACKUP = "it waits for its backup"


class Replica:
    """As Handler. `connect(number)`: a channel to that replica."""

    def __init__(
        self,
        server: Server,
        own: Identity,
        coordinator: Coordinator,
        connect: Callable[[int], Channel],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Become primary if this replica can claim the shard, else a follower (claim.py). If the coordinator does
        not answer, a later tick asks again, also before `begin`."""
        self._server, self._own, self._coordinator, self._connect = server, own, coordinator, connect
        self.refusals = server.refusals
        self._clock = clock
        self._took_over: float | None = None
        self._is_active = False
        self.is_over = False  # the job has ended while this replica was a follower
        self.deposed = ""  # why the state of this replica is outdated; empty if it is not
        server.shard = own.shard
        self._follower: Follower | None = None
        self._primary: Primary | None = None
        self._losses: list[LostBody] = []  # what the launcher has reported while this replica had no role
        self._asked = clock()
        self._find_role()

    @property
    def is_primary(self) -> bool:
        return self._primary is not None

    @property
    def has_role(self) -> bool:
        """Whether it is decided that this replica begins as primary, or as a follower."""
        return self._primary is not None or self._follower is not None

    @property
    def is_in_step(self) -> bool:
        """Whether this replica has every acknowledged change: a primary always, a follower once the view names it."""
        return not self.deposed and (self.is_primary or (self._follower is not None and self._follower.is_in_view))

    @property
    def is_stopping(self) -> bool:
        """Whether this process should end: the job is over, or the replica is deposed."""
        if self._primary is None or self.deposed:
            return self.is_over or bool(self.deposed)
        is_new = self._took_over is not None and self._clock() < self._took_over + FAREWELL
        return self._primary.logged.is_stopping and not is_new

    def begin(self) -> None:
        """Begin to serve or to follow. A replica that begins as primary refuses clients until it has a backup."""
        self._is_active = True
        self._wait_for_backup()

    def end(self) -> None:
        """Close all connections to the other replica. If the job is over, first write that into the view."""
        if self._primary is not None and self._primary.logged.is_stopping and not self.deposed:
            self._primary.end()
        for part in (self._primary, self._follower):
            if part is not None:
                part.close()

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> Replies:
        """As Handler.handle."""
        envelope = envelope_of(frames)
        if envelope is None:
            return self._server.handle(peer, frames, role)  # its reply names the error
        proved = envelope.role if role is None else role
        if envelope.command in (*REQUESTS, Command.LOST):
            return self._take(peer, frames, envelope, proved)
        primary = self._primary
        if primary is not None and envelope.term > primary.view.term:
            primary.check_view()
        if primary is None or self.deposed or not primary.is_sure(self._clock()) or envelope.term > primary.view.term:
            return [(peer, self._refusal(envelope, NotPrimary("this replica does not answer for its shard now")))]
        return primary.logged.handle(peer, frames, role)

    def ready(self) -> Replies:
        """As Handler.ready. Returns no reply while another replica may have taken over: after a pause of this process,
        values that it read before may be outdated."""
        primary = self._primary
        if primary is None or not self._is_active or self.deposed or not primary.is_sure(self._clock()):
            return []
        return primary.logged.ready()

    def tick(self, now: float) -> Replies:
        """As Handler.tick. May make a follower primary. Raises FleetError if the state of the shard is lost."""
        if not self.has_role and now - self._asked >= BEAT:
            self._asked = now
            self._find_role()
            self._wait_for_backup()
        if not self._is_active or self.deposed:
            return []
        if self._follower is not None:
            self._follow_fate(self._follower, now)
        if self._primary is None:
            return []
        self._primary.tick(now)
        if self._primary.has_backup and self._server.loading == _NO_BACKUP:
            self._server.loading = ""
        if self._primary.is_deposed:
            self._depose("another replica has taken over")
            return []
        return self._primary.logged.tick(now) if self._primary.is_sure(now) else []  # as in `ready`

    def work(self) -> bool | None:
        """As Handler.work."""
        if self.deposed:
            return None
        primary, now = self._primary, self._clock()
        if primary is not None:
            primary.listen(now)
            return primary.logged.work() if primary.is_sure(now) else None
        return self._apply_one() if self._follower is not None else None

    def rest(self) -> bool:
        """As Handler.rest."""
        return self._primary.logged.rest() if self._primary is not None else self._server.rest()

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes."""
        return self._primary.wakes() if self._primary is not None else ()

    @property
    def term(self) -> int:
        part = self._primary.view if self._primary is not None else self._follower
        return part.term if part is not None else 0

    def _find_role(self) -> None:
        beginning = claim(self._own, self._coordinator)
        if beginning is None:
            return
        if beginning.view is not None:
            self._primary = self._lead(LoggedServer(self._server, [], clock=self._clock), beginning.view)
            return
        self._follower = Follower(self._server, self._own, self._coordinator, self._connect, self._clock())
        for body in self._losses:
            self._follower.hear_of_loss(body)

    def _wait_for_backup(self) -> None:
        if self._is_active and self._primary is not None:
            self._server.loading = _NO_BACKUP

    def _lead(self, logged: LoggedServer, view: View) -> Primary:
        return Primary(logged, self._own, self._coordinator, self._connect, view, self._clock())

    def _take(self, peer: Peer, frames: Sequence[Frame], envelope: Envelope, role: int) -> Replies:
        """Handle FOLLOW or APPEND of the other replica, or LOST of the launcher. Returns the replies."""
        expected = Role.LAUNCHER if envelope.command == Command.LOST else Role.SERVER
        try:
            if role != expected:
                raise PermissionRefused(f"{Command(envelope.command).name} is for {expected.name.lower()}s")
            message = decode(frames)
            if message.shard != self._own.shard:
                raise WireError(f"expected shard {self._own.shard}, found {message.shard}: this is another server")
            if envelope.command == Command.LOST:
                return [(peer, self._hear_of_loss(envelope, lost_process(message)))]
            if self._is_active and not self.deposed:
                return self._take_in(peer, message)
        except LogError as error:
            self._diverged(error)
        except FleetError as error:
            return [(peer, self._refusal(envelope, error))]
        return []

    def _take_in(self, peer: Peer, message: Message) -> Replies:
        now, command, primary = self._clock(), message.command, self._primary
        if primary is None:
            is_entry = command == Command.APPEND and self._follower is not None
            confirmed = self._follower.take(message, now) if is_entry and self._follower is not None else None
            return [] if confirmed is None else [(peer, confirmed)]
        if message.term > primary.view.term:
            primary.check_view()
        elif command == Command.FOLLOW:
            primary.follow(message, now)
        return []  # an APPEND comes from a former primary, which will read the new view itself

    def _apply_one(self) -> bool | None:
        """As Handler.work, for a follower: apply one entry. Returns True if more are left."""
        assert self._follower is not None
        try:
            return self._follower.work() or None
        except LogError as error:
            self._diverged(error)
            return None

    def _diverged(self, error: LogError) -> None:
        self._depose(f"the entries of the primary do not fit what is here: {error}")

    def _hear_of_loss(self, envelope: Envelope, body: LostBody) -> list[Frame]:
        if not self.has_role:
            self._losses.append(body)
        for part in (self._primary, self._follower):
            if part is not None:
                part.hear_of_loss(body)
        return encode_reply(self._reply(envelope, OK))

    def _follow_fate(self, follower: Follower, now: float) -> None:
        fate = follower.tick(now)
        if fate is Fate.TAKES_OVER:
            assert follower.view is not None
            follower.catch_up()
            follower.replay.finish()
            replay = follower.replay
            logged = LoggedServer(self._server, [], replay.index, follower.view.term, replay.time, self._clock)
            self._primary, self._follower, self._took_over = self._lead(logged, follower.view), None, now
            follower.close()
            self._server.state.say(f"takes over as primary (term {self.term}), at entry {replay.index:,}")
        elif fate is Fate.DROPPED:
            self._depose("the primary goes on without this backup")
        self.is_over |= fate is Fate.ENDS

    def _depose(self, why: str) -> None:
        self.deposed = f"{why}: this process ends, and starts again as a backup"
        self._server.state.say(self.deposed)

    def _refusal(self, envelope: Envelope, error: FleetError) -> list[Frame]:
        reply = self._reply(envelope, ERROR)
        reply.arrays = error_arrays(type(error).__name__, str(error))
        return encode_reply(reply)

    def _reply(self, envelope: Envelope, status: int) -> Reply:
        return Reply(envelope.command, status, envelope.worker, self._server.incarnation, envelope.call, term=self.term)
