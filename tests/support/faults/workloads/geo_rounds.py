"""Workers of geo training: each has a copy of the rows, sends differences, and asks for what others changed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from support.faults.history import expect
from support.faults.setting import Fleet, Setting
from support.faults.workloads.sync_steps import TIMEOUT

from torchfleet.ps.net.wire import DELTA
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

SHARED = TableSpec("shared", dim=2, rule=Rule("sgd", lr=1.0))
NUM_KEYS = 8


@dataclass
class GeoRounds:
    """A script. In the end every copy must be what the servers hold: no change of another worker was missed."""

    setting: Setting
    seed: int
    num_rounds: int = 5
    copies: dict[int, dict[int, float]] = field(default_factory=dict)
    total: dict[int, float] = field(default_factory=lambda: dict.fromkeys(range(NUM_KEYS), 0.0))
    _is_ready: bool = False

    def begin(self) -> None:
        self.setting.start_workers(self._live)

    def _live(self, worker: int, client: Client) -> None:
        world, dice = self.setting.world, random.Random(f"geo {self.seed} {worker}")
        if worker == 0:
            client.create_table(SHARED)
            self._is_ready = True
        while not self._is_ready:
            world.sleep(0.2)
        client.attach(SHARED)
        copy = self.copies[worker] = dict.fromkeys(range(NUM_KEYS), 0.0)
        numbers = self._refresh(worker, client, copy, [0] * client.num_servers)
        client.barrier("begin", self.setting.num_workers, TIMEOUT)
        for _ in range(self.num_rounds):
            world.sleep(dice.expovariate(1.0))
            self._push(worker, client, copy, dice)
            if dice.random() < 0.7:
                numbers = self._refresh(worker, client, copy, numbers)
        client.barrier("end", self.setting.num_workers, TIMEOUT)
        self._refresh(worker, client, copy, numbers)

    def _push(self, worker: int, client: Client, copy: dict[int, float], dice: random.Random) -> None:
        keys = dice.sample(range(NUM_KEYS), dice.randint(1, 3))
        amount = float(dice.randint(1, 5))
        rows = np.full((len(keys), SHARED.dim), amount, np.float32)
        ask = self.setting.history.ask
        ask(f"worker{worker}", "delta", (tuple(keys), amount), lambda: self._send(client, keys, rows))
        for key in keys:
            copy[key] += amount
            self.total[key] += amount

    @staticmethod
    def _send(client: Client, keys: list[int], rows: np.ndarray) -> None:
        client.push_tables({"shared": (keys, rows)}, flags=DELTA).result()

    def _refresh(self, worker: int, client: Client, copy: dict[int, float], numbers: list[int]) -> list[int]:
        op = self.setting.history.begin(f"worker{worker}", "changed", tuple(numbers))
        is_all = False
        while not is_all:
            changed = client.pull_changed(["shared"], numbers).result()
            numbers, is_all = changed.numbers, changed.is_all
            keys, rows = changed.rows["shared"]
            for key, row in zip(keys.tolist(), rows, strict=True):
                copy[int(key)] = float(row[0])
        self.setting.history.end(op, tuple(sorted(copy.items())))
        return numbers

    def check(self, fleet: Fleet) -> None:
        held: dict[int, float] = dict.fromkeys(range(NUM_KEYS), 0.0)
        for server in fleet.servers():
            for keys, rows, _ in server.state.tables[SHARED.number].chunks():
                held |= {int(key): float(row[0]) for key, row in zip(keys, rows, strict=True)}
        expect(held == self.total, f"the servers hold {held}, the differences add up to {self.total}")
        for worker, copy in self.copies.items():
            expect(copy == held, f"worker {worker} has {copy}, the servers {held}: it was not told of all changes")
