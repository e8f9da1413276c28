"""Workers that come and go: they join an elastic job at any time, push, take files, leave, are killed, and come back.

Every acknowledged push must be there once, every file must be done, and the servers stop when the last one has left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from support.faults.history import Op, expect
from support.faults.setting import Fleet, Setting
from support.faults.workloads.lost_workers import LEASE, TIMEOUT, Killed, Life, give_signs, join

from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.requests import Joined

PUSHED = TableSpec("pushed", dim=1, rule=Rule("sgd", lr=1.0))  # a row for each push, which adds 1 to it
FILES = [f"file{i}" for i in range(14)]
MOST_STARTS = 3  # of a worker that are followed by a kill, or by leaving before the end


@dataclass
class ElasticJob:
    """A script. Worker 0 stays, if it is not killed; all come back until the files are done."""

    on_loss: ClassVar[str] = "go_on"
    min_workers: ClassVar[int] = 2

    setting: Setting
    seed: int
    is_ready: bool = False
    _lives: list[Life] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    def begin(self) -> None:
        dice = random.Random(f"elastic {self.seed}")
        for worker in range(self.setting.num_workers):
            self._start(Life(worker, 0), dice.uniform(0.0, 6.0) if worker >= self.min_workers else 0.0)

    def _start(self, life: Life, later: float) -> None:
        client = self._connect(life, life.name)
        self._lives.append(life)
        self.setting.actor(life.name, lambda: self._live(life, client, later))

    def _connect(self, life: Life, name: str) -> Client:
        client = self.setting.client(name, life.worker, process=life.process)
        client.attach(PUSHED)
        return client

    def _live(self, life: Life, client: Client, later: float) -> None:
        dice, world = random.Random(f"elastic {self.seed} {life.name}"), self.setting.world
        world.sleep(later)
        try:
            is_end = self._work(life, client, dice)
            life.is_over = True
            self.setting.history.ask(life.name, "leave", None, client.leave)
        except Killed:
            self.setting.history.note(f"{life.name} is killed")
            is_end, life.is_over = False, True
            client.close()
        if not is_end:
            self._start(Life(life.worker, life.start + 1), dice.choice([0.1, 1.0, 5.0]))

    def _work(self, life: Life, client: Client, dice: random.Random) -> bool:
        """Returns whether all files are done."""
        if life.worker == 0 and not self.is_ready:
            client.create_table(PUSHED)
            self.is_ready = True
        while not self.is_ready:
            self.setting.world.sleep(0.2)
        self._check_told(join(self.setting, life, client, self._body(life)))
        signs = self._connect(life, f"signs of {life.name}")
        self.setting.actor(f"signs of {life.name}", lambda: give_signs(self.setting, life, signs, self._body(life)))
        stays = 1000 if life.worker == 0 or life.start >= MOST_STARTS else dice.randint(1, 5)
        return self._share_files(life, client, dice, stays)

    def _check_told(self, told: list[Joined]) -> None:
        most = self.setting.num_workers
        expect(all(1 <= each.num_members <= most for each in told), f"a worker that joins is told of {told}")

    def _body(self, life: Life) -> dict[str, Any]:
        base = {"host": "simulated", "pid": life.process, "num_workers": self.setting.num_workers}
        times = {"timeout": LEASE, "sync_timeout": TIMEOUT, "restart": life.start}
        return {**base, **times, "on_worker_loss": self.on_loss, "min_workers": self.min_workers}

    def _share_files(self, life: Life, client: Client, dice: random.Random, stays: int) -> bool:
        done: list[str] = []
        for wish in range(1, 1000):
            body = {"name": "files", "number": 0, "lease": LEASE, "files": FILES, "done": done, "take": wish}
            ask = self.setting.history.ask
            what, path = ask(life.name, "file", (wish, tuple(done)), lambda body=body: client.files(body))
            self.done |= set(done)
            if what == "end":
                return True
            done = [path] if what == "file" else []
            self.setting.world.sleep(dice.uniform(0.1, 0.8))
            if life.start < MOST_STARTS and dice.random() < 0.06:
                raise Killed
            self._push(life, client)
            if wish > stays and not done:
                return False
        raise AssertionError(f"{life.name}: the list of files has no end")

    def _push(self, life: Life, client: Client) -> None:
        key = len(self.setting.history.of("push"))
        grads = np.full((1, 1), -1.0, np.float32)
        self.setting.history.ask(life.name, "push", key, lambda: client.push("pushed", [key], grads).result() and None)

    def check(self, fleet: Fleet) -> None:
        held: dict[int, float] = {}
        for server in fleet.servers():
            expect(server.is_stopping, "the last worker has left, and a server goes on")
            for keys, rows, _ in server.state.tables[PUSHED.number].chunks():
                held |= {int(key): float(row[0]) for key, row in zip(keys, rows, strict=True)}
        for op in self.setting.history.of("push"):
            self._check_push(op, held.get(op.about, 0.0))
        expect(self.done == set(FILES), f"files are not done: {set(FILES) - self.done}")

    @staticmethod
    def _check_push(op: Op, found: float) -> None:
        expect(found == 1.0 or (found == 0.0 and not op.is_acknowledged), f"{op} is in the table {found:g} times")
