"""Messages as bytes, and the decoders that they meet: of frames, and of a whole server."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
from support.fuzz.search import Target
from support.messages import INTERNAL_ERROR

from torchfleet.base.errors import WireError
from torchfleet.ps.net import wire
from torchfleet.ps.net.wire import Array, Command, Message, Role
from torchfleet.ps.server import among_workers, arrays, commands, sections
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state import handshake
from torchfleet.ps.tables.rows import wire_rows
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

_PER_SERVER = 1000  # messages to one server before a fresh one takes its place
SPEC = TableSpec("rows", dim=2, rule=Rule("sgd", lr=1.0))
THIN = TableSpec("thin", dim=2, rule=Rule("sgd", lr=1.0), format=RowFormat("float16", wire="int8"))


def frames_of(data: bytes) -> list[bytes]:
    """Frames, each of which stands behind its length; the last takes the rest."""
    frames = []
    while len(data) > 2:
        size = int.from_bytes(data[:2], "little")
        frames.append(data[2 : 2 + size])
        data = data[2 + size :]
    return frames


def joined(message: Message) -> bytes:
    frames = [bytes(memoryview(frame)) for frame in wire.encode(message)]
    return b"".join(struct.pack("<H", len(frame)) + frame for frame in frames)


def messages() -> list[bytes]:
    keys = Array(SPEC.number, np.arange(3, dtype=np.uint64))
    rows = Array(SPEC.number, np.ones((3, 2), np.float32))
    thin = Array(THIN.number, keys.data), Array(THIN.number, np.ones((3, 8), np.uint8))
    barrier = {"name": "b", "num_workers": 2, "timeout": 0.5}
    join = {"host": "h", "pid": 1, "num_workers": 3, "timeout": 1.0, "sync_timeout": 2.0}
    claims = {"release": "0", "server": 0, "num_servers": 1, "strategy": {"a_sync": True, "m": "x"}, "tables": [SPEC]}
    part = {"round": 1, "bucket": 0, "workers": [0, 1, 2], "samples": 2.0, "rates": [0.5]}
    made = [
        Message(Command.PING),
        Message(Command.STATS),
        Message(Command.CREATE_TABLE, Role.LAUNCHER, arrays=[wire.pack(SPEC)]),
        Message(Command.PULL, arrays=[keys]),
        Message(Command.PUSH, arrays=[Array(0, np.full((1, 2), np.nan)), keys, rows]),
        Message(Command.PUSH, arrays=[Array(0, np.full((1, 2), np.nan)), *thin]),
        Message(Command.SET, Role.FIRST_WORKER, arrays=[keys, rows]),
        Message(Command.ERASE, Role.FIRST_WORKER, arrays=[keys]),
        Message(Command.BARRIER, arrays=[wire.pack(barrier)]),
        Message(Command.LEAVE),
        Message(Command.JOIN, arrays=[wire.pack(join), wire.pack(claims)]),
        Message(Command.EXCHANGE, arrays=[wire.pack(part), rows]),
        Message(Command.ENTER, arrays=[wire.pack({"number": 1})]),
        Message(Command.PULL_CHANGED, arrays=[Array(0, np.zeros(1, np.uint64)), Array(SPEC.number, np.zeros(0))]),
    ]
    for i, message in enumerate(made):
        message.incarnation = 5
        message.worker, message.client, message.call, message.sequence, message.floor = i % 3, 9, i + 1, 1, 1
    return [joined(message) for message in made]


def wire_target() -> Target:
    def run(data: bytes) -> None:
        frames = frames_of(data)
        message = wire.decode(frames)
        again = [bytes(memoryview(frame)) for frame in wire.encode(message)]
        assert wire.decode(again).arrays is not None
        wire.decode_reply(frames)

    return Target("wire", run, messages(), [wire], [b"TFLT"])


def server_target() -> Target:
    """Whatever a server is sent, it answers, and not with an internal error. It may not stop, and not write files."""
    state: dict[str, Any] = {"num": _PER_SERVER}

    def run(data: bytes) -> None:
        if state["num"] >= _PER_SERVER:
            state["server"], state["num"] = Server(max_table_bytes=1 << 16), 0
            state["server"].state.add_table(SPEC)
            state["server"].state.add_table(THIN)
        state["num"] += 1
        frames = frames_of(data)
        with contextlib.suppress(WireError):
            if wire.decode(frames).command in (Command.SAVE, Command.STOP):
                return
        for _, reply in state["server"].handle("peer", frames, None):
            answer = wire.decode_reply(reply)
            if answer.status == wire.ERROR:
                text = answer.arrays[-1].data.tobytes() if answer.arrays else b""
                assert INTERNAL_ERROR.encode() not in text, text
        state["server"].work()

    decoders = [wire, commands, among_workers, handshake, arrays, sections, wire_rows]
    return Target("server", run, messages(), decoders, [b"TFLT"])
