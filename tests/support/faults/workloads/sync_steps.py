"""Workers that make synchronous steps: the tables must be, bit for bit, those of an undisturbed run.

Gradients depend on the values that were pulled, so that a step with wrong values makes all later ones wrong as well.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.faults.history import expect
from support.faults.setting import QUIET, Fleet, Setting, contents

from torchfleet.ps.net.wire import DENSE_BACK, SYNC
from torchfleet.ps.tables.settings.policy import AdmissionEntry
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

ROWS = TableSpec("rows", dim=3, rule=Rule("adagrad", lr=0.1), initializer=Initializer("uniform", -0.5, 0.5), seed=3)
COMMON = TableSpec("common", dim=2, rule=Rule("sgd", lr=0.5), entry=AdmissionEntry(count=3))
BLOCK = TableSpec("block", "dense", size=6, rule=Rule("adam", lr=0.05, eps=1e-8))
NUM_KEYS = 12
TIMEOUT = 300.0  # seconds that workers wait for each other: longer than all faults together


@dataclass
class SyncSteps:
    """A script: every worker makes `num_steps` steps."""

    setting: Setting
    seed: int
    num_steps: int = 5
    _is_ready: bool = False
    seen: dict[int, list[bytes]] = field(default_factory=dict)  # by worker: dense values after every step

    def begin(self) -> None:
        self.setting.start_workers(self._live)

    def _live(self, worker: int, client: Client) -> None:
        world, dice = self.setting.world, random.Random(f"sync {self.seed} {worker}")
        if worker == 0:
            for spec in (ROWS, COMMON, BLOCK):
                client.create_table(spec)
            client.set_dense("block", np.linspace(-1.0, 1.0, BLOCK.size, dtype=np.float32))
            self._is_ready = True
        while not self._is_ready:
            world.sleep(0.2)
        for spec in (ROWS, COMMON, BLOCK):
            client.attach(spec)
        client.join(joining(worker, self.setting.num_workers))
        client.barrier("begin", self.setting.num_workers, TIMEOUT)
        dense = client.pull_dense("block").result()
        for step in range(self.num_steps):
            world.sleep(dice.expovariate(1.0))
            dense = self._step(client, dice, worker, step, dense)

    def _step(self, client: Client, dice: random.Random, worker: int, step: int, dense: Any) -> Any:
        history, name = self.setting.history, f"worker{worker}"
        keys = dice.sample(range(NUM_KEYS), dice.randint(1, 5))
        pulled = history.ask(
            name,
            "pull",
            (step, tuple(keys)),
            lambda: client.pull_tables({"rows": keys, "common": keys}, True, True).result(),
        )
        rows, common = pulled.rows["rows"], pulled.rows["common"]
        history.ops[-1].result = (rows.tobytes(), common.tobytes())
        grads = {
            "rows": (keys, rows * np.float32(0.3) + np.float32(worker + 1) / np.float32(step + 3)),
            "common": (keys, common + np.float32(0.7) * np.float32(worker + 1)),
            "block": dense * np.float32(0.1) + np.float32(worker - 1) / np.float32(7),
        }
        op = history.begin(name, "step", step)
        back = client.push_tables(grads, flags=SYNC | DENSE_BACK, timeout=TIMEOUT).result()
        history.end(op)
        values = back.get("block")
        if values is None:  # the reply was lost; no worker makes another step without this one
            values = client.pull_dense("block").result()
        op.result = values.tobytes()
        self.seen.setdefault(worker, []).append(op.result)
        return values.copy()

    def check(self, fleet: Fleet) -> None:
        alone = undisturbed(SyncSteps, self.setting, self.seed)
        for shard, (found, right) in enumerate(zip(fleet.servers(), alone.held, strict=True)):
            for table, held in contents(found).items():
                expect(held == right[table], f"table '{table}' of shard {shard} is not that of the undisturbed run")
        expect(self.seen == alone.script.seen, "a worker saw other dense values than in the undisturbed run")


@dataclass
class Undisturbed:
    script: Any
    held: list[dict[str, Any]]


def undisturbed(kind: Any, setting: Setting, seed: int) -> Undisturbed:
    """The same script with servers that nothing happens to."""
    quiet = Setting.make(seed, QUIET, len(setting.shards), setting.num_workers)
    with quiet.world.in_charge():
        fleet = Fleet(quiet)
        script = kind(quiet, seed)
        script.begin()
        quiet.world.run(lambda: quiet.are_done, 1e6)
        for actor in quiet.world.actors:
            if actor.error is not None:
                raise actor.error
        fleet.settle()
        return Undisturbed(script, [contents(server) for server in fleet.servers()])


def joining(worker: int, num_workers: int) -> dict[str, Any]:
    body = {"host": "simulated", "pid": worker + 1, "num_workers": num_workers}
    return {**body, "timeout": TIMEOUT, "sync_timeout": TIMEOUT}
