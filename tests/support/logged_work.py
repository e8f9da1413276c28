"""Random requests of all kinds for a server, from a seed, and the whole state of a server as plain values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from torchfleet.ps.net.wire import (
    BOUNDED,
    DELTA,
    DENSE_BACK,
    GATHERED,
    SYNC,
    Array,
    Command,
    Frame,
    Message,
    Role,
    encode,
    pack,
)
from torchfleet.ps.server.log import state_copy
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.rows.row_statistics import is_counted
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

NUM_WORKERS, NUM_KEYS = 2, 300
SPECS = [
    TableSpec("narrow", dim=2),
    TableSpec("wide", dim=16, rule=Rule("adagrad")),
    TableSpec("counted", dim=4, entry=AdmissionEntry(count=2), shrink=Shrink(max_rows=60)),
    TableSpec("aged", dim=4, shrink=Shrink(delete_after_unseen_days=1.0, every_hours=1.0)),
    TableSpec("ids", "array", dim=3, size=NUM_KEYS),
    TableSpec("dense", "dense", size=7, rule=Rule("adam")),
]


class MemorySink:
    """Keeps copies of all entries, and confirms them when it is told to."""

    def __init__(self) -> None:
        self.entries: list[list[bytes]] = []
        self.last = self.held_at = 0  # held_at > 0: nothing above it is confirmed
        self.why = ""

    def append(self, index: int, entry: Sequence[Frame]) -> None:
        self.entries.append([bytes(memoryview(f).cast("B")) if memoryview(f).nbytes else b"" for f in entry])
        self.last = index

    def flush(self, after: float = 0.0) -> None:
        pass

    def confirmed(self) -> int:
        return min(self.last, self.held_at) if self.held_at else self.last

    def trouble(self) -> str:
        return self.why

    def close(self) -> None:
        pass


class Work:
    """Gives requests to a handler, one `step` after the other; all that it does follows from the seed."""

    def __init__(self, handler: Any, seed: int) -> None:
        self.handler, self.dice = handler, random.Random(seed)
        self._numpy = np.random.default_rng(seed)
        self._calls, self._tokens = itertools.count(1), itertools.count(1)
        self._sequences = [itertools.count(1) for _ in range(NUM_WORKERS)]
        self._rounds = itertools.count(1)
        self._sent: list[list[Frame]] = []
        self.now, self.replies = 0.0, 0
        for spec in SPECS:
            self._ask(Command.CREATE_TABLE, 0, pack(spec))
        for worker in range(NUM_WORKERS):
            self._join(worker)

    def steps(self, num: int) -> None:
        kinds = [
            *[self._pull] * 4, *[self._push] * 6, self._again, self._bad_push, self._delta, self._set, self._erase,
            self._sync_step, self._gathered, self._bounded, self._meet, self._mail, self._files, self._clock,
            self._shrink, self._tick, self._half_step,
        ]  # fmt: skip
        for _ in range(num):
            self.dice.choice(kinds)()
            self.handler.work()
            self.replies += len(self.handler.tick(self.now))

    def _send(self, frames: list[Frame]) -> None:
        self.replies += len(self.handler.handle(b"peer", frames, None))

    def _ask(self, command: int, worker: int, *arrays: Array, once: bool = False, flags: int = 0) -> None:
        sequence = next(self._sequences[worker]) if once else 0
        message = Message(
            command, Role.FIRST_WORKER, flags, worker, 100 + worker, next(self._calls), sequence,
            max(1, sequence - 5), list(arrays), 1000 + worker,
        )  # fmt: skip
        frames = encode(message)
        if once:
            self._sent = [*self._sent[-20:], frames]
        self._send(frames)

    def _keys(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        keys: np.ndarray[Any, np.dtype[np.uint64]] = self._numpy.integers(0, NUM_KEYS, 12).astype(np.uint64)
        return keys

    def _grads(self, spec: TableSpec, num: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        shape = (spec.size, 1) if spec.is_dense else (num, spec.dim)
        grads: np.ndarray[Any, np.dtype[np.float32]] = self._numpy.normal(size=shape).astype(np.float32)
        return grads

    def _section(self, spec: TableSpec) -> list[Array]:
        keys = np.empty(0, np.uint64) if spec.is_dense else self._keys()
        return [Array(spec.number, keys), Array(spec.number, self._grads(spec, len(keys)))]

    def _pushed(self, specs: Sequence[TableSpec]) -> list[Array]:
        rates = Array(0, np.full((len(specs), 1), np.nan))
        return [rates, *(array for spec in specs for array in self._section(spec))]

    def _worker(self) -> int:
        return self.dice.randrange(NUM_WORKERS)

    def _pull(self) -> None:
        spec = self.dice.choice(SPECS[:5])
        flags = SYNC if self.dice.random() < 0.3 else 0
        self._ask(
            Command.PULL, self._worker(), Array(spec.number, self._keys()), once=spec.name == "counted", flags=flags
        )

    def _push(self) -> None:
        specs = self.dice.sample(SPECS, 2)
        self._ask(Command.PUSH, self._worker(), *self._pushed(specs), once=True, flags=DENSE_BACK)

    def _again(self) -> None:
        """A message that comes twice, perhaps late."""
        if self._sent:
            self._send(self.dice.choice(self._sent))

    def _bad_push(self) -> None:
        arrays = self._pushed([SPECS[0]])
        arrays[2].data[0, 0] = np.inf
        self._ask(Command.PUSH, self._worker(), *arrays, once=True)

    def _delta(self) -> None:
        spec = self.dice.choice(SPECS[:2])
        self._ask(Command.PUSH, 0, *self._pushed([spec]), once=True, flags=DELTA)
        self._ask(Command.PULL_CHANGED, 1, Array(0, np.zeros(1, np.uint64)), Array(spec.number, np.empty(0, np.uint64)))

    def _set(self) -> None:
        self._ask(Command.SET, 0, *self._section(self.dice.choice(SPECS[:5])), once=True)

    def _erase(self) -> None:
        self._ask(Command.ERASE, 0, Array(self.dice.choice(SPECS[:4]).number, self._keys()[:4]), once=True)

    def _sync_step(self) -> None:
        specs = self.dice.sample(SPECS, 3)
        for worker in self.dice.sample(range(NUM_WORKERS), NUM_WORKERS):
            self._ask(Command.PUSH, worker, *self._pushed(specs), once=True, flags=SYNC | DENSE_BACK)

    def _half_step(self) -> None:
        """One worker's push of a step; the other's comes with the next step, if nothing ends it before."""
        self._ask(Command.PUSH, self._worker(), *self._pushed(SPECS[:1]), once=True, flags=SYNC)

    def _gathered(self) -> None:
        settings = Array(0, np.array([[3], [2]], np.uint64))
        self._ask(Command.PUSH, self._worker(), *self._pushed(SPECS[:2]), settings, once=True, flags=GATHERED)

    def _bounded(self) -> None:
        settings = Array(0, np.array([[2]], np.uint64))
        worker = self._worker()
        self._ask(Command.PULL, worker, Array(SPECS[0].number, self._keys()), flags=BOUNDED)
        self._ask(Command.PUSH, worker, *self._pushed(SPECS[:1]), settings, once=True, flags=BOUNDED)

    def _meet(self) -> None:
        for worker in range(self.dice.choice([1, 2, 2])):
            body = {"name": self.dice.choice("ab"), "num_workers": 2, "timeout": 5.0}
            self._ask(Command.BARRIER, worker, pack(body), once=True)
            body = {"name": "g", "round": next(self._rounds), "num_workers": 2, "timeout": 5.0}
            self._ask(Command.GATHER, worker, pack(body), Array(0, np.frombuffer(b"abc", np.uint8)))

    def _mail(self) -> None:
        number = next(self._rounds)
        self._ask(Command.SEND, 0, pack({"topic": "t", "to": 1, "number": number}), Array(0, self._keys()))
        self._ask(Command.TAKE, 1, pack({"topic": "t", "received": self.dice.randrange(number)}))

    def _files(self) -> None:
        number = self.dice.randrange(3)
        body = {"name": "f", "number": number, "lease": 3.0, "files": [f"{i}" for i in range(5)]}
        body |= {"take": next(self._rounds), "done": [str(self.dice.randrange(5))]}
        self._ask(Command.FILES, self._worker(), pack(body))

    def _clock(self) -> None:
        if self.dice.random() < 0.3:
            day = 1_700_000_000 + int(self.now * 3600)
            self._ask(Command.CLOCK, 0, pack({"now": day, "token": next(self._tokens)}))

    def _shrink(self) -> None:
        policy = Shrink(max_rows=self.dice.randrange(10, 60), max_share=1.0)
        self._ask(Command.SHRINK, 0, pack({"table": "counted", "policy": policy, "token": next(self._tokens)}))

    def _tick(self) -> None:
        self.now += self.dice.choice([0.1, 0.5, 4.0])
        self._join(self._worker())

    def _join(self, worker: int) -> None:
        body = {"host": "h", "pid": worker, "num_workers": NUM_WORKERS, "timeout": 20.0, "sync_timeout": 9.0}
        self._ask(Command.JOIN, worker, pack(body))


def make_server() -> Server:
    return Server(1 << 22, NUM_WORKERS)


def whole_state(server: Server, with_tracking: bool = True) -> dict[str, Any]:
    """All that is promised, in an order that does not depend on how it came to be."""
    body = msgspec.to_builtins(state_copy._body(server))
    body["sessions"] = {session[0]: _settled(session) for session in body["sessions"]}
    for _, notes in body["tables"]:
        for name in ("tracking", "candidates"):
            kept = notes.pop(name, None)
            notes[name] = [sorted(np.frombuffer(keys, np.uint64).tolist()) for keys in kept or []] * with_tracking
    body["rows"] = {table.spec.name: _changed_rows(table) for table in server.state.tables.values()}
    return body


def _changed_rows(table: Any) -> dict[Any, Any]:
    """But for rows of plain tables that only have their first value: that is a function of the key."""
    rows = dict(_rows(table))
    if table.spec.is_dense or is_counted(table.spec):
        return rows
    fresh = SparseTable(table.spec, 1 << 22)
    fresh.pull(np.array([key for _, key in rows], np.uint64))
    first = dict(_rows(fresh))
    return {key: row for key, row in rows.items() if row != first[key]}


def _settled(session: list[Any]) -> list[Any]:
    """Without what a repeat, which changes nothing, leaves: when it came, and a floor below which nothing is kept."""
    return [*session[1:3], session[6]]


def _rows(table: Any) -> Any:
    for saved in table.save_slices("copy", 1 << 10):
        arrays = dict(saved.arrays)
        keys = arrays.pop("keys", None)
        if keys is None:
            yield saved.kind, {name: array.tobytes() for name, array in arrays.items()}
            continue
        for i, key in enumerate(keys.tolist()):
            yield (saved.kind, key), {name: array[i].tobytes() for name, array in arrays.items()}
