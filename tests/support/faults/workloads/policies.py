"""One client that goes through admission, eviction, capacity and clocks; the rows must be those of an undisturbed run.

Which of several rows that were last seen at the same time makes room for others is open. So of a table with a capacity
only the number of rows is compared, and that a server that takes another's place has the same ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.faults.history import expect
from support.faults.setting import Fleet, Setting, contents
from support.faults.workloads.sync_steps import undisturbed

from torchfleet.ps.net.wire import GATHERED
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

DAY = 86_400
START = 1_700_000_000
NUM_KEYS = 120
MAX_ROWS = 60
SGD = Rule("sgd", lr=0.25)
NORMAL = Initializer("normal", 0.0, 1.0)
AGED = TableSpec(
    "aged", dim=2, rule=SGD, initializer=NORMAL, entry=AdmissionEntry(count=2),
    shrink=Shrink(delete_after_unseen_days=2.0, every_hours=24.0, max_share=1.0),
)  # fmt: skip
FULL = TableSpec("full", dim=2, rule=Rule("adagrad", lr=0.5), initializer=NORMAL, shrink=Shrink(max_rows=MAX_ROWS))


@dataclass
class Policies:
    """A script. The other workers of the setting only ask the servers how they are."""

    setting: Setting
    seed: int
    num_ops: int = 14
    answers: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        self.setting.actor("worker0", lambda: self._live(self.setting.client("worker0", 0)))
        self.setting.actor("worker1", lambda: self._look_on(self.setting.client("worker1", 1)))

    def _look_on(self, client: Client) -> None:
        for _ in range(4):
            self.setting.world.sleep(2.0)
            client.ping()

    def _live(self, client: Client) -> None:
        dice = random.Random(f"policies {self.seed}")
        now = START
        client.set_clock(now)
        for spec in (AGED, FULL):
            client.create_table(spec)
        for _ in range(self.num_ops):
            self.setting.world.sleep(dice.expovariate(1.5))
            kind = dice.choice(["pull", "pull", "pull", "push", "push", "gather", "clock", "shrink"])
            if kind == "clock":
                now += dice.choice([DAY // 3, DAY, 2 * DAY])
            keys = [dice.randrange(NUM_KEYS) for _ in range(14)]
            ask = self.setting.history.ask
            answer = ask("worker0", kind, (now, tuple(keys)), lambda k=kind, t=now, m=keys: self._do(client, k, t, m))
            self.answers.append(answer)

    @staticmethod
    def _do(client: Client, kind: str, now: int, keys: list[int]) -> Any:
        keys = sorted(set(keys))
        if kind == "clock":
            return client.set_clock(now)
        if kind == "shrink":
            return (
                client.shrink("aged", Shrink(ttl_days=5.0, max_share=1.0)) if now % 2 else client.shrink("", Shrink())
            )
        if kind in ("push", "gather"):
            grads = np.outer(np.array(keys, np.float32), np.array([1.0, -0.5], np.float32)) / np.float32(16)
            pushed = {"aged": (keys, grads), "full": (keys, grads)}
            settings = (2, 1000) if kind == "gather" else ()
            client.push_tables(pushed, flags=GATHERED if settings else 0, settings=settings).result()
            return None
        pulled = client.pull_tables({"aged": keys, "full": keys}).result()
        return pulled.rows["aged"].tobytes()

    def check(self, fleet: Fleet) -> None:
        alone = undisturbed(Policies, self.setting, self.seed)
        for shard, (found, right) in enumerate(zip(fleet.servers(), alone.held, strict=True)):
            held = contents(found)["aged"]
            expect(held == right["aged"], f"table 'aged' of shard {shard} is not that of the undisturbed run")
            num_rows = found.state.tables[FULL.number].num_rows
            expect(num_rows <= MAX_ROWS, f"table 'full' of shard {shard} has {num_rows} rows")
        expect(self.answers == alone.script.answers, "an answer is not that of the undisturbed run")
