"""A server without its socket: it decodes a request's frames, runs the command, and encodes the reply."""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable, Sequence

from torchfleet.base.errors import FleetError, PermissionRefused, ServerBusy, WireError
from torchfleet.base.monitor.notices import tell
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.transport import Peer
from torchfleet.ps.net.unread import size_of
from torchfleet.ps.net.wire import (
    ERROR,
    OK,
    Command,
    Frame,
    Message,
    Reply,
    Role,
    call_of,
    decode,
    encode_reply,
    error_arrays,
)
from torchfleet.ps.server.commands import COMMANDS, CommandHandler
from torchfleet.ps.server.layers import Answer, Layer, Loading, Recorder, Result, Run, composed
from torchfleet.ps.server.long_work import shrink_in_slices
from torchfleet.ps.server.meeting.meetings import Meetings
from torchfleet.ps.server.meeting.members import Members
from torchfleet.ps.server.refusals import Refusals, name_of
from torchfleet.ps.server.saves.save_roots import roots_of
from torchfleet.ps.server.server_tracing import TracedRequests
from torchfleet.ps.server.state.saves import Saves
from torchfleet.ps.server.state.sessions import Outcome
from torchfleet.ps.server.state.state import State
from torchfleet.ps.server.waiting import end_hopeless_waits
from torchfleet.ps.tables.rows import memory

MAX_TEXT = 2000
ORPHAN_TIMEOUT = 1800.0


