"""What a client does that means no good, each until its time is up: started as a process by benchmarks.abuse.

python -m benchmarks.abuse_attacks NAME ENDPOINT SECONDS [KEYS]
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.wire import VERSIONS, Array, Command, Message, Role, encode, pack
from torchfleet.ps.tables.settings.spec import TableSpec

SPEC = TableSpec("rows", dim=10)
BIG = TableSpec("big", dim=10)
TRAINED = TableSpec("trained", dim=10)  # by the workers of --training
MEGABYTE = 1 << 20
_CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)  # a greeting of ZMTP 3.0
_NULL = _CURVE.replace(b"CURVE", b"NULL\0")


class Attacker:
    """A connection without manners."""

    def __init__(self, endpoint: str, seconds: float, keys: KeyFolder | None) -> None:
        self.endpoint, self.keys = endpoint, keys
        self._end = time.monotonic() + seconds
        self._context = zmq.Context()
        self._calls = itertools.count(1)
        self.socket = self.connect()

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self._end

    def connect(self, pair: tuple[bytes, bytes] | None = None) -> Any:
        made = self._context.socket(zmq.DEALER)
        made.set(zmq.LINGER, 0)
        made.set(zmq.SNDTIMEO, 200)
        made.set(zmq.SNDHWM, 8)
        if self.keys is not None:
            made.curve_publickey, made.curve_secretkey = pair or self.keys.client_pair(Role.WORKER)
            made.curve_serverkey = self.keys.server_public()
        made.connect(self.endpoint)
        made.send(b"")  # as an honest client begins
        return made

    def send(self, command: int, *arrays: Array, **fields: Any) -> None:
        """As fast as the server takes it; what it does not take is left out."""
        call = next(self._calls)
        message = Message(command, Role.WORKER, call=call, arrays=list(arrays), **{"client": 66, **fields})
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(encode(message), copy=False)

    def read(self) -> None:
        while self.socket.poll(0):
            self.socket.recv_multipart(copy=False)

    def plain(self) -> socket.socket:
        host, port = self.endpoint.removeprefix("tcp://").split(":")
        return socket.create_connection((host, int(port)), timeout=2.0)


def leave(attacker: Attacker) -> None:
    """LEAVE in the name of every worker."""
    while attacker.has_time:
        for worker in range(8):
            attacker.send(Command.LEAVE, worker=worker, incarnation=66)
        attacker.read()
        time.sleep(0.05)


def frames(attacker: Attacker) -> None:
    """A message of a million frames of a byte, again and again."""
    message = [zmq.Frame(b"x")] * 1_000_000
    while attacker.has_time:
        with contextlib.suppress(zmq.ZMQError):
            attacker.socket.send_multipart(message, copy=False)
        time.sleep(2.0)


def unread(attacker: Attacker) -> None:
    """Pulls with replies of 45 MB that it never reads."""
    keys = Array(BIG.number, np.arange(1_125_000, dtype=np.uint64))
    for _ in range(70):
        if attacker.has_time:
            attacker.send(Command.PULL, keys, flags=VERSIONS)
    while attacker.has_time:
        time.sleep(0.1)


def gathers(attacker: Attacker) -> None:
    """Gathers of 16 MiB at which no other worker arrives, or that are kept for a repeat."""
    data = Array(0, np.zeros(16 * MEGABYTE, np.uint8))
    for number in range(60):
        body = {"name": f"g{number}", "round": 1, "num_workers": 1 + number % 2, "timeout": 600.0, "first": 5}
        attacker.send(Command.GATHER, pack(body), data, client=1000 + number, worker=5)
        attacker.read()
    while attacker.has_time:
        attacker.read()
        time.sleep(0.05)


def barriers(attacker: Attacker) -> None:
    """Barriers with names of 32 MiB."""
    for number in itertools.count(1):
        if not attacker.has_time:
            return
        body = {"name": f"{number}" + "x" * 32 * MEGABYTE, "num_workers": 8, "timeout": 600.0}
        attacker.send(Command.BARRIER, pack(body), sequence=number, floor=1, worker=5)
        attacker.read()
        time.sleep(0.2)


def refused(attacker: Attacker) -> None:
    """Changes that are refused with long texts, by many clients, never settled."""
    wrong = [Array(0, np.array([np.nan])), Array(7, np.zeros(1, np.uint64)), Array(7, np.zeros((1, 3), np.float32))]
    for client in itertools.count(1):
        for sequence in range(1, 4096):
            if not attacker.has_time:
                return
            attacker.send(Command.PUSH, *wrong, client=client, sequence=sequence, floor=1)
            if sequence % 8 == 0:
                attacker.read()


def long_pulls(attacker: Attacker) -> None:
    """Pulls of three million keys, about as many as are answered, one after the other, read as they come."""
    keys = Array(BIG.number, np.random.default_rng(1).integers(0, 1_000_000, 3_000_000).astype(np.uint64))
    while attacker.has_time:
        attacker.send(Command.PULL, keys, flags=VERSIONS)
        if attacker.socket.poll(int(max(0.0, 1000 * (attacker._end - time.monotonic())))):
            attacker.socket.recv_multipart(copy=False)


def inspections(attacker: Attacker) -> None:
    """Summaries of a whole table, a thousand at a time."""
    for token in itertools.count(1):
        if not attacker.has_time:
            return
        attacker.send(Command.INSPECT, pack({"table": BIG.name, "top": 1000, "token": token}))
        if token % 100 == 0:
            attacker.read()
            time.sleep(0.02)


def fresh_keys(attacker: Attacker) -> None:
    """New keys, a hundred thousand at a time."""
    for start in itertools.count(1 << 40, 100_000):
        if not attacker.has_time:
            return
        attacker.send(Command.PULL, Array(BIG.number, np.arange(start, start + 100_000, dtype=np.uint64)))
        attacker.read()


def client_numbers(attacker: Attacker) -> None:
    """A push of every client number there is, to make the server forget others'."""
    push = [Array(0, np.array([np.nan])), Array(SPEC.number, np.zeros(0, np.uint64))]
    push.append(Array(SPEC.number, np.zeros((0, 10), np.float32)))
    for client in itertools.count(1 << 32):
        if not attacker.has_time:
            return
        attacker.send(Command.PUSH, *push, client=client, sequence=1, floor=1)
        if client % 8 == 0:
            attacker.read()


