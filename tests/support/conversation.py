"""A fixed conversation of two workers with two servers, and a record of every byte of it.

The record is recorded/wire.json: workers and servers of one version of the protocol must say the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

START = 1_700_000_000  # seconds since 1970
ADAM = {"name": "adam", "lr": 0.01, "eps": 1e-8}
TABLES: list[dict[str, Any]] = [
    {"name": "words", "dim": 4, "rule": ADAM, "initializer": {"name": "uniform", "a": -0.1, "b": 0.1}, "seed": 7},
    {
        "name": "items",
        "dim": 2,
        "rule": {"name": "adagrad", "lr": 0.1},
        "initializer": {"name": "normal", "a": 0.0, "b": 0.1},
        "entry": {"count": 2},
        "shrink": {"delete_after_unseen_days": 7.0, "max_rows": 1000},
    },
    {"name": "days", "kind": "array", "dim": 3, "size": 10, "rule": {"name": "sgd", "lr": 0.5}},
    {"name": "dense", "kind": "dense", "size": 6, "rule": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
]


class Exchange(NamedTuple):
    """A request at a server's door, and the replies that were then ready, with those who get them."""

    server: int
    peer: str
    request: list[str]  # frames, in hex
    replies: list[tuple[str, list[str]]]


class Door:
    """A server behind a transport that writes everything down. Calls are answered at once, on the same thread."""

    def __init__(self, server: Any, number: int, record: list[Exchange]) -> None:
        self._server, self._number, self._record = server, number, record
        self._channels: dict[str, Line] = {}

    def connect(self, peer: str) -> Line:
        return self._channels.setdefault(peer, Line(self, peer))

    def call(self, peer: str, frames: Sequence[Any]) -> None:
        request = [bytes(frame) for frame in frames]
        replies = answers(self._server, peer, request)
        self._record.append(Exchange(self._number, peer, hexed(request), [(to, hexed(reply)) for to, reply in replies]))
        for to, reply in replies:
            self._channels[to].replies.append(reply)


class Line:
    """One client's way to one server (a Channel)."""

    def __init__(self, door: Door, peer: str) -> None:
        self._door, self._peer = door, peer
        self.replies: list[list[bytes]] = []

    def send(self, frames: Sequence[Any]) -> bool:
        self._door.call(self._peer, frames)
        return True

    def receive(self, timeout: float) -> list[bytes] | None:
        assert self.replies or timeout == 0.0, "everything is answered at once here"
        return self.replies.pop(0) if self.replies else None

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass

    def now(self) -> float:
        return 0.0


def answers(server: Any, peer: str, frames: list[bytes]) -> list[tuple[str, list[bytes]]]:
    """What a server says to a request, work in slices included; time stands still."""
    replies = list(server.handle(peer, frames, None))
    while server.work():
        pass
    replies += server.tick(0.0)
    return [(str(to), [bytes(frame) for frame in reply]) for to, reply in replies]


def hexed(frames: Sequence[bytes]) -> list[str]:
    return [frame.hex() for frame in frames]


class Wire(NamedTuple):
    """What a conversation is made with, wherever it lies in the package."""

    server: Callable[[], Any]
    client: Callable[..., Any]  # (channels, names=, worker=, role=)
    spec: Callable[[dict[str, Any]], Any]
    shrink: Callable[..., Any]
    array: Callable[[int, Any], Any]
    roles: Any
    flags: Any  # a module with SYNC, DENSE_BACK, DELTA
    set_dice: Callable[[int], None]  # what secrets.randbits gives from now on


def converse(wire: Wire) -> list[Exchange]:
    """Every command that does not write files, with what may go wrong at once."""
    record: list[Exchange] = []
    wire.set_dice(900)
    doors = [Door(wire.server(), number, record) for number in range(2)]
    first, second = _worker(wire, doors, 0), _worker(wire, doors, 1)
    launcher = _client(wire, doors, "launcher", 0, wire.roles.LAUNCHER, 103)
    first.ping()
    wire.set_dice(1)
    first.set_clock(START)
    specs = [wire.spec(table) for table in TABLES]
    for spec in specs:
        first.create_table(spec)
        second.attach(spec)
    _rows(wire, first, second)
    _meetings(wire, first, second)
    for number, ask in enumerate((lambda: first.set_clock(START + 3600), lambda: _shrink(wire, first))):
        wire.set_dice(20 + number)
        ask()
    wire.set_dice(30)
    second.inspect("words", 3)
    first.erase("words", np.array([5, 77], np.uint64))
    _refused(wire, first)
    _rounds(first, second)
    for worker in (first, second):
        worker.join({"host": "here", "pid": 1, "num_workers": 2, "timeout": 60.0, "sync_timeout": 60.0})
        if worker is second:  # the other one has left: it begins alone
            worker.enter(1, 60.0)
        worker.leave()
    first.give_tables(["server 0", "server 1"], specs, {})  # which they have: a repeat
    launcher.stop_servers()
    return record


