"""Frames over ZeroMQ: tcp and ipc, plain or with CURVE encryption and authentication."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from torchfleet.errors import FleetError
from torchfleet.net.keys import KeyFolder, require_keys
from torchfleet.net.open_files import Door, bind
from torchfleet.net.transport import Handler
from torchfleet.net.wire import MAX_FRAME, Frame, Role

QUEUED_MESSAGES = 64  # per peer and direction; a sender finds the queue full and waits, memory stays bounded
TICK = 0.05  # seconds between two looks at the clock
_HEARTBEAT_MS = 5000


class Listener:
    """A server's socket. Requests of all clients come in one queue, to be answered one after the other."""

    def __init__(self, endpoint: str, keys: KeyFolder | None = None, insecure: bool = False) -> None:
        require_keys(endpoint, keys, insecure)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._roles = keys.roles() if keys else {}
        self._authenticator = self._admit_only(self._roles) if keys else None
        self._socket = _socket(self._context, zmq.ROUTER, endpoint)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self.num_dropped_replies = 0
        if keys:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.server_pair()
            self._socket.curve_server = True
        self._door: Door | None = None
        try:
            self._door = Door(bind(self._socket, endpoint))
        except zmq.ZMQError as error:
            self.close()
            raise FleetError(
                f"cannot listen on {endpoint}: {error}. Is the port in use, the address of this machine?"
            ) from None
        self.endpoint = str(self._socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    def serve(self, handler: Handler, is_over: Callable[[], bool]) -> None:
        """Answer requests until `is_over`, which is looked at after every request and every TICK."""
        assert self._door
        next_tick, worked = 0.0, None
        while not is_over():
            request = self._next(0 if worked else int(TICK * 1000) if worked is None else 1)
            if request is not None:
                peer, *frames = request
                role = self._role(frames[-1]) if self._roles and frames else None
                self._reply(handler.handle(peer.bytes, [frame.buffer for frame in frames], role))
                del request, peer, frames  # the memory of a request is free before the next one is taken
            worked = handler.work()
            now = time.monotonic()
            if worked or now >= next_tick:
                self._reply(handler.tick(now))
                self._door.look()
                next_tick = now + TICK

    def _next(self, timeout_ms: int) -> list[zmq.Frame] | None:
        """The next request. Under load there is one already, and a poll, which is dearer than taking it, is saved."""
        with contextlib.suppress(zmq.Again):
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        if timeout_ms and self._socket.poll(timeout_ms):
            return self._socket.recv_multipart(copy=False)
        return None

    def close(self) -> None:
        self._socket.close(linger=500)
        if self._door:
            self._door.close()
        if self._authenticator:
            self._authenticator.stop()
        self._context.term()

    def _reply(self, replies: Sequence[tuple[Any, list[Frame]]]) -> None:
        for peer, frames in replies:
            try:
                self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:  # the peer is gone, or does not read its replies: it will ask again or not
                self.num_dropped_replies += 1

    def _role(self, frame: zmq.Frame) -> Role | None:
        return self._roles.get(str(frame.get("User-Id")))

    def _admit_only(self, roles: dict[str, Role]) -> ThreadAuthenticator:
        class Provider:
            @staticmethod
            def callback(domain: str, key: bytes) -> bool:
                return key.decode() in roles  # in printable form, as in the key files

        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback(domain="*", credentials_provider=Provider())
        return authenticator


class SocketChannel:
    """A client's connection to one server. Belongs to one thread."""

    def __init__(self, endpoint: str, keys: KeyFolder | None = None, role: Role = Role.WORKER) -> None:
        self._endpoint = endpoint
        self._pair = keys.client_pair(role) if keys else None
        self._server_key = keys.server_public() if keys else b""
        self._socket = self._connect()

    def send(self, frames: Sequence[Frame]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        if timeout > 0 and not self._socket.poll(max(1, int(timeout * 1000))):
            return None
        with contextlib.suppress(zmq.Again):
            return [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        return None

    def reconnect(self) -> None:
        self._socket.close(linger=0)
        self._socket = self._connect()

    def close(self) -> None:
        self._socket.close(linger=0)

    def now(self) -> float:
        return time.monotonic()

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
        return connection


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
    made.set(zmq.RCVHWM, QUEUED_MESSAGES)
    made.set(zmq.MAXMSGSIZE, MAX_FRAME)
    made.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    made.set(zmq.HEARTBEAT_TIMEOUT, 6 * _HEARTBEAT_MS)
    made.set(zmq.IPV6, int("[" in endpoint))
    return made