def handshake_frame(attacker: Attacker) -> None:
    """Four connections at a time that send a frame of 1 GiB in the place of a handshake."""
    block = bytes(MEGABYTE)
    opened: list[socket.socket] = []
    while attacker.has_time:
        with contextlib.suppress(OSError):
            if len(opened) < 4:
                opened.append(attacker.plain())
                opened[-1].sendall((_NULL if attacker.keys is None else _CURVE) + b"\x06" + struct.pack(">Q", 1 << 30))
        for connection in list(opened):
            try:
                connection.sendall(block)
            except OSError:
                opened.remove(connection)
                connection.close()
        time.sleep(0.01)


def handshakes(attacker: Attacker) -> None:
    """Three hundred handshakes a second with a key that the server does not know."""
    assert attacker.keys is not None
    pair, opened = zmq.curve_keypair(), []
    while attacker.has_time:
        opened.append(attacker.connect(pair))
        if len(opened) > 200:
            opened.pop(0).close()
        time.sleep(1 / 300)


ATTACKS: dict[str, Callable[[Attacker], None]] = {
    attack.__name__: attack
    for attack in (
        leave, frames, unread, gathers, barriers, refused, long_pulls, inspections, fresh_keys, client_numbers,
        handshake_frame, handshakes,
    )
}  # fmt: skip


def main() -> None:
    name, endpoint, seconds, *key_dir = sys.argv[1:]
    os.nice(10)  # it stands for another machine: the server's cores are not its own
    attacker = Attacker(endpoint, float(seconds), KeyFolder(key_dir[0]) if key_dir else None)
    ATTACKS[name](attacker)
    os._exit(0)  # without waiting for what is still queued


if __name__ == "__main__":
    main()
