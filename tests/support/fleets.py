"""Fleets to test with: servers in this process, behind sockets in threads, as processes; and what they must hold."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support import processes

from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.sockets import Listener, SocketChannel
from torchfleet.ps.net.transport import Channel, InProcess
from torchfleet.ps.net.wire import ERROR, Array, Command, Message, Reply, Role, decode_reply, encode, pack, unpack
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

MAX_TABLE_BYTES = 1 << 26
WAIT = 60.0  # seconds; what takes longer hangs, on busy cores too
LEAST_PATIENCE = Patience(timeout=WAIT, retries=2)
OWN_RATE = np.array([np.nan])  # in a push by hand: the table's own learning rate


class Fleet:
    """Servers and the clients made for them."""

    def __init__(
        self, connect: Callable[[Role], Sequence[Channel]], names: Sequence[str], servers: Sequence[Any]
    ) -> None:
        self._connect, self.names, self.servers = connect, names, servers
        self._clients: list[Client] = []

    @property
    def num_servers(self) -> int:
        return len(self.names)

    @property
    def num_requests(self) -> int:
        """That servers of this process have taken so far."""
        return sum(getattr(server, "server", server).state.counters.num_requests for server in self.servers)

    def client(self, **options: Any) -> Client:
        options = {"patience": LEAST_PATIENCE, "names": self.names, **options}
        made = Client(self._connect(options.get("role", Role.FIRST_WORKER)), **options)
        self._clients.append(made)
        return made

    def close(self) -> None:
        for client in self._clients:
            client.close()


class ServerThread:
    """A server behind a socket, in a thread of this process; a new one, if none is given."""

    def __init__(self, endpoint: str, keys: KeyFolder | None = None, server: Server | None = None) -> None:
        self.server = server or Server(MAX_TABLE_BYTES)
        self._over = threading.Event()
        self._listener = Listener(endpoint, keys)
        self.endpoint = self._listener.endpoint
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def num_dropped_replies(self) -> int:
        return self._listener.num_dropped_replies

    def join(self, timeout: float = WAIT) -> None:
        """Wait until it has ended by itself."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"the server at {self.endpoint} does not end"

    def close(self) -> None:
        self._over.set()
        self.join()

    def _serve(self) -> None:
        try:
            self._listener.serve(self.server, lambda: self._over.is_set() or self.server.is_stopping)
        finally:
            self._listener.close()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkedServer(ServerProcess):
    """One whose process the nursery forks."""

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return processes.Popen(command, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def in_process(num_servers: int = 1) -> Iterator[Fleet]:
    servers = [Server(MAX_TABLE_BYTES) for _ in range(num_servers)]
    transports = [InProcess(server) for server in servers]
    names = [f"server {i}" for i in range(num_servers)]
    with contextlib.closing(Fleet(lambda role: [way.connect() for way in transports], names, servers)) as fleet:
        yield fleet


@contextlib.contextmanager
def in_threads(endpoints: Sequence[str], keys: KeyFolder | None = None) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        threads = [stack.enter_context(ServerThread(endpoint, keys)) for endpoint in endpoints]
        yield stack.enter_context(_over_sockets(threads, keys))


@contextlib.contextmanager
def in_processes(num_servers: int = 1, *options: str) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ForkedServer("tcp://127.0.0.1:0", *options)) for _ in range(num_servers)]
        yield stack.enter_context(_over_sockets(servers, None))


def _over_sockets(
    servers: Sequence[ServerThread | ServerProcess], keys: KeyFolder | None
) -> contextlib.AbstractContextManager[Fleet]:
    names = [f"server {i} ({server.endpoint})" for i, server in enumerate(servers)]
    return contextlib.closing(
        Fleet(lambda role: [SocketChannel(server.endpoint, keys, role) for server in servers], names, servers)
    )


def endpoints(transport: str, num_servers: int, folder: Path) -> list[str]:
    """Addresses to listen on: any free ports of the loopback interface, or paths in `folder`."""
    if transport == "tcp":
        return ["tcp://127.0.0.1:0"] * num_servers
    return [f"ipc://{folder}/{i}" for i in range(num_servers)]