def _client(wire: Wire, doors: list[Door], name: str, worker: int, role: Any, dice: int) -> Any:
    wire.set_dice(dice)
    return wire.client([door.connect(name) for door in doors], worker=worker, role=role, process=dice)


def _worker(wire: Wire, doors: list[Door], index: int) -> Any:
    role = wire.roles.FIRST_WORKER if index == 0 else wire.roles.WORKER
    return _client(wire, doors, f"worker {index}", index, role, 101 + index)


def _rows(wire: Wire, first: Any, second: Any) -> None:
    flags = wire.flags
    keys = np.array([5, 1 << 40, 77, 5, 2**64 - 1], np.uint64)
    first.set_dense("dense", np.arange(6, dtype=np.float32))
    first.assign("days", np.arange(10, dtype=np.uint64), np.arange(30, dtype=np.float32).reshape(10, 3))
    first.pull("words", keys).result()
    second.pull("words", np.array([5, 6], np.uint64), create=False).result()
    for worker in (first, second):  # a row at the second sight
        worker.pull_tables({"items": keys, "words": keys[:2], "days": np.array([9, 0], np.uint64)}).result()
    grads = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(2, 4)
    first.push("words", keys[:2], grads).result()
    second.push("items", keys[:3], np.full((3, 2), 0.25, np.float32), lr=0.05).result()
    block = np.linspace(0.0, 1.0, 6, dtype=np.float32)
    sections = {"words": (keys[:2], grads), "dense": block}
    first.push_tables(sections, {"words": 0.02}, {"words": [1.0, 0.0]}, flags.DENSE_BACK).result()
    waiting = first.push_tables({"dense": block}, flags=flags.SYNC | flags.DENSE_BACK)
    second.push_tables({"dense": -2 * block}, flags=flags.SYNC | flags.DENSE_BACK).result()
    waiting.result()
    first.pull_changed(["words", "dense"], [0, 0]).result()
    second.push_tables({"words": (keys[:2], grads), "dense": block}, flags=flags.DELTA).result()
    first.pull_changed(["words", "dense"], [1, 1]).result()
    first.pull_dense("dense").result()
    for worker in (first, second):
        worker.flush()


def _meetings(wire: Wire, first: Any, second: Any) -> None:
    first.barrier("here", 1, timeout=60.0)
    first.gather("sizes", 1, b"three", 1, 60.0)
    first.send("shuffle", 1, 1, [wire.array(0, np.arange(5, dtype=np.uint64)), wire.array(0, np.zeros(0, np.uint8))])
    second.take("shuffle", 1, 0)
    second.take("shuffle", 1, 1)
    lists = {"name": "files", "number": 0, "lease": 60.0}
    first.files({**lists, "files": ["part-0", "part-1"]})
    first.files({**lists, "take": 1})
    first.files({**lists, "done": ["part-0"]})


def _rounds(first: Any, second: Any) -> None:
    body = {"round": 1, "bucket": 0, "workers": [0, 1], "samples": 2.0, "rates": [0.5]}
    waiting = first.exchange(1, body, np.linspace(0.0, 1.0, 3, dtype=np.float32), 60.0)
    second.exchange(1, {**body, "samples": 6.0}, np.ones(3, np.float32), 60.0).result()
    waiting.result()
    first.exchange(1, {"round": 1, "bucket": 0, "workers": [1], "again": True}, None, 60.0).result()


def _shrink(wire: Wire, first: Any) -> None:
    first.shrink("items", wire.shrink(where="unseen_days >= 0"))


def _refused(wire: Wire, first: Any) -> None:
    """Errors, as they are told."""
    first.attach(wire.spec({"name": "strange"}))  # which was never created
    for ask in (lambda: first.pull("strange", [1]).result(), first.stop_servers):
        try:
            ask()
        except Exception:  # which one is what the record says
            continue
        raise AssertionError("this should have been refused")
