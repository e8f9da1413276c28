"""Workers that end, alone or all together, and are slow to come back; and their launcher, which starts them again.

Servers must stay while their launcher tells them that a worker is being started. Where it tells nothing, servers with
logs end, are started again, and have all rows: every acknowledged push must be there once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.faults.history import Op, Violation, expect
from support.faults.nodes import Node
from support.faults.setting import Fleet, Setting
from support.faults.workloads.lost_workers import TIMEOUT, Killed, Life, join

from torchfleet.base.errors import FleetError
from torchfleet.launch.endurance.starting import LEASES, Starting
from torchfleet.ps.net.private_jobs import Way
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.meeting.presence import RESTART_TIMEOUTS
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

PUSHED = TableSpec("pushed", dim=1, rule=Rule("sgd", lr=1.0))  # a row for each push, which adds 1 to it
LEASE = 1.0  # seconds; servers stay for six of them
NUM_PUSHES = 5  # of each process that does not end before
MOST_STARTS = 2  # of a worker that are followed by an end
LOOK = 0.3  # seconds between two looks of the launcher
SURE = 0.85  # share of the promised time that no clock counts as more than the whole


@dataclass
class SlowStarts:
    """A script. `starting`: processes that are not there yet, and since when their launcher starts them."""

    setting: Setting
    seed: int
    is_ready: bool = False
    starting: dict[tuple[int, int], float] = field(default_factory=dict)
    _untold: set[tuple[int, int]] = field(default_factory=set)  # of those, whom the servers are not told of
    _seen: set[tuple[str, int]] = field(default_factory=set)  # servers that have ended so: name, number of the start
    _ended: list[Node] = field(default_factory=list)  # servers that the launcher has to start again
    _lives: dict[int, Life] = field(default_factory=dict)
    num_done: int = 0

    def begin(self) -> None:
        dice = random.Random(f"slow starts {self.seed}")
        self._are_together = dice.random() < 0.7  # all workers end with one of them
        self._dice = dice
        for worker in range(self.setting.num_workers):
            self._start(Life(worker, 0), 0.0)
        talk = self.setting.client("launcher", 0, role=Role.LAUNCHER)
        self.setting.actor("launcher", lambda: self._launch(talk))
        self._watch()

    @property
    def _is_over(self) -> bool:
        return self.num_done == self.setting.num_workers

    def _start(self, life: Life, later: float) -> None:
        self._lives[life.worker] = life
        client = self._connect(life, life.name)
        self.setting.actor(life.name, lambda: self._live(life, client, later))

    def _connect(self, life: Life, name: str) -> Client:
        client = self.setting.client(name, life.worker, process=life.process)
        client.attach(PUSHED)
        return client

    def _live(self, life: Life, client: Client, later: float) -> None:
        dice = random.Random(f"slow starts {self.seed} {life.name}")
        try:
            self._sleep(life, later)
            self._work(life, client, dice)
            life.is_over = True
            self.setting.history.ask(life.name, "leave", None, client.leave)
            self.num_done += 1
        except Killed:
            self._end(life, client, dice)

    def _sleep(self, life: Life, seconds: float) -> None:
        """Raises Killed if the process is ended by its launcher meanwhile."""
        until = self.setting.world.now + seconds
        while not life.is_over and self.setting.world.now < until:
            self.setting.world.sleep(min(LOOK, until - self.setting.world.now))
        if life.is_over:
            raise Killed

    def _end(self, life: Life, client: Client, dice: random.Random) -> None:
        """It may say that it ends, as a script that raises does; its launcher starts it again."""
        was_killed = life.is_over
        life.is_over = True
        self.setting.history.note(f"{life.name} ends")
        if not was_killed and dice.random() < 0.8:
            try:
                client.join({**self._body(life), "again": True, "ended": True}, LEASE)
            except FleetError as error:
                self.setting.history.note(f"{life.name} cannot say so: {error}")
        client.close()
        if not was_killed and self._are_together:
            for other in self._lives.values():
                if not other.is_over:
                    other.is_over = True
        self.starting.pop((life.worker, life.start), None)
        later = Life(life.worker, life.start + 1)
        process = later.worker, later.start
        self.starting[process] = self.setting.world.now
        if self.setting.fleet is not None and self.setting.fleet.can_crash and self._dice.random() < 0.3:
            self._untold.add(process)
        self._start(later, dice.choice([0.3, 4.0, 10.0, 25.0]))

    def _work(self, life: Life, client: Client, dice: random.Random) -> None:
        if life.worker == 0 and not self.is_ready:
            client.create_table(PUSHED)
            self.is_ready = True
        while not self.is_ready:
            self._sleep(life, 0.2)
        join(self.setting, life, client, self._body(life))
        self.starting.pop((life.worker, life.start), None)
        signs = self._connect(life, f"signs of {life.name}")
        self.setting.actor(f"signs of {life.name}", lambda: self._give_signs(life, signs))
        for _ in range(NUM_PUSHES):
            self._sleep(life, dice.expovariate(1.5))
            self._push(life, client)
            if life.start < MOST_STARTS and dice.random() < 0.12:
                raise Killed

    def _give_signs(self, life: Life, client: Client) -> None:
        while not life.is_over:
            self.setting.world.sleep(LEASE / 4)
            if life.is_over:
                return
            try:
                client.join({**self._body(life), "again": True}, LEASE / 2)
            except FleetError:
                continue  # the worker's own requests find out

    def _body(self, life: Life) -> dict[str, Any]:
        base = {"host": "simulated", "pid": life.process, "num_workers": self.setting.num_workers}
        return {**base, "timeout": LEASE, "sync_timeout": TIMEOUT, "restart": life.start, "max_restart": MOST_STARTS}

    def _push(self, life: Life, client: Client) -> None:
        key = len(self.setting.history.of("push"))
        grads = np.full((1, 1), -1.0, np.float32)
        self.setting.history.ask(life.name, "push", key, lambda: client.push("pushed", [key], grads).result() and None)

    def _launch(self, talk: Client) -> None:
        """The launcher: it tells servers whom it starts, as fleetrun does, and starts servers again that have ended."""
        told = Starting(Way(), [], environment={"FLEET_WORKER_TIMEOUT": f"{LEASE:g}"})
        told._thread = object()  # type: ignore[assignment]  # this actor is in its place
        last = 0.0
        while not self._is_over:
            self.setting.world.sleep(LOOK)
            while self._ended:
                node = self._ended.pop()
                self.setting.world.after(0.0, lambda node=node: self.setting.fleet.revive(node))
            told.look([process for process in self.starting if process not in self._untold])
            due = told._due()
            if not due or self.setting.world.now < last + LEASE / 2:
                continue
            last = self.setting.world.now
            about = [process for process in told._since if process[0] in due]
            op = self.setting.history.begin("launcher", "tell", about)
            try:
                talk.tell_starting(due, LEASES * LEASE, LEASE / 2)
            except FleetError:
                continue
            self.setting.history.end(op)

    def _watch(self) -> None:
        """Servers that no worker is left of end. None may of whom the launcher has told that one is starting."""
        if self._is_over or self.setting.fleet is None:
            return
        for node, reason in self.setting.fleet.deserted():
            if (node.name, node._life) in self._seen:
                continue
            self._seen.add((node.name, node._life))
            self._check_desertion(node.name)
            if self.setting.fleet.can_crash:
                self.setting.history.note(f"{node.name} ends: {reason}")
                self.setting.fleet.finish(node)
                self._ended.append(node)
        self.setting.world.after(LOOK, self._watch)

    def _check_desertion(self, name: str) -> None:
        now = self.setting.world.now
        for op in self._told():
            if now < op.start + SURE * RESTART_TIMEOUTS * LEASE:
                raise Violation(f"{name} ends without workers, and was told that some are being started: {op}")

    def _told(self) -> Iterator[Op]:
        """What servers have acknowledged of processes that are still being started."""
        for op in self.setting.history.of("tell"):
            if op.is_acknowledged and any(process in self.starting for process in op.about):
                yield op

    def check(self, fleet: Fleet) -> None:
        held: dict[int, float] = {}
        for server in fleet.servers():
            for keys, rows, _ in server.state.tables[PUSHED.number].chunks():
                held |= {int(key): float(row[0]) for key, row in zip(keys, rows, strict=True)}
        for op in self.setting.history.of("push"):
            found = held.get(op.about, 0.0)
            is_right = found == 1.0 or (found == 0.0 and not op.is_acknowledged)
            expect(is_right, f"{op} is in the table {found:g} times")