class Talk:
    """A peer of a Server that writes its messages by hand. Every request is a new call and, if it says `once`, the
    next change; any field of the message can be given instead."""

    def __init__(self, server: Server, client: int = 7, role: int = Role.LAUNCHER, worker: int = 0) -> None:
        self.server, self.client, self.role, self.worker = server, client, role, worker
        self.incarnation = client  # as if every client were a process of its own
        self._calls, self._sequences = itertools.count(1), itertools.count(1)

    def message(self, command: int, *arrays: Array, once: bool = False, **fields: Any) -> Message:
        sequence = next(self._sequences) if once else 0
        base = {"role": self.role, "worker": self.worker, "client": self.client, "call": next(self._calls)}
        base["incarnation"] = self.incarnation
        return Message(command, **{**base, "sequence": sequence, "floor": sequence, "arrays": list(arrays), **fields})

    def send(self, message: Message) -> list[Reply]:
        """All replies that the server has ready after it, to whomever they go."""
        return [decode_reply(frames) for _, frames in self.server.handle(self, encode(message), None)]

    def ask(self, command: int, *arrays: Array, once: bool = False, **fields: Any) -> Reply:
        """The one reply."""
        (reply,) = self.send(self.message(command, *arrays, once=once, **fields))
        return reply

    def create(self, spec: TableSpec) -> None:
        assert_ok(self.ask(Command.CREATE_TABLE, pack(spec)))

    def pull(self, spec: TableSpec, keys: npt.ArrayLike, **fields: Any) -> npt.NDArray[np.float32]:
        reply = self.ask(Command.PULL, keys_of(spec, keys), **fields)
        assert_ok(reply)
        return reply.arrays[0].data

    def push(self, spec: TableSpec, keys: npt.ArrayLike, grads: npt.ArrayLike, **fields: Any) -> Reply:
        return self.ask(Command.PUSH, *push_arrays(spec, keys, grads), **{"once": True, **fields})


def keys_of(spec: TableSpec, keys: npt.ArrayLike) -> Array:
    return Array(spec.number, np.asarray(keys, np.uint64).reshape(-1))


def values_of(spec: TableSpec, values: npt.ArrayLike) -> Array:
    return Array(spec.number, np.asarray(values, np.float32))


def push_arrays(spec: TableSpec, keys: npt.ArrayLike, grads: npt.ArrayLike) -> list[Array]:
    return [Array(0, OWN_RATE), keys_of(spec, keys), values_of(spec, grads)]


def refusal(reply: Reply) -> tuple[str, str]:
    """Kind and text of a reply that must be an error."""
    assert reply.status == ERROR, f"expected an error, found {reply}"
    body = unpack(reply.arrays[0], dict)
    return body["kind"], body["text"]


def assert_ok(reply: Reply) -> None:
    assert reply.status != ERROR, refusal(reply)


class SgdOracle:
    """A sparse table under SGD in plain numpy. Bit-equal to the servers' when all numbers are small multiples of a
    power of two: then no sum is rounded, in whatever order it is taken."""

    def __init__(self, dim: int, lr: float, first: float = 0.0) -> None:
        self._dim, self._lr, self._first = dim, lr, first
        self._rows: dict[int, npt.NDArray[np.float32]] = {}

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def pull(self, keys: npt.ArrayLike) -> npt.NDArray[np.float32]:
        wanted = np.asarray(keys).reshape(-1)
        out = np.empty((len(wanted), self._dim), np.float32)
        for i, key in enumerate(wanted.tolist()):
            out[i] = self._rows.setdefault(key, np.full(self._dim, self._first, np.float32))
        return out

    def push(self, keys: npt.ArrayLike, grads: npt.NDArray[np.float32], lr: float | None = None) -> None:
        self.pull(keys)
        for key, grad in zip(np.asarray(keys).reshape(-1).tolist(), grads, strict=True):
            self._rows[key] = self._rows[key] - np.float32(self._lr if lr is None else lr) * grad

    def assign(self, keys: npt.ArrayLike, values: npt.NDArray[np.float32]) -> None:
        for key, value in zip(np.asarray(keys).reshape(-1).tolist(), values, strict=True):
            self._rows[key] = value.copy()

    def erase(self, keys: npt.ArrayLike) -> None:
        for key in np.asarray(keys).reshape(-1).tolist():
            self._rows.pop(key, None)


def eighths(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    """Random multiples of 1/8 between -4 and 4."""
    return (rng.integers(-32, 33, shape) / 8).astype(np.float32)
