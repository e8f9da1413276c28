"""Workers that make synchronous steps, are killed or fall silent, and are started again, while the others go on.

Every step must be the mean of what those pushed that were counted: all who were told so, and of the others, who were
killed or counted out, each once or not at all. That is worked out in numpy from what was pushed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from support.faults.history import expect
from support.faults.setting import Fleet, Setting

from torchfleet.api.job import joining
from torchfleet.base.errors import CountedOut, FleetError, NumberTaken
from torchfleet.ps.net.wire import DENSE_BACK, SYNC
from torchfleet.ps.tables.settings.spec import Rule, TableSpec, shard_range
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.requests import Joined

RATE = 0.5
BLOCK = TableSpec("block", "dense", size=6, rule=Rule("sgd", lr=RATE))
FIRST = np.linspace(-1.0, 1.0, BLOCK.size, dtype=np.float32)
LEASE = 2.0  # seconds: shorter than most stops
TIMEOUT = 300.0
MOST_STARTS = 4  # of a worker that are followed by a kill

Floats = npt.NDArray[np.float32]


class Killed(Exception):
    """Ends a worker's process in the middle."""


@dataclass
class Pushed:
    """What a worker's process sent for a step, and whether it was told that the step is made."""

    worker: int
    step: int
    grads: Floats
    is_told: bool = False
    values: Floats | None = None  # after the step, if it saw them


@dataclass
class Life:
    """A process of a worker."""

    worker: int
    start: int
    is_over: bool = False

    @property
    def name(self) -> str:
        return f"worker{self.worker}.{self.start}"

    @property
    def process(self) -> int:
        return 1000 * (self.start + 1) + self.worker


def join(setting: Setting, life: Life, client: Client, body: dict[str, Any]) -> list[Joined]:
    """Join as a worker that was started again, whose former process the server may still wait for."""
    while True:
        try:
            return client.join(body)
        except NumberTaken:
            setting.world.sleep(0.3)


def give_signs(setting: Setting, life: Life, client: Client, body: dict[str, Any]) -> None:
    while not life.is_over:
        setting.world.sleep(LEASE / 4)
        try:
            client.join({**body, "again": True}, LEASE / 2)
        except FleetError:
            continue  # the worker's own requests find out


