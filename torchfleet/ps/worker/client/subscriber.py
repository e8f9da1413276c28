"""A client that follows the tables of all servers: it reads them once, and asks for what changed since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torchfleet.base.errors import WireError
from torchfleet.ps.net.wire import Array, Command, pack, unpack
from torchfleet.ps.server.saves.changed_rows import ChangedBody
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Future
from torchfleet.ps.worker.client.shard import Floats, Keys


@dataclass(frozen=True)
class ChangedRows:
    """Rows of one table that changed, and keys whose rows were dropped."""

    keys: Keys
    values: Floats
    gone: Keys


@dataclass(frozen=True)
class Changed:
    """A server's reply: what changed there, by the number of the table."""

    body: ChangedBody
    rows: dict[int, ChangedRows] = field(default_factory=dict)
    blocks: dict[int, Floats] = field(default_factory=dict)


class Subscriber(Client):
    """The client of a process that follows the tables."""

    def changed(self, subscriber: int, received: Sequence[int]) -> list[Changed]:
        """What changed on each server since the reply number `received` of that server. `subscriber`: a random number
        of this process, 63 bits. Arrays are views of the messages.
        """
        bodies = [[pack({"subscriber": subscriber, "received": number})] for number in received]
        asked: Future[list[Changed]] = self._ask(
            Command.SUBSCRIBE, bodies, finish=lambda replies: [_changed(reply) for reply in replies]
        )
        return asked.result()


def _changed(reply: Sequence[Array]) -> Changed:
    if not reply:
        raise WireError("expected what changed, found no array")
    body = unpack(reply[0], ChangedBody)
    num_rows, arrays = 3 * len(body.rows), reply[1:]
    num_arrays = num_rows + len(body.blocks)
    if len(arrays) != num_arrays:
        raise WireError(f"expected {num_arrays} arrays of changed rows and blocks, found {len(arrays)}")
    rows = {number: _rows(*arrays[3 * i : 3 * i + 3]) for i, number in enumerate(body.rows)}
    blocks = {number: array.data.reshape(-1) for number, array in zip(body.blocks, arrays[num_rows:], strict=True)}
    if any(block.dtype != np.float32 for block in blocks.values()):
        raise WireError("expected blocks of float32")
    return Changed(body, rows, blocks)


def _rows(keys: Array, values: Array, gone: Array) -> ChangedRows:
    found = ChangedRows(keys.data.reshape(-1), values.data, gone.data.reshape(-1))
    types = [str(array.data.dtype) for array in (keys, values, gone)]
    if types != ["uint64", "float32", "uint64"] or len(found.keys) != len(found.values):
        raise WireError(f"expected keys, their rows and removed keys, found {types} of {len(found.keys)} rows")
    return found
