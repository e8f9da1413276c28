"""Clients whose changes can be read back one by one: which of them a table holds, how often, and in which order.

Push number n adds one to column n of a dense block, and is answered with the block as it was then. So every answer and
every read shows a set of pushes. Beside them clients write registers that all read, and rows that are theirs alone.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from support.faults.history import Op, Violation, expect
from support.faults.order_checks import check_registers, check_tokens
from support.faults.setting import Fleet, Setting

from torchfleet.base.errors import TableError
from torchfleet.ps.net.wire import DENSE_BACK, VERSIONS
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client, Future
from torchfleet.ps.worker.client.future import Dense

NUM_TOKENS = 48  # columns of a shard
PLUS = Rule("sgd", lr=1.0)
REGISTERS = TableSpec("registers", dim=1, rule=PLUS)
OWN = TableSpec("own", dim=2, rule=PLUS)
ABSENT = TableSpec("absent", dim=1, rule=PLUS)  # never created
COUNTED = TableSpec(  # it keeps when a key was seen
    "counted", dim=1, rule=PLUS, entry=AdmissionEntry(count=1000), shrink=Shrink(delete_after_unseen_days=1000.0)
)
NUM_REGISTERS, NUM_OWN, NUM_COUNTED = 3, 3, 4


def seen_spec(num_shards: int) -> TableSpec:
    return TableSpec("seen", "dense", size=NUM_TOKENS * num_shards, rule=PLUS)


@dataclass
class Tokens:
    """A script: `num_workers` clients with `num_ops` requests each."""

    setting: Setting
    seed: int
    num_ops: int = 9
    _next: int = 0
    _value: int = 0
    _finals: dict[str, dict[int, float | None]] = field(default_factory=dict)

    def begin(self) -> None:
        setting = self.setting
        spec = seen_spec(len(setting.shards))
        ready = [False]
        for worker in range(setting.num_workers):
            name = f"worker{worker}"
            dice = random.Random(f"tokens {self.seed} {worker}")
            talker = Talker(self, setting.client(name, worker, dice.randint(2, 5)), name, worker, dice)
            setting.actor(name, lambda talker=talker: talker.live(spec, ready, self.num_ops))

    def next_token(self) -> int:
        self._next += 1
        return self._next - 1

    def next_value(self) -> float:
        self._value += 1
        return float(self._value)

    def keep(self, name: str, own: dict[int, float | None]) -> None:
        self._finals[name] = own

    def check(self, fleet: Fleet) -> None:
        """All of it, over the history and what the servers hold in the end."""
        history = self.setting.history
        for shard, server in enumerate(fleet.servers()):
            spec = seen_spec(len(self.setting.shards))
            table = server.state.tables.get(spec.number)
            expect(table is not None, f"shard {shard} has lost table 'seen'")
            check_tokens(history.ops, shard, table.whole().reshape(-1), table.step)
        check_registers([op for op in history.ops if op.kind in ("write", "read")])
        self._check_counts(fleet)

    def _check_counts(self, fleet: Fleet) -> None:
        found = dict.fromkeys(range(NUM_COUNTED), 0)
        for server in fleet.servers():
            for keys, columns in server.state.tables[COUNTED.number].admission.candidates.chunks(1 << 10, False):
                for key, count in zip(keys.tolist(), columns["count"].tolist(), strict=True):
                    found[int(key)] += int(count)
        for key, count in found.items():
            asked = [op for op in self.setting.history.of("count") if key in op.about]
            least = sum(op.is_acknowledged for op in asked)
            expect(least <= count <= len(asked), f"key {key} was counted {count} times: {least} to {len(asked)} asked")


class Talker:
    """One client."""

    def __init__(self, script: Tokens, client: Client, name: str, worker: int, dice: random.Random) -> None:
        self._script, self._client, self._name, self._dice = script, client, name, dice
        self._history, self._world = script.setting.history, script.setting.world
        self._own = {1000 * (worker + 1) + i: 0.0 for i in range(NUM_OWN)}
        self._open: list[tuple[Op, Future[Dense]]] = []

    def live(self, spec: TableSpec, ready: list[bool], num_ops: int) -> None:
        specs = [spec, REGISTERS, OWN, COUNTED]
        if self._name == "worker0":
            for each in specs:
                self._client.create_table(each)
            ready[0] = True
        for each in specs:
            self._client.attach(each)
        self._client.attach(ABSENT)
        while not ready[0]:
            self._world.sleep(0.2)
        steps: list[Callable[[], None]] = [
            self._push,
            self._look,
            self._write,
            self._read,
            self._private,
            self._count,
            self._be_refused,
        ]
        for _ in range(num_ops):
            self._world.sleep(self._dice.expovariate(1.0))
            (step,) = self._dice.choices(steps, (7, 3, 2, 2, 3, 2, 1))
            step()
        self._settle()
        self._look()
        self._compare_own(list(self._own))

    def _push(self) -> None:
        token = self._script.next_token()
        if token >= NUM_TOKENS:
            return
        block = np.zeros(NUM_TOKENS * self._client.num_servers, np.float32)
        block[token::NUM_TOKENS] = -1.0
        op = self._history.begin(self._name, "push", token)
        future = self._client.push_tables({"seen": block}, flags=DENSE_BACK | VERSIONS)
        self._open.append((op, future))
        if self._dice.random() < 0.6:
            self._settle()

    def _settle(self) -> None:
        """Wait for all pushes that are under way."""
        for op, future in self._open:
            self._history.end(op, _sets(future.result(), self._client.num_servers))
        self._open.clear()

    def _look(self) -> None:
        op = self._history.begin(self._name, "look", None)
        dense = self._client.pull_dense_tables(["seen"]).result()
        self._history.end(op, _sets(dense, self._client.num_servers))

    def _write(self) -> None:
        key, value = self._dice.randrange(NUM_REGISTERS), self._script.next_value()
        values = np.full((1, 1), value, np.float32)
        self._history.ask(self._name, "write", (key, value), lambda: self._client.assign("registers", [key], values))

    def _read(self) -> None:
        key = self._dice.randrange(NUM_REGISTERS)
        create = self._dice.random() < 0.5
        self._history.ask(
            self._name, "read", key, lambda: float(self._client.pull("registers", [key], create).result()[0, 0])
        )

    def _private(self) -> None:
        keys = self._dice.sample(sorted(self._own), self._dice.randint(1, NUM_OWN))
        kind = self._dice.choice(["add", "add", "set", "erase", "compare"])
        value = float(self._dice.randint(1, 9))
        op = self._history.begin(self._name, kind, tuple(keys))
        rows = np.full((len(keys), OWN.dim), value, np.float32)
        if kind == "add":
            self._client.push("own", keys, -rows).result()
            self._own |= {key: self._own[key] + value for key in keys}
        elif kind == "set":
            self._client.assign("own", keys, rows)
            self._own |= dict.fromkeys(keys, value)
        elif kind == "erase":
            self._client.erase("own", keys)
            self._own |= dict.fromkeys(keys, 0.0)
        else:
            self._compare_own(keys)
        self._history.end(op, value)

    def _compare_own(self, keys: list[int]) -> None:
        rows = self._client.pull("own", keys, create=False).result()
        for key, row in zip(keys, rows, strict=True):
            expected = self._own[key]
            if (row != np.float32(expected)).any():
                raise Violation(f"{self._name}: row {key}, which is its alone, is {row}, expected {expected}")

    def _be_refused(self) -> None:
        """A change that cannot be made is refused, however often it is sent, and changes nothing."""
        op = self._history.begin(self._name, "refused", None)
        with contextlib.suppress(TableError):
            self._client.assign("absent", [1], np.ones((1, 1), np.float32))
            raise Violation(f"{self._name}: a change of a table that there is not was acknowledged")
        self._history.end(op)

    def _count(self) -> None:
        keys = self._dice.sample(range(NUM_COUNTED), self._dice.randint(1, NUM_COUNTED))
        self._history.ask(
            self._name, "count", tuple(keys), lambda: self._client.pull("counted", keys).result().tobytes()
        )


def _sets(dense: Dense, num_shards: int) -> list[tuple[tuple[float, ...], float]] | None:
    """By shard: the columns, and the number of updates. None: the reply was lost, and a repeat has no values."""
    if "seen" not in dense:
        return None
    columns = dense["seen"].reshape(num_shards, NUM_TOKENS)
    versions = dense.versions.get("seen", [-1.0] * num_shards)
    return [(tuple(columns[i].tolist()), versions[i]) for i in range(num_shards)]