@dataclass
class LostWorkers:
    """A script: the job makes `num_steps` steps, by whichever workers are there."""

    on_loss: ClassVar[str] = "go_on"

    setting: Setting
    seed: int
    num_steps: int = 6
    _is_ready: bool = False
    pushed: list[Pushed] = field(default_factory=list)
    begun: list[tuple[Pushed, Floats]] = field(default_factory=list)  # a process's first push, and what it began with

    def begin(self) -> None:
        for worker in range(self.setting.num_workers):
            self._start(Life(worker, 0))

    def _start(self, life: Life) -> None:
        client = self._connect(life, life.name)
        self.setting.actor(life.name, lambda: self._live(life, client))

    def _connect(self, life: Life, name: str) -> Client:
        client = self.setting.client(name, life.worker, process=life.process)
        client.attach(BLOCK)
        return client

    def _live(self, life: Life, client: Client) -> None:
        dice = random.Random(f"lost {self.seed} {life.worker} {life.start}")
        try:
            self._train(life, client, dice)
            client.leave()
        except (Killed, CountedOut) as error:
            life.is_over = True
            self.setting.history.note(f"{life.name}: {type(error).__name__} {error}")
            client.close()
            self.setting.world.sleep(dice.choice([0.1, 1.0, 6.0]))
            self._start(Life(life.worker, life.start + 1))
        life.is_over = True

    def _train(self, life: Life, client: Client, dice: random.Random) -> None:
        world = self.setting.world
        if life.worker == 0 and not self._is_ready:
            client.create_table(BLOCK)
            client.set_dense("block", FIRST)
            self._is_ready = True
        while not self._is_ready:
            world.sleep(0.2)
        told = join(self.setting, life, client, self._body(life))
        signs = self._connect(life, f"signs of {life.name}")
        self.setting.actor(f"signs of {life.name}", lambda: give_signs(self.setting, life, signs, self._body(life)))
        first = joining.catch_up(client, told, 1, TIMEOUT)
        dense = client.pull_dense("block").result().copy()
        for step in range(first, self.num_steps):
            world.sleep(dice.expovariate(1.0))
            begun_with, dense = dense, self._step(life, client, dice, step, dense)
            if step == first:
                self.begun.append((self.pushed_by(life, step), begun_with))

    def pushed_by(self, life: Life, step: int) -> Pushed:
        return next(p for p in reversed(self.pushed) if p.worker == life.worker and p.step == step)

    def _body(self, life: Life) -> dict[str, Any]:
        base = {"host": "simulated", "pid": life.process, "num_workers": self.setting.num_workers}
        times = {"timeout": LEASE, "sync_timeout": TIMEOUT, "restart": life.start}
        return {**base, **times, "on_worker_loss": self.on_loss}

    def _step(self, life: Life, client: Client, dice: random.Random, step: int, dense: Floats) -> Floats:
        grads = dense * np.float32(0.1) + np.float32(life.worker + 1) / np.float32(step + 3 + life.start)
        dies = dice.choice(["before", "behind"]) if dice.random() < 0.12 and life.start < MOST_STARTS else ""
        if dies == "before":
            raise Killed
        own = Pushed(life.worker, step, grads)
        self.pushed.append(own)
        op = self.setting.history.begin(life.name, "step", (life.start, step))
        future = client.push_tables({"block": grads}, flags=SYNC | DENSE_BACK, timeout=TIMEOUT)
        if dies:
            self.setting.world.sleep(dice.choice([0.0, 0.01, 1.0]))
            raise Killed
        back = future.result()
        own.is_told = True
        self.setting.history.end(op)
        own.values = back.get("block")
        if own.values is None:  # the reply was lost; others may have gone on since
            return client.pull_dense("block").result().copy()
        own.values = own.values.copy()
        op.result = own.values.tobytes()
        return own.values

    def check(self, fleet: Fleet) -> None:
        for shard, server in enumerate(fleet.servers()):
            final = server.state.tables[BLOCK.number].whole().reshape(-1)
            self._check_shard(slice(*shard_range(BLOCK.size, shard, len(self.setting.shards))), shard, final)

    def _check_shard(self, part: slice, shard: int, final: Floats) -> None:
        """All states that explain what was seen so far; one of them must be the last."""
        states = [FIRST[part]]
        for step in range(self.num_steps):
            began = [values[part] for own, values in self.begun if own.step == step and own.is_told]
            states = [s for s in states if all(np.allclose(s, values, atol=1e-5) for values in began)]
            expect(bool(states), f"shard {shard}: a worker began step {step} with values that were never there")
            states = [after for state in states for after in self._after(step, part, state)]
            expect(bool(states), f"shard {shard}: no mean of those who pushed explains step {step}")
        expect(any(np.allclose(state, final, atol=1e-5) for state in states), f"shard {shard} ends with other values")

    def _after(self, step: int, part: slice, state: Floats) -> Iterator[Floats]:
        """The states that the step may have led to, and that those who were told have seen."""
        own = [p for p in self.pushed if p.step == step]
        told, others = [p for p in own if p.is_told], [p for p in own if not p.is_told]
        seen = [p.values[part] for p in told if p.values is not None]
        for num in range(len(others) + 1):
            for more in itertools.combinations(others, num):
                counted = [*told, *more]
                if not self._may_be(counted):
                    continue
                mean = np.mean([p.grads[part] for p in counted], axis=0) if counted else np.float32(0.0)
                after = (state - RATE * mean).astype(np.float32)
                if all(np.allclose(after, values, atol=1e-5) for values in seen):
                    yield after

    def _may_be(self, counted: list[Pushed]) -> bool:
        """Whether these may be the parts of one step: no worker counts twice."""
        return len({p.worker for p in counted}) == len(counted)


@dataclass
class AwaitedWorkers(LostWorkers):
    """A script: with `wait` and one server every step has a part of every worker."""

    on_loss: ClassVar[str] = "wait"

    def _may_be(self, counted: list[Pushed]) -> bool:
        is_whole = len(self.setting.shards) > 1 or len(counted) == self.setting.num_workers
        return super()._may_be(counted) and is_whole
