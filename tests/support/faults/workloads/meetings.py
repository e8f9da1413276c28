"""Workers that meet: barriers, gathers, parcels and a shared list of files."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from support.faults.history import Violation, expect
from support.faults.setting import Fleet, Setting
from support.faults.workloads.sync_steps import TIMEOUT, joining

from torchfleet.ps.net.wire import Array
from torchfleet.ps.worker.client.client import Client

LEASE = 2.5  # seconds: shorter than most stops
NUM_FILES = 18
NUM_PARCELS = 2  # to every other worker


@dataclass
class Meetings:
    """A script: `num_rounds` rounds, with a gather or a barrier; then parcels, then files until none is left."""

    setting: Setting
    seed: int
    num_rounds: int = 7
    received: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by worker: (sender, number)

    def begin(self) -> None:
        self.setting.start_workers(self._live)

    def _live(self, worker: int, client: Client) -> None:
        dice = random.Random(f"meetings {self.seed} {worker}")
        client.join(joining(worker, self.setting.num_workers))
        for number in range(self.num_rounds):
            self.setting.world.sleep(dice.expovariate(3.0))
            self._meet(worker, client, number)
        self._exchange(worker, client)
        self._share_files(worker, client, dice)
        self.setting.history.ask(f"worker{worker}", "leave", None, client.leave)

    def _meet(self, worker: int, client: Client, number: int) -> None:
        num, name, history = self.setting.num_workers, f"worker{worker}", self.setting.history
        if number % 3 == 0:
            history.ask(name, "barrier", number, lambda: client.barrier("all", num, TIMEOUT))
        brought = f"{name} in round {number}".encode()
        found = history.ask(name, "gather", number, lambda: client.gather("bytes", number + 1, brought, num, TIMEOUT))
        right = {w: f"worker{w} in round {number}".encode() for w in range(num)}
        if found != right:
            raise Violation(f"{name}: gather {number} brought {found}")

    def _exchange(self, worker: int, client: Client) -> None:
        others = [w for w in range(self.setting.num_workers) if w != worker]
        for number in range(1, NUM_PARCELS + 1):
            for to in others:
                parcel = [Array(0, np.array([worker, number], np.uint64))]
                while not client.send("parcels", to, number, parcel):
                    self.setting.world.sleep(0.1)
        received, last = self.received.setdefault(worker, []), 0
        while len(received) < NUM_PARCELS * len(others):
            for number, (content,) in client.take("parcels", worker, last):
                expect(number == last + 1, f"worker {worker} got parcel {number} after {last}")
                sender, own = (int(value) for value in content.reshape(-1))
                received.append((sender, own))
                last = number
            self.setting.world.sleep(0.3)

    def _share_files(self, worker: int, client: Client, dice: random.Random) -> None:
        """A lease counts from the last word that the server heard: a worker asks again long before it ends."""
        history, name = self.setting.history, f"worker{worker}"
        common = {"name": "files", "number": 0, "lease": LEASE}
        every = [f"file{i}" for i in range(NUM_FILES)]
        done: list[str] = []
        for wish in range(1, 1000):
            body = {**common, "files": every, "done": done, "take": wish}
            op = history.begin(name, "file", (wish, tuple(done)))
            what, path = history.end(op, client.files(body))
            if what == "end":
                return
            done = [path] if what == "file" else []
            self.setting.world.sleep(dice.uniform(0.1, 0.6))
        raise Violation(f"{name}: the list of files has no end")

    def check(self, fleet: Fleet) -> None:
        self._check_barriers()
        for worker, received in self.received.items():
            expect(len(set(received)) == len(received), f"worker {worker} got a parcel twice: {received}")
            for sender in {sender for sender, _ in received}:
                numbers = [number for who, number in received if who == sender]
                expect(numbers == sorted(numbers), f"worker {worker} got parcels of {sender} in disorder: {numbers}")
        self._check_files()

    def _check_barriers(self) -> None:
        for number in range(0, self.num_rounds, 3):
            ops = [op for op in self.setting.history.of("barrier") if op.about == number]
            last = max(op.start for op in ops)
            for op in ops:
                expect(op.end >= last, f"{op} was let go before the last worker came, at {last}")

    def _check_files(self) -> None:
        """Every file is worked on by one worker at a time, and is done in the end.

        A worker holds a file from the answer on until it has said that it is done. Another one may get it only if the
        server has not heard of the first for longer than a lease; what a worker sends may be late by all faults of
        the schedule, so those are looked at in which no request took long.
        """
        ops = self.setting.history.of("file")
        given = Counter(op.result[1] for op in ops if op.result[0] == "file")
        expect(set(given) == {f"file{i}" for i in range(NUM_FILES)}, f"not all files were given out: {given}")
        if not self._is_slow():
            twice = {path: num for path, num in given.items() if num > 1}
            expect(not twice, f"files went to two workers, though all held their leases: {twice}")

    def _is_slow(self) -> bool:
        """Whether a worker may have been silent for a lease: between two answers lay so long."""
        by_worker: dict[str, list[float]] = {}
        for op in self.setting.history.of("file"):
            by_worker.setdefault(op.client, []).extend((op.start, op.end))
        pauses = [b - a for times in by_worker.values() for a, b in itertools.pairwise(times)]
        return max(pauses, default=0.0) > LEASE / 3