class Server:
    """The state machine behind a transport: requests in, replies out, no sockets, no threads.

    Listener.serve → handle → decode → layers → COMMANDS[…] → table → encode
    """

    def __init__(
        self,
        max_table_bytes: int | None = None,
        num_workers: int = 0,
        save_roots: Sequence[str] | None = None,
        orphan_timeout: float | None = None,
        min_workers: int = 0,
        on_worker_loss: str = "end",
    ) -> None:
        """`max_table_bytes`: None for FLEET_MAX_TABLE_BYTES, or all memory that this process may use. `save_roots`:
        None for FLEET_SAVE_ROOTS. `orphan_timeout`: the server stops after this many seconds without a sign of life of
        any worker; 0: never; None: half an hour if `num_workers` is given, else never. `min_workers`,
        `on_worker_loss`: as in Members."""
        limit = memory.max_table_bytes() if max_table_bytes is None else max_table_bytes
        meetings = Meetings(Members(num_workers, min_workers, on_worker_loss))
        self.state = State(limit, num_workers, meetings=meetings, saves=Saves(roots_of(save_roots)))
        default = ORPHAN_TIMEOUT if num_workers else 0.0
        self._orphan_timeout = default if orphan_timeout is None else orphan_timeout
        self._is_pulls_turn = False  # long pulls and work over whole tables take turns
        self.desertion = ""  # which workers are lost, if the server stops because of them
        # Identifies this server in every reply. A server that is restored from its log keeps the number.
        self.incarnation = secrets.randbits(63) | 1
        self.shard = self.term = 0  # of a server with replicas: its shard, and the term of its view
        self.refusals = Refusals(self, self.state.counters)
        self.traced = TracedRequests()
        self._is_traced = False
        self._loading = ""
        self.take_tables: Callable[[Request], None] | None = None  # takes TABLES, on a server that waits for its tables
        self._recorder: Recorder | None = None
        self._read_only: Layer | None = None
        self._run: Run = self._execute
        self.state.work.pulls.switched = self._arrange

    @property
    def is_stopping(self) -> bool:
        return self.state.is_stopping

    @property
    def layers(self) -> list[Layer]:
        """The layers that a request passes before its command, the outermost first. layers.py describes them."""
        found: list[Layer] = []
        if self._is_traced:
            found.append(self.traced)
        if self._loading:
            found.append(Loading(self._loading, self.take_tables))
        if self._read_only is not None:
            found.append(self._read_only)
        if self.state.work.pulls.lines:
            found.append(self.state.work.pulls)
        if self._recorder is not None:
            found.append(self._recorder)
        return found

    def _arrange(self) -> None:
        """Compose the layers again. Called when a layer was added or removed."""
        self._run = composed(self.layers, self._execute)

    @property
    def loading(self) -> str:
        """What the server does before it serves, or "". While this is set, no request reaches the tables."""
        return self._loading

    @loading.setter
    def loading(self, what: str) -> None:
        self._loading = what
        self._arrange()

    def record(self, recorder: Recorder | None) -> None:
        """Pass every change through `recorder` from now on; None: through no recorder."""
        self._recorder = recorder
        self._arrange()

    def refuse_changes(self, read_only: Layer) -> None:
        """Pass every request through `read_only`, which refuses those that would change something."""
        self._read_only = read_only
        self._arrange()

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> list[tuple[Peer, list[Frame]]]:
        """As Handler.handle: serve one request, and return all replies that are ready, also to earlier requests."""
        counters = self.state.counters
        counters.num_requests += 1
        counters.bytes_in += size_of(frames)
        try:
            message = decode(frames)
            if message.shard != self.shard or message.term > self.term:
                raise self._misled(message)
        except WireError as error:
            broken = Request(Message(Command.PING, call=call_of(frames)), peer)
            self.state.finish(broken, error)
            return self.ready()
        counters.num_by_command[message.command if message.command in COMMANDS else 0] += 1
        proved = message.role if role is None else role
        request = Request(message, peer, self.state.now(), proved, frames=frames)
        if message.trace and not self._is_traced:
            self._is_traced = True
            self._arrange()
        self.answer(request)
        return self.ready()

    def _misled(self, message: Message) -> WireError:
        return WireError(
            f"expected shard {self.shard} and at most term {self.term}, found {message.shard} and {message.term}: "
            + ("this is another server" if self.term else "this server has no replicas")
        )

    def answer(self, request: Request) -> None:
        """Run the command of a request. Its answer is added to `state.finished`, now or later."""
        try:
            self._check_role(request)
        except FleetError as error:  # not `finish`: a refused late copy must not settle the outcome of the change
            self.state.finished.append((request, _plain(error)))
            return
        self._finish(self._run, request)

    def repeat(self, request: Request) -> None:
        """Apply a request from a log entry, without checking its role again.

        Another server, or this one before its restart, has applied it in the same state. The answer is added to
        `state.finished`.
        """
        self._finish(self._execute, request)

    def _finish(self, run: Run, request: Request) -> None:
        result: Result
        try:
            result = run(request)
        except ServerBusy as error:
            self.refusals.note(f"{name_of(request.message)}: {error}")
            result = _plain(error)
        except FleetError as error:
            result = _plain(error)
        except Exception as error:  # a bug in one command must not stop the server
            tell(traceback.format_exc())
            result = FleetError(f"internal error of the server: {type(error).__name__}: {error}")
        if result is not None:
            self.state.finish(request, result)

    def _execute(self, request: Request) -> Result:
        """Run the command. A change is applied once, however often the client repeats the request."""
        command = COMMANDS[request.message.command]
        if command.once or (command.again is not None and request.message.sequence):
            return self._run_once(command, request)
        return command.run(self.state, request)

    def _run_once(self, command: CommandHandler, request: Request) -> Result:
        message = request.message
        if message.sequence < 1:
            raise WireError(f"command {message.command} changes things and needs a sequence number")
        sessions = self.state.sessions
        is_waiting = sessions.is_running(message.client, message.sequence)
        before = sessions.begin(
            message.client, message.sequence, message.floor, request.arrived, message.worker, message.incarnation
        )
        if before is Outcome.APPLIED:
            return command.again(self.state, request) if command.again is not None else []
        if before is not Outcome.RUNNING:
            return before
        try:
            return command.run(self.state, request)  # also if the first copy waits: the repeat then gets the reply
        except ServerBusy:
            if not is_waiting:
                sessions.retract(message.client, message.sequence)
            raise

    def _check_role(self, request: Request) -> None:
        """Raise FleetError if the command is unknown, or the sender may not use it."""
        message, role = request.message, request.role
        command = COMMANDS.get(message.command)
        if command is None:
            raise WireError(f"unknown command {message.command}; known are {[known.name for known in Command]}")
        if role not in command.roles:
            allowed = ", ".join(sorted(known.name.lower() for known in command.roles))
            name = Role(role).name.lower() if role in tuple(Role) else f"role {role}"
            raise PermissionRefused(f"{Command(message.command).name} is for {allowed}; this is a {name}")
        if role != Role.LAUNCHER and (command.as_worker or message.flags & command.as_worker_flags):
            self.state.meetings.members.check(message.worker, message.incarnation)
            self.state.meetings.presence.check(message.worker, message.incarnation)

    def ready(self) -> list[tuple[Peer, list[Frame]]]:
        """As Handler.ready."""
        if not self.state.finished:
            return []
        finished, self.state.finished = self.state.finished, []
        replies = []
        for request, result in finished:
            frames = self._encoded(request, result)
            self.state.counters.bytes_out += size_of(frames)
            replies.append((request.peer, frames))
        return replies

    def _encoded(self, request: Request, result: Answer | FleetError) -> list[Frame]:
        message = request.message
        reply = Reply(message.command, OK, message.worker, self.incarnation, message.call, term=self.term)
        if isinstance(result, FleetError):
            self.state.counters.num_errors += 1
            reply.status, reply.arrays = ERROR, error_arrays(type(result).__name__, str(result))
        else:
            reply.arrays = result
        if request.taken:
            reply.taken, reply.answered = request.taken, self.traced.answered(request)
        try:
            return encode_reply(reply)
        except WireError as error:  # the reply is too large for a message, which must not stop the server
            self.state.counters.num_errors += 1
            reply.status, reply.arrays = ERROR, error_arrays(type(error).__name__, str(error))
            return encode_reply(reply)

    def tick(self, now: float) -> list[tuple[Peer, list[Frame]]]:
        """As Handler.tick."""
        if self._loading:
            return self.ready()
        pause = self.state.meetings.presence.pause(now)
        if self._recorder is None:
            self.advance(now, pause)
            self._look_for_workers(now)
        elif self._recorder.advance(now, pause, self.advance):
            self._look_for_workers(now)
        self.state.budgets.forget_idle(now)
        if self.state.subscriptions.expire(now):
            self.state.watch_tables()
        return self.ready()

    def advance(self, now: float, pause: float) -> bool:
        """Set the time to `now`: end waits, expire leases, begin shrinks that are due.

        `pause`: seconds for which the server itself stood still; no worker's silence counts them. Returns whether
        anything changed that must be logged.
        """
        state = self.state
        state.meetings.presence.forgive(pause, now)
        is_changed = end_hopeless_waits(state, now)
        is_changed |= state.meetings.files.expire(now)
        if not state.clock.is_set and state.work.schedule.is_news(state.tables.values(), state.clock.now):
            is_changed = True
            due = state.work.schedule.note(state.tables.values(), state.clock.now)
            if due:
                state.work.slices.append(shrink_in_slices(state, None, [(table, table.spec.shrink) for table in due]))
        return is_changed or bool(pause)

    def _look_for_workers(self, now: float) -> None:
        state, members, presence = self.state, self.state.meetings.members, self.state.meetings.presence
        for text in presence.news(now):
            if text not in members.lost.values():  # the log already has these
                tell(f"torchfleet server: {text}")
        if state.num_workers and self._is_deserted(now):
            lost = "; ".join(presence.lost(now).values())
            if members.go_on and members.left:
                state.say(f"{lost}; the others have finished without it")
            else:
                self.desertion = lost
            state.is_stopping = True
        elif presence.is_orphaned(self._orphan_timeout, now):
            self.desertion = f"no worker has been heard of for {self._orphan_timeout:g} s (orphan_timeout)"
            state.is_stopping = True

    def _is_deserted(self, now: float) -> bool:
        members = self.state.meetings.members
        num_awaited = 0 if members.is_elastic else self.state.num_workers
        is_soon = members.go_on and bool(members.left)
        return self.state.meetings.presence.is_deserted(len(members.left), num_awaited, now, is_soon)

    def work(self) -> bool | None:
        """As Handler.work. Slices of long pulls and of work over whole tables alternate."""
        work = self.state.work
        self._is_pulls_turn = not self._is_pulls_turn or not work.slices
        if work.pulls.lines and self._is_pulls_turn:
            for request in work.pulls.work():
                self.answer(request)
            return True
        if not work.slices:
            return None
        return self._slice() if self._recorder is None else self._recorder.work(self._slice)

    def _slice(self) -> bool:
        slices = self.state.work.slices
        try:
            return next(slices[0])
        except StopIteration:
            slices.popleft()
            return True

    def rest(self) -> bool:
        """As Handler.rest: one table does a slice of the work that it has postponed."""
        return any(table.settle() for table in self.state.tables.values())

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes. Empty: only requests and passing time cause work in this class."""
        return ()


def _plain(error: FleetError) -> FleetError:
    """A copy of the error to keep: of bounded length, and without a traceback that would keep the arrays alive."""
    return type(error)(str(error)[:MAX_TEXT])
