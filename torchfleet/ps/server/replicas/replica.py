"""One of the two replicas of a server: a follower or the primary. It stands between the transport and the Server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from torchfleet.base.errors import FleetError, LogError, NotPrimary, PermissionRefused, WireError
from torchfleet.ps.coordination.view import Coordinator, View
from torchfleet.ps.net.replica_channels import Envelope, envelope_of
from torchfleet.ps.net.transport import Channel, Peer
from torchfleet.ps.net.wire import (
    ERROR,
    MAX_BODY,
    OK,
    Command,
    Frame,
    Message,
    Reply,
    Role,
    decode,
    encode_reply,
    error_arrays,
    unpack,
)
from torchfleet.ps.server.log.durable_server import Durability
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.replicas.between import (
    FollowBody,
    Identity,
    LostBody,
    is_for_primary,
    is_of_replicas,
    lost_process,
)
from torchfleet.ps.server.replicas.claim import claim
from torchfleet.ps.server.replicas.follower import Fate, Follower
from torchfleet.ps.server.replicas.liveness import Liveness
from torchfleet.ps.server.replicas.pace import BEAT, FAREWELL, NO_BACKUP
from torchfleet.ps.server.replicas.primary import Primary
from torchfleet.ps.server.replicas.replica_log import ReplicaLog
from torchfleet.ps.server.replicas.restoration import Restoration
from torchfleet.ps.server.server import Server

Replies = list[tuple[Peer, list[Frame]]]


class Replica:
    """As Handler. `connect(number)`: a channel to that replica."""

    def __init__(
        self,
        server: Server,
        own: Identity,
        coordinator: Coordinator,
        connect: Callable[[int], Channel],
        clock: Callable[[], float] = time.monotonic,
        liveness: Liveness | None = None,
        waits_for_backup: bool = True,
        durability: Durability | None = None,
    ) -> None:
        """Become primary if this replica can claim the shard, else a follower (claim.py). If the coordinator does
        not answer, a later tick asks again, also before `begin`. `waits_for_backup`: the first primary lets workers in
        when it has a backup. `durability`: settings of the log; None: no log."""
        self._server, self._own, self._coordinator, self._connect = server, own, coordinator, connect
        self.refusals = server.refusals
        self._clock, self._liveness = clock, liveness or Liveness()
        self._waits_for_backup = waits_for_backup
        self._took_over: float | None = None
        self._is_active = False
        self.is_over = False  # the job has ended while this replica was a follower
        self.deposed = ""  # why the state of this replica is outdated; empty if it is not
        server.shard = own.shard
        self._follower: Follower | None = None
        self._primary: Primary | None = None
        self._losses: list[LostBody] = []  # what the launcher has reported while this replica had no role
        self._log = None if durability is None else ReplicaLog(durability, own.replica, clock)
        self._restored: Restoration | None = None  # until it is primary
        self._filler: Peer | None = None  # the connection over which entries come
        self._asked = clock()
        self._find_role()

    @property
    def is_primary(self) -> bool:
        return self._primary is not None

    @property
    def has_role(self) -> bool:
        """Whether it is decided that this replica begins as primary, or as a follower."""
        return any(part is not None for part in (self._primary, self._follower, self._restored))

    @property
    def is_in_step(self) -> bool:
        """Whether this replica has every acknowledged change: a primary always, a follower once the view names it."""
        return not self.deposed and (self.is_primary or (self._follower is not None and self._follower.is_in_view))

    @property
    def is_stopping(self) -> bool:
        """Whether this process should end: the job is over, or the replica is deposed."""
        if self._primary is None or self.deposed:
            return self.is_over or bool(self.deposed or self._server.desertion)
        is_new = self._took_over is not None and self._clock() < self._took_over + FAREWELL
        return self._primary.logged.is_stopping and not is_new

    def begin(self) -> None:
        """Begin to serve or to follow. A replica that begins as primary refuses clients until it has a backup. Its log
        begins with what the server has now. Raises LogError."""
        self._begin_log()
        self._is_active = True
        self._wait_for_backup()

    def end(self, keeps_log: bool = False) -> None:
        """Close all connections to the other replica. If the job is over, first write that into the view, and remove
        the log; if all workers are lost, write which, and keep the log. `keeps_log`: a primary keeps its log, because
        it was told to end."""
        is_over, desertion = self._is_job_over, self._server.desertion
        if self._primary is not None:
            if is_over or (desertion and not self.deposed):
                self._primary.end(desertion)
            self._primary.close(is_over and not keeps_log)
        if self._restored is not None:
            self._restored.logged.close()
        if self._follower is not None:
            self._follower.close()
        if self._log is not None:
            self._log.close(is_over and self._primary is None)

    @property
    def _is_job_over(self) -> bool:
        """Whether all workers have left, as far as this replica knows. A follower may be told to end at that time."""
        if self._server.desertion:
            return False
        if self._primary is not None:
            return self._primary.logged.is_stopping and not self.deposed
        if self._follower is None or self.deposed:
            return False
        with contextlib.suppress(LogError):
            self._follower.catch_up()
        return self.is_over or (self._follower.is_in_view and self._server.is_stopping)

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> Replies:
        """As Handler.handle."""
        primary = self._primary
        if (
            primary is not None
            and not self.deposed
            and is_for_primary(frames, primary.view.term)
            and primary.is_sure(self._clock())
        ):  # most requests; the server looks at the rest of the header
            return primary.logged.handle(peer, frames, role)
        envelope = envelope_of(frames)
        if envelope is None:
            return self._server.handle(peer, frames, role)  # its reply names the error
        proved = envelope.role if role is None else role
        if is_of_replicas(envelope.command):
            return self._take(peer, frames, envelope, proved)
        if primary is not None and envelope.term > primary.view.term:
            primary.suspect(self._clock())
        return [(peer, self._refusal(envelope, NotPrimary("this replica does not answer for its shard now")))]

    def ready(self) -> Replies:
        """As Handler.ready. Returns no reply while another replica may have taken over: after a pause of this process,
        values that it read before may be outdated."""
        primary = self._primary
        if self._follower is not None:
            return self._confirmations(self._follower)
        if primary is None or not self._is_active or self.deposed or not primary.is_sure(self._clock()):
            return []
        return primary.logged.ready()

    def tick(self, now: float) -> Replies:
        """As Handler.tick. May make a follower primary. Raises FleetError if the state of the shard is lost, and
        LogError if the log cannot be written any longer."""
        if not self.has_role and now - self._asked >= BEAT:
            self._asked = now
            self._find_role()
            if self._is_active:
                self._begin_log()
            self._wait_for_backup()
        if not self._is_active or self.deposed:
            return []
        if self._follower is not None:
            self._follow_fate(self._follower, now)
        if self._follower is not None:
            return self._confirmations(self._follower)
        if self._restored is not None:
            self._restored.logged.check()
            self._ask_for_shard(self._restored)
        if self._primary is None:
            return []
        self._primary.logged.check()  # also while it answers nothing: another replica can take over once it has ended
        self._primary.tick(now)
        self._server.state.has_backup = self._primary.has_backup
        if self._primary.has_backup and self._server.loading == NO_BACKUP:
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
        if self._follower is not None:
            self._follower.rest()
        return self._primary.logged.rest() if self._primary is not None else self._server.rest()

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes."""
        if self._primary is not None:
            return self._primary.wakes()
        return () if self._log is None else self._log.wakes()

    @property
    def term(self) -> int:
        part = self._primary.view if self._primary is not None else self._follower
        return part.term if part is not None else 0

    def _find_role(self) -> None:
        has_log = self._log is not None and self._log.is_any_in_step
        if self._log is not None and not has_log:
            self._log.make_folder()
        beginning = claim(self._own, self._coordinator, has_log)
        if beginning is None:
            return
        if beginning.view is not None:
            self._primary = self._lead(LoggedServer(self._server, [], clock=self._clock), beginning.view)
            return
        now = self._clock()
        self._follower = Follower(
            self._server, self._own, self._coordinator, self._connect, now, self._liveness, self._log
        )
        for body in self._losses:
            self._follower.hear_of_loss(body)

    def _begin_log(self) -> None:
        log, primary = self._log, self._primary
        if log is not None and primary is not None:
            primary.begin_log(lambda: log.begin_primary(self._server, primary.view.term))

    def _wait_for_backup(self, is_new: bool = True) -> None:
        """`is_new`: the job begins now. In a job that has begun, workers go on without a backup."""
        if self._is_active and self._primary is not None:
            self._server.state.has_backup = False
            self._server.loading = NO_BACKUP if self._waits_for_backup and is_new else ""

    def _lead(self, logged: LoggedServer, view: View) -> Primary:
        now = self._clock()
        return Primary(logged, self._own, self._coordinator, self._connect, view, now, self._liveness)

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
            return [] if self._follower is None else self._tell_follower(self._follower, peer, message)
        if message.term > primary.view.term:
            primary.check_view()
        elif command == Command.FOLLOW:
            primary.follow(message, now)
        return []  # an APPEND comes from a former primary, which will read the new view itself

    def _tell_follower(self, follower: Follower, peer: Peer, message: Message) -> Replies:
        if message.command == Command.FOLLOW:
            follower.meet(unpack(message.arrays[0], FollowBody, MAX_BODY).name)
            return []
        if message.call:
            self._filler = peer
        confirmed = follower.take(message)
        return [] if confirmed is None else [(peer, confirmed)]

    def _confirmations(self, follower: Follower) -> Replies:
        confirmed = follower.confirmation()
        return [] if confirmed is None or self._filler is None else [(self._filler, confirmed)]

    def _apply_one(self) -> bool | None:
        """As Handler.work, for a follower: apply one entry. Returns True if more are left, or `ready` has replies."""
        assert self._follower is not None
        if self._log is not None:
            self._log.hear()
        try:
            return self._follower.work() or self._follower.has_confirmation or None
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
            logged = self._logged_after(follower, follower.view.term)
            self._primary, self._follower, self._took_over = self._lead(logged, follower.view), None, now
            follower.close()
            self._server.state.say(f"takes over as primary (term {self.term}), at entry {replay.index:,}")
        elif fate is Fate.RESTORES:
            assert self._log is not None
            self._restore(self._log, follower)
        elif fate is Fate.DROPPED:
            self._depose("the primary goes on without this backup")
        elif fate is Fate.DESERTED:
            assert follower.view is not None
            self._server.desertion = follower.view.deserted
        self.is_over |= fate is Fate.ENDS

    def _logged_after(self, follower: Follower, term: int) -> LoggedServer:
        replay = follower.replay
        if self._log is not None:
            return self._log.take_over(self._server, replay, follower.number)
        return LoggedServer(self._server, [], replay.index, term, replay.time, self._clock)

    def _restore(self, log: ReplicaLog, follower: Follower) -> None:
        """Restore the server from the log, and then ask for the shard."""
        self._restored = Restoration(log.restore(self._server), follower.view)
        follower.close()
        self._follower = None

    def _ask_for_shard(self, restored: Restoration) -> None:
        view = restored.ask(self._own, self._coordinator)
        if restored.is_late:
            self._depose("another replica has taken over")
        elif view is not None:
            self._primary, self._restored, self._took_over = self._lead(restored.logged, view), None, self._clock()
            self._wait_for_backup(restored.is_new_run)
            self._server.state.say(f"is primary (term {view.term}), restored from its log")

    def _depose(self, why: str) -> None:
        self.deposed = f"{why}: this process ends, and starts again as a backup"
        self._server.state.say(self.deposed)

    def _refusal(self, envelope: Envelope, error: FleetError) -> list[Frame]:
        reply = self._reply(envelope, ERROR)
        reply.arrays = error_arrays(type(error).__name__, str(error))
        return encode_reply(reply)

    def _reply(self, envelope: Envelope, status: int) -> Reply:
        return Reply(envelope.command, status, envelope.worker, self._server.incarnation, envelope.call, term=self.term)
