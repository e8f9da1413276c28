"""Frames over ZeroMQ: tcp and ipc, plain or with CURVE encryption and authentication."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.utils.garbage  # now, not with the first large message: its exit handler must run after ours

from torchfleet.base.errors import FleetError, ServerBusy, WireError
from torchfleet.ps.net.admission_desk import AdmissionDesk
from torchfleet.ps.net.doorkeeper import Doorkeeper
from torchfleet.ps.net.keys import KeyFolder, require_keys
from torchfleet.ps.net.long_messages import drop_rest
from torchfleet.ps.net.open_files import OpenFiles
from torchfleet.ps.net.transport import TICK, Handler, LookAhead
from torchfleet.ps.net.unread import COUNTED, Unread, size_of
from torchfleet.ps.net.wire import MAX_ENTRY, MAX_FRAME, Frame, Role

QUEUED_MESSAGES = 64  # per peer and direction; a full queue makes the sender wait, so memory stays bounded
QUEUED_REQUESTS = 4  # of one client at the server; further requests wait at the client
MOST_WAITING = 4  # requests that are received before they are handled, if a table foresees their rows
_DESK_PAUSE = 0.005  # seconds between two checks for handshakes, under load
_UNCONFIRMED_MS = 30_000  # time without an acknowledgement of sent bytes, after which the peer counts as gone
_HANDSHAKE_MS = 10_000
_CONNECT_MS = 5_000  # then the next attempt, from another port: the system would repeat this one ever more rarely
# Connections that wait to be accepted; ZeroMQ's default is 100. All workers of a job connect at once, and the client's
# system retries a connection that finds no place after 1 s, 2 s, 4 s and so on.
_BACKLOG = 1024
_KEEPALIVE = 10  # seconds between two keepalive probes of a silent peer
# As plain numbers: pyzmq's own are enumerations, and an | of two of them takes as long as sending a frame.
_NOW, _MORE, _READABLE, _EVENTS = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN), zmq.EVENTS
_HELLO = b""  # a connection's first message: small, so that the server knows it before anything large comes


class Listener:
    """A server's socket. It has one queue for the requests of all clients, and serves them one after the other."""

    def __init__(self, endpoint: str, keys: KeyFolder | None = None, insecure: bool = False) -> None:
        require_keys(endpoint, keys, insecure)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._roles = keys.roles() if keys else {}
        self._desk = AdmissionDesk(self._context, frozenset(key.encode() for key in self._roles)) if keys else None
        self._socket = _socket(self._context, zmq.ROUTER, endpoint)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.BACKLOG, _BACKLOG)
        self._doorkeeper = Doorkeeper(self._socket, endpoint)
        self._unread = Unread()
        self.look_ahead: LookAhead | None = None
        self._waiting: deque[list[zmq.Frame]] = deque()  # requests that were received, and are not handled yet
        self.num_dropped_replies = 0
        if keys:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.server_pair()
            self._socket.curve_server = True
        self._files: OpenFiles | None = None
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise FleetError(
                f"cannot listen on {endpoint}: {error}. Is the port in use, the address of this machine?"
            ) from None
        self._files = OpenFiles(self._doorkeeper.listening())
        self.endpoint = str(self._socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        self._poller = zmq.Poller()
        for watched in (self._socket, *([self._desk.socket] if self._desk else [])):
            self._poller.register(watched, zmq.POLLIN)

    def serve(self, handler: Handler, is_over: Callable[[], bool]) -> None:
        """Answer requests until `is_over()`, which is called after every request and at least every TICK."""
        assert self._files is not None
        next_tick, next_desk, worked = 0.0, 0.0, None
        watched: tuple[object, ...] = ()
        while not is_over():
            watched = self._watch(watched, handler.wakes())
            request = self._next(0 if worked else int(TICK * 1000) if worked is None else 1, handler.rest)
            if request is not None:
                self._receive_more(request)
                self._take(request, handler)
                del request  # free its memory before receiving the next one
            worked = handler.work()
            now = time.monotonic()
            if self._desk is not None and now >= next_desk:
                self._desk.answer(now)
                next_desk = now + _DESK_PAUSE
            if worked:
                self._reply(handler.ready(), handler)
            if now >= next_tick:
                self._reply(handler.tick(now), handler)
                self._doorkeeper.look(now)
                self._doorkeeper.shut_newest(self._files.lacking())
                self._tell(handler)
                self._files.look()
                next_tick = now + TICK

    def _watch(self, before: tuple[object, ...], after: tuple[object, ...]) -> tuple[object, ...]:
        """Poll the objects in `after`, in place of those in `before`, together with the socket."""
        if after != before:
            for gone in before:
                self._poller.unregister(gone)
            for new in after:
                self._poller.register(new, zmq.POLLIN)
        return after

    def _take(self, request: list[zmq.Frame], handler: Handler) -> None:
        self._doorkeeper.note(request[-1])
        peer, frames = request[0].bytes, [frame.buffer for frame in request[1:]]
        if len(request) > MAX_ENTRY + 2:
            num = len(request) - 1 + drop_rest(self._socket)
            error = WireError(f"a message of {num:,} frames, at most {MAX_ENTRY + 1:,}: the connection is ended")
            self._send(peer, handler.refusals.of_request(frames, error))
            self._doorkeeper.shut_later(request[-1], str(error))
        elif refusal := self._unread.refusal(peer):
            self._send(peer, handler.refusals.of_request(frames, ServerBusy(refusal)))
        elif len(frames) != 1 or len(frames[0]):  # not a hello
            role = self._roles.get(str(request[-1].get("User-Id"))) if self._roles and frames else None
            self._reply(handler.handle(peer, frames, role), handler)

    def _next(self, timeout_ms: int, rest: Callable[[], bool]) -> list[zmq.Frame] | None:
        """The next request, or None. Of a request with too many frames, only one more than allowed is received.

        Tries to receive first: under load a request is waiting, and a poll would cost more. Otherwise calls `rest`, and
        polls for up to `timeout_ms` unless `rest` has more to do.
        """
        if self._waiting:
            return self._waiting.popleft()
        if is_readable(self._socket) and (request := self._frames()) is not None:
            return request
        self._doorkeeper.rest()
        if rest():
            timeout_ms = 0
        if timeout_ms and self._poller.poll(timeout_ms) and is_readable(self._socket):
            return self._frames()
        return None

    def _receive_more(self, last: list[zmq.Frame]) -> None:
        """Receive some of the requests behind `last`, and show them to `look_ahead`, if it has anything to do for them.
        Nothing is received behind a request with too many frames before these frames are dropped.
        """
        if self.look_ahead is None or not self.look_ahead.is_on:
            return
        last = self._waiting[-1] if self._waiting else last
        while len(self._waiting) < MOST_WAITING and len(last) <= MAX_ENTRY + 2 and is_readable(self._socket):
            request = self._frames()
            if request is None:
                return
            last = request
            self._waiting.append(last)
            self.look_ahead.note([frame.buffer for frame in last[1:]])

    def _frames(self) -> list[zmq.Frame] | None:
        """The request that waits, or None. Of one with too many frames, only one more than allowed is received."""
        return received(self._socket, MAX_ENTRY + 3)

    def _tell(self, handler: Handler) -> None:
        news, self._doorkeeper.news = self._doorkeeper.news, []
        for text in news:
            handler.refusals.note(text)

    def close(self) -> None:
        self._doorkeeper.close()
        self._socket.close(linger=500)
        if self._files is not None:
            self._files.close()
        if self._desk is not None:
            self._desk.close()
        self._context.term()

    def _reply(self, replies: Sequence[tuple[Any, list[Frame]]], handler: Handler) -> None:
        for peer, frames in replies:
            num_bytes = size_of(frames)
            if num_bytes < COUNTED:
                self._send(peer, frames)
            elif refusal := self._unread.refusal(peer, num_bytes):
                self.num_dropped_replies += 1
                self._send(peer, handler.refusals.of_reply(frames, ServerBusy(refusal)))
            else:
                self._send(peer, self._unread.count(peer, frames, num_bytes))

    def _send(self, peer: bytes, frames: list[Frame]) -> None:
        try:
            send_frames(self._socket, [peer, *frames])
        except zmq.ZMQError:  # the peer is gone, or does not read its replies; it may ask again
            self.num_dropped_replies += 1


class SocketChannel:
    """A client's connection to one server. Owned by one thread."""

    def __init__(self, endpoint: str, keys: KeyFolder | None = None, role: Role = Role.WORKER) -> None:
        self._endpoint = endpoint
        self._pair = keys.client_pair(role) if keys else None
        self._server_key = keys.server_public() if keys else b""
        self._socket = self._connect()

    def send(self, frames: Sequence[Frame]) -> bool:
        try:
            send_frames(self._socket, [_received(frame) for frame in frames])
        except zmq.Again:
            return False
        return True

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        if timeout > 0 and not self._socket.poll(max(1, int(timeout * 1000))):
            return None
        if not is_readable(self._socket):
            return None
        frames = received(self._socket)
        return None if frames is None else [frame.buffer for frame in frames]

    def reconnect(self) -> None:
        self._socket.close(linger=0)
        self._socket = self._connect()

    def close(self) -> None:
        self._socket.close(linger=0)

    def now(self) -> float:
        return time.monotonic()

    def wakes(self) -> tuple[object, ...]:
        return (self._socket,)

    def _connect(self) -> zmq.Socket[bytes]:
        connection = _socket(zmq.Context.instance(), zmq.DEALER, self._endpoint)
        if self._pair:
            connection.curve_publickey, connection.curve_secretkey = self._pair
            connection.curve_serverkey = self._server_key
        try:
            connection.connect(self._endpoint)
        except zmq.ZMQError as error:
            connection.close(linger=0)
            raise FleetError(
                f"not an address to connect to: {self._endpoint!r} ({error}); expected tcp://host:port"
            ) from None
        connection.send(_HELLO, zmq.NOBLOCK)
        return connection


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message seems to wait. Costs a seventh of a `recv` that raises zmq.Again. ZeroMQ may be wrong about it:
    `received` then returns None.
    """
    return bool(int(socket.get(_EVENTS)) & _READABLE)


def received(socket: zmq.Socket[bytes], most: int = sys.maxsize) -> list[zmq.Frame] | None:
    """The first frames of the message that waits, at most `most`, without copying. None if no message waits."""
    try:
        frame = socket.recv(_NOW, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more and len(frames) < most:
        frame = socket.recv(copy=False)
        frames.append(frame)
    return frames


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Queue a message, by reference. Raises zmq.ZMQError (zmq.Again if there is no room); then no frame is queued.
    Does the same as `send_multipart`, which looks at every frame twice."""
    for frame in frames[:-1]:
        socket.send(frame, _NOW | _MORE, False)
    socket.send(frames[-1], _NOW, False)


def _received(frame: Frame) -> Frame:
    """The received ZeroMQ message whose whole content is `frame`, if there is one; else `frame` itself. ZeroMQ sends
    such a message by reference, and frees it. For other memory, ZeroMQ must tell a thread of pyzmq when it was sent,
    and that thread takes the interpreter's lock from the thread that serves."""
    owner: object = frame.obj if isinstance(frame, memoryview) else None
    return owner if isinstance(owner, zmq.Frame) and len(owner) == frame.nbytes else frame


class ZeroMQ:
    """The transport of tcp:// and ipc:// addresses."""

    def listen(self, endpoint: str, keys: KeyFolder | None, insecure: bool) -> Listener:
        """As Transport.listen."""
        return Listener(endpoint, keys, insecure)

    def connect(self, endpoint: str, keys: KeyFolder | None, role: Role) -> SocketChannel:
        """As Transport.connect."""
        return SocketChannel(endpoint, keys, role)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.set(zmq.LINGER, 0)
    made.set(zmq.SNDHWM, QUEUED_MESSAGES)
    made.set(zmq.RCVHWM, QUEUED_MESSAGES if kind == zmq.DEALER else QUEUED_REQUESTS)
    made.set(zmq.MAXMSGSIZE, MAX_FRAME)
    made.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    made.set(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    # No heartbeats on either side: libzmq 4.3.5 aborts when it sends or answers one on a connection that ended while
    # its queue was full. TCP keepalive detects dead peers instead.
    made.set(zmq.TCP_KEEPALIVE, 1)
    made.set(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE)
    made.set(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE)
    made.set(zmq.TCP_KEEPALIVE_CNT, 3)
    made.set(zmq.TCP_MAXRT, _UNCONFIRMED_MS)
    made.set(zmq.IPV6, int("[" in endpoint))
    return made
