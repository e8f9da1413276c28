"""A heter worker behind a transport: the sessions of its CPU workers, and a thread that computes their requests.

Listener.serve → BlockServer.handle → decode → queue → BlockRunner, in its thread → BlockServer.ready → encode

Each session has at most one request under way, so that the queue is short and fair. A request that is sent again,
because its reply was late or lost, is computed only once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError, PermissionRefused, RoleError, ServerBusy, SessionLost, WireError
from torchfleet.base.monitor.notices import tell
from torchfleet.ps.net.transport import Peer
from torchfleet.ps.net.wire import (
    ERROR,
    OK,
    Array,
    Command,
    Frame,
    Message,
    Reply,
    Role,
    call_of,
    decode,
    encode_reply,
    error_arrays,
    pack,
    unpack,
)
from torchfleet.ps.server.refusals import Refusals
from torchfleet.ps.server.state.counters import Counters
from torchfleet.ps.worker.heter.block_runner import BlockRunner, WorkerValues
from torchfleet.ps.worker.heter.messages import MAX_BODY, Backward, Forward, Join, Load

MAX_SESSIONS = 1024
MAX_QUEUED = 1 << 33  # bytes of requests that wait to be computed
IDLE = 600.0  # seconds without a request after which a session is forgotten; its worker then sends everything again
RECENT = 60.0  # seconds after its last request for which a session counts as that of a living process
MAX_TEXT = 2000
_WORKERS = (Role.WORKER, Role.FIRST_WORKER)

Result = list[Array] | FleetError


@dataclass
class Job:
    """A request to compute, and where its reply goes: a repeat may have come from another connection."""

    message: Message
    body: Forward | Backward
    session: Session
    peer: Peer
    result: Result | None = None


@dataclass
class Session:
    """One CPU worker's connection, by the number of its client."""

    worker: int
    incarnation: int  # of the worker's process
    heard: float
    values: WorkerValues = field(default_factory=WorkerValues)
    job: Job | None = None  # the last request; its reply is kept until the next one

    @property
    def is_busy(self) -> bool:
        return self.job is not None and self.job.result is None

    @property
    def is_present(self) -> bool:
        """Whether its worker was heard from lately, or its request is being computed."""
        return self.is_busy or time.monotonic() - self.heard < RECENT

    def is_of(self, message: Message) -> bool:
        """Whether the session belongs to the process that sent the message."""
        return (self.worker, self.incarnation) == (message.worker, message.incarnation)


