"""A server without its socket: from the frames of a request to the command that it names, and back."""

from __future__ import annotations

import contextlib
import secrets
import traceback
from collections.abc import Callable, Sequence

from torchfleet.base.errors import FleetError, PermissionRefused, ServerBusy, ServerLoading, WireError
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
    decode_reply,
    encode_reply,
    error_arrays,
    pack,
)
from torchfleet.ps.server.change_recorder import Recorder, Unrecorded
from torchfleet.ps.server.commands import COMMANDS, CommandHandler
from torchfleet.ps.server.long_work import shrink_in_slices
from torchfleet.ps.server.meeting.members import Members
from torchfleet.ps.server.save_roots import roots_of
from torchfleet.ps.server.state.sessions import Outcome
from torchfleet.ps.server.state.state import Answer, State
from torchfleet.ps.server.traced_requests import TracedRequests
from torchfleet.ps.server.waiting import end_hopeless_waits
from torchfleet.ps.tables.rows import memory

MAX_TEXT = 2000
ORPHAN_TIMEOUT = 1800.0
_KNOWN = frozenset(Command)


class Server:
    """The state machine behind a transport: requests in, replies out, no sockets, no threads."""

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
        None for FLEET_SAVE_ROOTS. `orphan_timeout`: seconds after the last sign of any worker when the server ends; 0:
        it waits on; None: half an hour if it was told the number of workers. `min_workers`, `on_worker_loss`: as
        Members has them."""
        limit = memory.max_table_bytes() if max_table_bytes is None else max_table_bytes
        members = Members(num_workers, min_workers, on_worker_loss)
        self.state = State(limit, roots_of(save_roots), num_workers, members=members)
        default = ORPHAN_TIMEOUT if num_workers else 0.0
        self._orphan_timeout = default if orphan_timeout is None else orphan_timeout
        self.loading = ""  # what it does before it serves; while that is set, no request reaches the tables
        self._is_pulls_turn = False  # long pulls and work over whole tables take turns
        self.desertion = ""  # which workers went without leaving, if that is why it stops
        self.incarnation = (
            secrets.randbits(63) | 1
        )  # of this server, in every reply; one that goes on from a log keeps it
        self.recorder: Recorder = Unrecorded()
        self.traced = TracedRequests()
        self.shard = self.term = 0  # a server with replicas says which it is, and how often another one took over

    @property
    def is_stopping(self) -> bool:
        return self.state.is_stopping

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> list[tuple[Peer, list[Frame]]]:
        """Take one request; returns all replies that are ready now, among them those of earlier requests."""
        self.state.num_requests += 1
        self.state.bytes_in += size_of(frames)
        try:
            message = decode(frames)
            self._check_place(message)
        except WireError as error:
            broken = Request(Message(Command.PING, call=call_of(frames)), peer)
            self.state.finish(broken, error)
            return self._replies()
        self.state.num_by_command[message.command if message.command in _KNOWN else 0] += 1
        proved = message.role if role is None else role
        request = Request(message, peer, self.state.now(), proved, frames=frames)
        if message.trace:
            self.traced.take(request)
        self.answer(request)
        if message.trace:
            self.traced.computed(request)
        return self._replies()

    def _check_place(self, message: Message) -> None:
        if message.shard != self.shard or message.term > self.term:
            raise WireError(
                f"expected shard {self.shard} and at most term {self.term}, found {message.shard} and {message.term}: "
                + ("this is another server" if self.term else "this server has no replicas")
            )

    def answer(self, request: Request) -> None:
        """Run the command of a request; what it answers is among `state.finished`, now or later."""
        try:
            handler = self._handler(request)
        except FleetError as error:  # of a late copy it says nothing about what became of the change
            self.state.finished.append((request, _plain(error)))
            return
        result = self._guarded(request, lambda: self._checked(handler, request))
        if result is not None:
            self.state.finish(request, result)

    def refuse(self, peer: Peer, frames: Sequence[Frame], error: FleetError) -> list[tuple[Peer, list[Frame]]]:
        """As Handler.refuse."""
        message = Message(Command.PING, call=call_of(frames))
        with contextlib.suppress(WireError):
            message = decode(frames)
        self.state.num_requests += 1
        self.note_refusal(f"{_name_of(message)}: {error}")
        asked = Message(message.command, worker=message.worker, call=message.call)  # no change: it was not taken in
        self.state.finish(Request(asked, peer), error)
        return self._replies()

    def refused(self, reply: Sequence[Frame], error: FleetError) -> list[Frame]:
        """As Handler.refused."""
        answer = decode_reply(reply)
        self.state.num_errors += 1
        self.note_refusal(f"a reply to worker {answer.worker}: {error}")
        answer.status, answer.arrays = ERROR, error_arrays(type(error).__name__, str(error))
        return encode_reply(answer)

    def note_refusal(self, text: str) -> None:
        """As Handler.note_refusal."""
        self.state.refusals.note(text, self.state.now())

    def tick(self, now: float) -> list[tuple[Peer, list[Frame]]]:
        if self.loading:
            return self._replies()
        pause = self.state.presence.pause(now)
        if self.recorder.advance(now, pause, lambda uncounted: self.advance(now, uncounted)):
            self._look_for_workers(now)
        self.state.budgets.forget_idle(now)
        return self._replies()

    def advance(self, now: float, pause: float) -> bool:
        """It is `now`, and the server did not look for so long. Returns whether that changed anything to be kept."""
        state = self.state
        state.presence.forgive(pause, now)
        is_changed = end_hopeless_waits(state, now)
        is_changed |= state.files.expire(now)
        if not state.clock.is_set and state.schedule.is_news(state.tables.values(), state.clock.now):
            is_changed = True
            due = state.schedule.note(state.tables.values(), state.clock.now)
            if due:
                state.long_work.append(shrink_in_slices(state, None, [(table, table.spec.shrink) for table in due]))
        return is_changed or bool(pause)

    def _look_for_workers(self, now: float) -> None:
        state = self.state
        for text in state.presence.news(now):
            if text not in state.members.lost.values():  # that was said when it was decided
                tell(f"torchfleet server: {text}")
        if state.num_workers and self._is_deserted(now):
            lost = "; ".join(state.presence.lost(now).values())
            if state.members.go_on and state.members.left:
                state.say(f"{lost}; the others have finished without it")
            else:
                self.desertion = lost
            state.is_stopping = True
        elif state.presence.is_orphaned(self._orphan_timeout, now):
            self.desertion = f"no worker has been heard of for {self._orphan_timeout:g} s (orphan_timeout)"
            state.is_stopping = True

    def _is_deserted(self, now: float) -> bool:
        members = self.state.members
        num_awaited = 0 if members.is_elastic else self.state.num_workers
        is_soon = members.go_on and bool(members.left)
        return self.state.presence.is_deserted(len(members.left), num_awaited, now, is_soon)

    def work(self) -> bool | None:
        """One slice of long work. None: there is none; False: it waits for a disk and could do nothing."""
        self._is_pulls_turn = not self._is_pulls_turn or not self.state.long_work
        if self.state.long_pulls and self._is_pulls_turn:
            for request in self.state.long_pulls.work():
                self.answer(request)
            return True
        if not self.state.long_work:
            return None
        return self.recorder.work(self._slice)

    def rest(self) -> None:
        """As Handler.rest: nothing is put off."""

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes: all that it does is asked for by requests, or by time."""
        return ()

    def _slice(self) -> bool:
        try:
            return next(self.state.long_work[0])
        except StopIteration:
            self.state.long_work.popleft()
            return True

    def repeat(self, request: Request) -> None:
        """Apply a request that another server, or this one before it was started again, has applied in the same state:
        who may ask is not looked at again. Its answer is among `state.finished`."""
        handler = COMMANDS[request.message.command]
        result = self._guarded(request, lambda: self._changed(handler, request))
        if result is not None:
            self.state.finish(request, result)

    def _checked(self, handler: CommandHandler, request: Request) -> Answer | FleetError | None:
        if self.loading:
            return self._answer_while_loading(request.message)
        if self.state.long_pulls.is_under_way(request.peer):
            self.state.budgets.hold(request)
            self.state.long_pulls.wait_behind(request)
            return None
        return self.recorder.apply(request, lambda: self._changed(handler, request))

    def _changed(self, handler: CommandHandler, request: Request) -> Answer | FleetError | None:
        is_change = handler.once or (handler.again is not None and request.message.sequence)
        return self._run_once(handler, request) if is_change else handler.run(self.state, request)

    def _guarded(self, request: Request, run: Callable[[], Answer | FleetError | None]) -> Answer | FleetError | None:
        try:
            return run()
        except ServerBusy as error:
            self.note_refusal(f"{_name_of(request.message)}: {error}")
            return _plain(error)
        except FleetError as error:
            return _plain(error)
        except Exception as error:  # our own mistake must not end the service of all others
            tell(traceback.format_exc())
            return FleetError(f"internal error of the server: {type(error).__name__}: {error}")

    def _answer_while_loading(self, message: Message) -> Answer:
        if message.command == Command.PING:
            return [pack({"loading": self.loading})]
        raise ServerLoading(f"this server does not serve yet: {self.loading}. Ask again later.")

    def _run_once(self, handler: CommandHandler, request: Request) -> Answer | FleetError | None:
        message = request.message
        if message.sequence < 1:
            raise WireError(f"command {message.command} changes things and needs a sequence number")
        sessions = self.state.sessions
        is_waiting = sessions.is_running(message.client, message.sequence)
        before = sessions.begin(
            message.client, message.sequence, message.floor, request.arrived, message.worker, message.incarnation
        )
        if isinstance(before, FleetError):
            return before
        if before is Outcome.APPLIED:
            return handler.again(self.state, request) if handler.again is not None else []
        try:
            return handler.run(self.state, request)  # also for one that is waiting: its reply then goes to the repeat
        except ServerBusy:
            if not is_waiting:
                sessions.retract(message.client, message.sequence)
            raise

    def _handler(self, request: Request) -> CommandHandler:
        message, role = request.message, request.role
        handler = COMMANDS.get(message.command)
        if handler is None:
            raise WireError(f"unknown command {message.command}; known are {[command.name for command in Command]}")
        if role not in handler.roles:
            allowed = ", ".join(sorted(known.name.lower() for known in handler.roles))
            name = Role(role).name.lower() if role in tuple(Role) else f"role {role}"
            raise PermissionRefused(f"{Command(message.command).name} is for {allowed}; this is a {name}")
        if role != Role.LAUNCHER and (handler.as_worker or message.flags & handler.as_worker_flags):
            self.state.members.check(message.worker, message.incarnation)
            self.state.presence.check(message.worker, message.incarnation)
        return handler

    def _replies(self) -> list[tuple[Peer, list[Frame]]]:
        finished, self.state.finished = self.state.finished, []
        replies = [(request.peer, self._reply(request, result)) for request, result in finished]
        self.state.bytes_out += sum(size_of(frames) for _, frames in replies)
        return replies

    def _reply(self, request: Request, result: Answer | FleetError) -> list[Frame]:
        message = request.message
        reply = Reply(message.command, OK, message.worker, self.incarnation, message.call, term=self.term)
        if isinstance(result, FleetError):
            self.state.num_errors += 1
            reply.status, reply.arrays = ERROR, error_arrays(type(result).__name__, str(result))
        else:
            reply.arrays = result
        if request.taken:
            reply.taken, reply.answered = request.taken, self.traced.answered(request)
        try:
            return encode_reply(reply)
        except WireError as error:  # more than a message can hold: that must not end the service of all others
            self.state.num_errors += 1
            reply.status, reply.arrays = ERROR, error_arrays(type(error).__name__, str(error))
            return encode_reply(reply)


def _name_of(message: Message) -> str:
    command = Command(message.command).name if message.command in tuple(Command) else f"command {message.command}"
    return f"{command} of worker {message.worker}, client {message.client}"


def _plain(error: FleetError) -> FleetError:
    """To be remembered: of bounded length, and without a traceback, which would keep the request's arrays alive."""
    return type(error)(str(error)[:MAX_TEXT])
