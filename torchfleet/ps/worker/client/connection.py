"""Requests in flight to one server: numbered, limited by a window, retried without a reply, failed at
their time-out.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchfleet.base import errors
from torchfleet.base.errors import FleetError, ServerBusy, ServerError, ServerRestarted, ServerUnreachable, WireError
from torchfleet.base.monitor.notices import tell
from torchfleet.base.tracing import span_recorder
from torchfleet.base.tracing.span_recorder import Request
from torchfleet.ps.net.replica_channels import ReplicaChannels
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import (
    ERROR,
    VERSION,
    Array,
    Command,
    Frame,
    Message,
    Reply,
    Role,
    call_of,
    decode_reply,
    encode,
    unpack,
    version_of,
)

DEFAULT_WINDOW = 8
MAX_AHEAD = 1 << 10  # changes beyond the oldest unanswered one; a server remembers four times as many
BUSY_PAUSE = 0.25  # seconds before a retry to a server that was too busy; doubles each time
MAX_BUSY_PAUSE = 2.0
FIRST_PAUSE = 2.0  # seconds before a retry to a server that may be down; doubles each time
TOLD_AT = 3  # attempts before a message reports that a server is down
LOOK_AFTER = 0.5  # seconds of silence after which a server's process is looked for, where that can be seen
AWAY = 2.0  # seconds without polling the channel; a longer gap is this process's own pause, not the server's silence

_incarnations: dict[int, int] = {}  # by pid: a forked child is a separate process


def incarnation() -> int:
    """A random number of this process, by which servers distinguish processes with the same worker index."""
    return _incarnations.setdefault(os.getpid(), secrets.randbits(63) | 1)


@dataclass(frozen=True)
class Patience:
    """How long a request may take in all, and how often it is retried within that time.

    Pauses double: with 3 retries in 30 s a request is sent at 0, 2, 6 and 14 s, and fails at 30 s.
    """

    timeout: float = 30.0
    retries: int = 3
    # for a server that may be down and come back: the longest pause between retries, until the time-out
    pause: float | None = None

    def resend_at(self, sent: float, attempt: int, timeout: float) -> float:
        """When to retry after attempt number `attempt` (1, 2, ...), for a request first sent at `sent`."""
        if self.pause is not None:
            return sent + min(timeout, sum(min(self.pause, FIRST_PAUSE * 2.0**i) for i in range(attempt)))
        if attempt > self.retries:
            return sent + timeout
        return sent + timeout * ((1 << attempt) - 1) / ((1 << (self.retries + 1)) - 1)


@dataclass(slots=True)
class Call:
    """One request and, once it is done, its reply or its error."""

    command: int
    number: int
    sequence: int
    message: Message
    started: float
    timeout: float
    resend_at: float
    attempt: int = 1
    num_refused: int = 0
    refused: FleetError | None = None  # why the server does not accept it now
    reply: Sequence[Array] | None = None
    error: FleetError | None = None
    traced: Request | None = None  # set if it belongs to a traced step

    @property
    def is_done(self) -> bool:
        return self.reply is not None or self.error is not None


class Connection:
    """A client's connection to one server. Belongs to one thread, which does the network work while it waits."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        worker: int,
        role: Role,
        patience: Patience,
        window: int,
        process: int | None = None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """`process`: the number of the worker's process, if it is not this one. `is_gone`: whether the server's process
        is known to have ended; asked during long waits."""
        self._process = incarnation() if process is None else process
        self._is_gone = is_gone
        self.name, self._channel, self._patience, self._window = name, channel, patience, window
        self._replicas = channel if isinstance(channel, ReplicaChannels) else None
        self._worker, self._role = worker, role
        self._client = secrets.randbits(63) | 1
        self._next_call = self._next_sequence = 1
        self._calls: dict[int, Call] = {}
        self._incarnation = 0
        self.num_retries = 0
        self._is_closed = False
        self._heard = self._looked = channel.now()

    def submit(
        self,
        command: Command,
        arrays: Sequence[Array],
        flags: int = 0,
        once: bool = False,
        timeout: float | None = None,
    ) -> Call:
        """Send a request. Blocks only while the window is full. `once`: the server applies it once, however often it is
        sent.
        """
        if self._is_closed:
            raise FleetError(
                f"{self.name}: {command.name} after the connection was closed, as fleet.stop_worker() does. Do what "
                "needs servers before it."
            )
        while len(self._calls) >= self._window or (once and self._calls and self._is_far_ahead()):
            self._work()
        sequence = self._next_sequence if once else 0
        self._next_sequence += once
        message = Message(command, self._role, flags, self._worker, self._client, self._next_call, sequence, 0, arrays)
        message.incarnation = self._process
        self._next_call += 1
        now = self._channel.now()
        seconds = self._patience.timeout if timeout is None else timeout
        resend_at = self._patience.resend_at(now, 1, seconds)
        call = Call(command, message.call, sequence, message, now, seconds, resend_at)
        self._calls[call.number] = call
        spans = span_recorder.active  # another thread may end tracing meanwhile
        if spans is not None and spans.trace:
            self._trace(call, spans)
        try:
            self._send(call)
        except FleetError:
            self._calls.pop(call.number, None)  # it cannot be sent, now or later
            raise
        return call

    def wait(self, call: Call) -> Sequence[Array]:
        """Wait for the reply and return it, or raise the call's error. Returns at the latest after the
        call's time-out.
        """
        spans = span_recorder.active
        if call.traced is not None and spans is not None and not call.is_done:
            with spans.waiting(f"wait for {call.traced.name} {self._short_name}"):
                self._work_until_done(call)
        else:
            self._work_until_done(call)
        if call.error is not None:
            raise call.error
        assert call.reply is not None
        return call.reply

    def give_up(self, call: Call) -> None:
        """Do not send the call again. The server may have it already, or receive it before any later call."""
        self._calls.pop(call.number, None)

    def _work_until_done(self, call: Call) -> None:
        ping: Call | None = None
        while call.reply is None and call.error is None:
            self._work()
            if call.timeout > self._patience.timeout and not call.is_done:
                ping = self._ask_if_alive(ping)

    def _ask_if_alive(self, ping: Call | None) -> Call | None:
        """Ping a silent server from time to time during a wait that other workers may make long."""
        if ping is not None and ping.error is not None:
            raise ping.error
        silent = self._channel.now() - self._heard
        if silent > LOOK_AFTER and self._is_gone():
            raise ServerUnreachable(f"{self.name} has ended: no process listens at its address")
        if silent > self._patience.timeout / 4 and (ping is None or ping.is_done) and len(self._calls) < self._window:
            return self.submit(Command.PING, [])
        return ping

    def close(self) -> None:
        for call in self._calls.values():
            call.error = FleetError(f"{self.name}: closed before {Command(call.command).name} was answered")
        self._calls.clear()
        self._is_closed = True
        self._channel.close()

    def _trace(self, call: Call, spans: span_recorder.Recorder) -> None:
        """Attach the calling thread's traced step to this request, so that the server learns its number."""
        message = call.message
        num_bytes = sum(array.data.nbytes for array in message.arrays)
        name = Command(call.command).name.lower()
        message.trace = spans.trace
        call.traced = Request(name, spans.trace, self._client, call.number, spans.now(), num_bytes)

    @property
    def _short_name(self) -> str:
        return self.name.partition(" (")[0]

    def _note_reply(self, call: Call, reply: Reply) -> None:
        spans = span_recorder.active
        if spans is not None and call.traced is not None:
            spans.note_request(call.traced, self._short_name, reply.incarnation, reply.taken, reply.answered)

    def _send(self, call: Call) -> None:
        # The floor tells the server which replies it may forget: all changes below the floor are settled.
        call.message.floor = self._floor()
        if self._replicas is not None:
            call.message.shard, call.message.term = self._replicas.shard, self._replicas.term
        frames = encode(call.message)
        while not self._channel.send(frames) and not call.is_done:
            self._work()

    def _floor(self) -> int:
        """The number of the oldest unanswered change; the next number if all are answered."""
        for call in self._calls.values():  # in the order of their sequence
            if call.sequence:
                return call.sequence
        return self._next_sequence

    def _is_far_ahead(self) -> bool:
        return self._next_sequence - self._floor() >= MAX_AHEAD

    def _work(self) -> None:
        """Process the replies that have arrived, or wait for the first one until the next deadline."""
        now = self._notice_absence()
        pause = 1.0 if self._calls else 0.0
        for call in self._calls.values():
            pause = min(pause, call.resend_at - now)
        frames = self._channel.receive(max(0.0, pause))
        while frames is not None:
            self._take(frames)
            frames = self._channel.receive(0.0) if self._calls else None
        if self._replicas is not None and self._replicas.take_move():
            # the primary may have received none of them
            self._send_again(list(self._calls.values()), self._channel.now())
        if self._calls:
            self._look_at_clock(self._notice_absence())

    def _notice_absence(self) -> float:
        """The current time. If this process was suspended or busy computing, extends the deadlines of its requests by
        that time: the server may have replied at once, so the gap was not its silence.
        """
        now = self._channel.now()
        away = now - self._looked
        if away > AWAY and self._calls:
            for call in self._calls.values():
                missed = min(away - AWAY, now - call.started)
                call.started += missed
                call.resend_at += missed
            self._heard += away - AWAY
        self._looked = now
        return now

    def _take(self, frames: Sequence[Frame]) -> None:
        try:
            reply = decode_reply(frames)
        except WireError as error:
            self._take_unreadable(frames, error)
            return
        self._heard = self._channel.now()
        call = self._calls.get(reply.call)
        if call is None:
            return  # a second reply, because the request was sent twice
        if reply.status == ERROR and self._is_busy(call, reply.arrays):
            return
        del self._calls[call.number]
        if call.traced is not None:
            self._note_reply(call, reply)
        if self._incarnation not in (0, reply.incarnation):
            call.error = ServerRestarted(
                f"{self.name} is another process than before, and what it held is gone. Start the job anew from the "
                "last checkpoint."
            )
        elif reply.status == ERROR:
            call.error = self._error(call, reply.arrays)
        else:
            call.reply = reply.arrays
        self._incarnation = self._incarnation or reply.incarnation

    def _take_unreadable(self, frames: Sequence[Frame], error: WireError) -> None:
        """Fail the call if the server has another version of the protocol; otherwise ignore the reply, so that the
        request is retried.
        """
        call = None if version_of(frames) in (0, VERSION) else self._calls.pop(call_of(frames), None)
        if call is not None:
            call.error = WireError(f"{self.name}: {error}")

    def _is_busy(self, call: Call, arrays: Sequence[Array]) -> bool:
        """Whether the server is too busy for the call; if so, schedules a retry within its time-out."""
        error = self._error(call, arrays)
        if not isinstance(error, ServerBusy):
            return False
        pause = min(MAX_BUSY_PAUSE, BUSY_PAUSE * 2**call.num_refused)
        call.num_refused, call.refused = min(call.num_refused + 1, 8), error
        call.resend_at = min(self._channel.now() + pause, call.started + call.timeout)
        return True

    def _error(self, call: Call, arrays: Sequence[Array]) -> FleetError:
        """The server's error, of the same class if that is in torchfleet.base.errors, otherwise a ServerError."""
        try:
            body: dict[str, Any] = unpack(arrays[0], dict) if arrays else {}
        except WireError as error:
            body = {"text": f"(its reason cannot be read: {error})"}
        kind = getattr(errors, str(body.get("kind")), ServerError)
        known = isinstance(kind, type) and issubclass(kind, FleetError)
        text = f"{self.name} refused {Command(call.command).name}: {body.get('text')}"
        return (kind if known else ServerError)(text)

    def _look_at_clock(self, now: float) -> None:
        late = [call for call in self._calls.values() if now >= call.resend_at]
        for call in late:
            if now >= call.started + call.timeout:
                del self._calls[call.number]
                call.error = call.refused or ServerUnreachable(
                    f"{self.name} gave no answer to {Command(call.command).name} within {call.timeout:g} s "
                    f"({call.attempt} attempts). Is its process alive, the address right, and (with keys) this "
                    "client's key known to it?"
                )
            elif call.refused is None:
                call.attempt += 1
                call.resend_at = self._patience.resend_at(call.started, call.attempt, call.timeout)
                if self._patience.pause is not None and call.attempt == TOLD_AT:
                    self._tell_of_absence(call, now)
        again = [call for call in late if not call.is_done]
        if any(call.refused is None for call in again):
            # A connection that lost one message is not reused for the others: reconnect, and send all of them again.
            self._channel.reconnect()
            again = list(self._calls.values())
        self._send_again(again, now)

    def _send_again(self, calls: Sequence[Call], now: float) -> None:
        for call in calls:
            self.num_retries += 1
            if not call.is_done:
                if call.refused is not None:
                    call.refused = None
                    call.resend_at = self._patience.resend_at(now, 1, max(0.0, call.started + call.timeout - now))
                self._send(call)

    def _tell_of_absence(self, call: Call, now: float) -> None:
        tell(
            f"torchfleet: {self.name} has given no answer to {Command(call.command).name} for "
            f"{now - call.started:.0f} s. It may be starting again from its log: waiting up to {call.timeout:g} s."
        )