class BlockServer:
    """Implements Handler. `num_workers`: the CPU workers of the job."""

    def __init__(self, runner: BlockRunner, num_workers: int, orphan_timeout: float = 0.0) -> None:
        """`orphan_timeout`: stop after this many seconds without a request from a worker; 0: never."""
        self.incarnation, self.term = secrets.randbits(63) | 1, 0
        self.counters = Counters()
        self.refusals = Refusals(self, self.counters)
        self._runner, self._num_workers, self._orphan_timeout = runner, num_workers, orphan_timeout
        self._sessions: dict[int, Session] = {}
        self._left: set[int] = set()
        self._heard = time.monotonic()
        self._queued = 0  # bytes
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[Job, Result]] = deque()  # `ready` sets the result: a repeat is answered once
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.desertion = ""
        self.num_computed, self.seconds = 0, 0.0
        self._thread = BackgroundThreads([self._compute], "the blocks of a heter worker")
        self._thread.start()

    @property
    def is_stopping(self) -> bool:
        """Whether all workers have left or are silent. A worker that has left needs no reply: a request of it may still
        be computed.
        """
        return bool(self.desertion) or len(self._left) == self._num_workers

    @property
    def num_sessions(self) -> int:
        """The number of workers that compute here."""
        return sum(session.is_present for session in self._sessions.values())

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()
        os.close(self._wake)

    def handle(self, peer: Peer, frames: Sequence[Frame], role: Role | None) -> list[tuple[Peer, list[Frame]]]:
        """As Handler.handle."""
        self.counters.num_requests += 1
        message = Message(Command.PING, call=call_of(frames))
        result: Result | None
        try:
            message = decode(frames)
            result = self._answer(message, peer, message.role if role is None else role)
        except FleetError as error:
            result = error
        except Exception as error:  # a bug in one command must not stop the heter worker
            tell(traceback.format_exc())
            result = FleetError(f"internal error of the heter worker: {type(error).__name__}: {error}")
        if isinstance(result, ServerBusy):
            self.refusals.note(f"worker {message.worker}: {result}")
        return [] if result is None else [(peer, self._encoded(message, result))]

    def _answer(self, message: Message, peer: Peer, role: int) -> Result | None:
        """The reply, or None if it comes later."""
        commands: dict[int, Callable[[Message, Peer], Result | None]] = {
            Command.JOIN: self._join,
            Command.LEAVE: self._leave,
            Command.FORWARD: self._queue,
            Command.BACKWARD: self._queue,
        }
        if message.shard or message.term:
            raise WireError("expected no shard and no term: this is a heter worker, without replicas")
        if message.command in (Command.PING, Command.STATS) and role in tuple(Role):
            return [pack(Load(self.num_sessions))] if message.command == Command.STATS else []
        command = commands.get(message.command)
        if command is None:
            raise WireError(f"a heter worker has no command {message.command}: is this the address of a server?")
        if role not in _WORKERS:
            raise PermissionRefused(f"{Command(message.command).name} is for workers")
        if message.worker >= self._num_workers:
            raise RoleError(f"worker {message.worker} of a job with {self._num_workers} workers")
        self._heard = time.monotonic()
        return command(message, peer)

    def _join(self, message: Message, peer: Peer) -> Result:
        """Begin a session. A repeat changes nothing. An earlier session of the same process ends."""
        body = unpack(_first(message), Join, MAX_BODY)
        if body.blocks != self._runner.specs:
            raise RoleError(
                f"expected the blocks {_names(self._runner.specs)}, found {_names(body.blocks)} with other "
                "parameters, types or shapes: all processes of a job run the same script with the same arguments"
            )
        if message.client not in self._sessions:
            self._end([client for client, session in self._sessions.items() if session.is_of(message)])
            if self.num_sessions > body.most:
                return [pack(Load(self.num_sessions))]
            if len(self._sessions) >= MAX_SESSIONS:
                raise ServerBusy(f"{MAX_SESSIONS} workers are here, which is the maximum")
            self._sessions[message.client] = Session(message.worker, message.incarnation, time.monotonic())
        self._left.discard(message.worker)
        return [pack(Load(self.num_sessions, is_joined=True))]

    def _leave(self, message: Message, peer: Peer) -> Result:
        """End the client's session, if there is one. With a flag, the worker needs no heter worker any more, unless
        another process of that worker was heard from lately."""
        worker = message.worker
        others = [s for s in self._sessions.values() if s.worker == worker and s.incarnation != message.incarnation]
        is_last = bool(message.flags) and not any(session.is_present for session in others)
        self._end([c for c, s in self._sessions.items() if c == message.client or (is_last and s.worker == worker)])
        if is_last:
            self._left.add(worker)
        return []

    def _end(self, clients: Sequence[int]) -> None:
        """End the sessions of these clients, except for those that compute."""
        for client in clients:
            if not self._sessions[client].is_busy:
                del self._sessions[client]

    def _queue(self, message: Message, peer: Peer) -> Result | None:
        session = self._sessions.get(message.client)
        if session is None or session.worker != message.worker:
            raise SessionLost("this worker has no session here")
        session.heard = time.monotonic()
        last = session.job
        if last is not None and message.call <= last.message.call:
            if message.call < last.message.call:
                raise WireError(f"call {message.call} comes after call {last.message.call}")
            last.peer = peer
            return last.result
        if session.is_busy:
            raise ServerBusy("the last request of this worker is being computed")
        kind: type[Forward | Backward] = Forward if message.command == Command.FORWARD else Backward
        body = unpack(_first(message), kind, MAX_BODY)
        num_bytes = _num_bytes(message)
        if self._queued and self._queued + num_bytes > MAX_QUEUED:
            raise ServerBusy(f"{self._queued:,} bytes of requests wait to be computed, at most {MAX_QUEUED:,}")
        self._queued += num_bytes
        session.job = Job(message, body, session, peer)
        self._jobs.put(session.job)
        return None

    def _compute(self) -> None:
        """The thread: one request after the other."""
        while (job := self._jobs.get()) is not None:
            start = time.perf_counter()
            result = self._result(job)
            self.seconds += time.perf_counter() - start
            self._done.append((job, result))
            os.eventfd_write(self._wake, 1)

    def _result(self, job: Job) -> Result:
        arrays, values = job.message.arrays[1:], job.session.values
        try:
            if isinstance(job.body, Forward):
                return self._runner.forward(values, job.body, arrays)
            return self._runner.backward(values, job.body, arrays)
        except FleetError as error:
            return type(error)(str(error)[:MAX_TEXT])  # without a traceback, which would keep tensors alive
        except Exception as error:  # a bug, or no memory, must not stop the heter worker
            tell(traceback.format_exc())
            return FleetError(f"internal error of the heter worker: {type(error).__name__}: {error}"[:MAX_TEXT])

    def ready(self) -> list[tuple[Peer, list[Frame]]]:
        """As Handler.ready."""
        replies = []
        while self._done:
            job, result = self._done.popleft()
            job.result = result
            self.num_computed += 1
            self._queued -= _num_bytes(job.message)
            replies.append((job.peer, self._encoded(job.message, result)))
            job.message.arrays = []  # frees the request's memory
        return replies

    def _encoded(self, message: Message, result: Result) -> list[Frame]:
        reply = Reply(message.command, OK, message.worker, self.incarnation, message.call)
        if not isinstance(result, FleetError):
            reply.arrays = result
            with contextlib.suppress(WireError):
                return encode_reply(reply)
            result = WireError("the answer is too large for a message: use smaller batches")
        self.counters.num_errors += 1
        reply.status, reply.arrays = ERROR, error_arrays(type(result).__name__, str(result)[:MAX_TEXT])
        return encode_reply(reply)

    def tick(self, now: float) -> list[tuple[Peer, list[Frame]]]:
        """As Handler.tick: forget sessions whose workers are silent."""
        self._thread.check()
        self._end([client for client, session in self._sessions.items() if now - session.heard > IDLE])
        if self._orphan_timeout and now - self._heard > self._orphan_timeout:
            self.desertion = f"no worker has been heard of for {self._orphan_timeout:g} s (orphan_timeout)"
        return []

    def work(self) -> bool | None:
        """As Handler.work: whether replies are ready."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return True if self._done else None

    def rest(self) -> bool:
        """As Handler.rest: nothing is postponed."""
        return False

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes."""
        return (self._wake,)


def _first(message: Message) -> Array:
    if not message.arrays:
        raise WireError("expected a body, found no array")
    return message.arrays[0]


def _num_bytes(message: Message) -> int:
    return sum(array.data.nbytes for array in message.arrays)


def _names(specs: Sequence[object]) -> str:
    return ", ".join(f"'{getattr(spec, 'name', '')}'" for spec in specs) or "(none)"
