"""A server and its workers on a clock that a test turns: signs of life, and workers that are lost."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from support.fleets import Talk

from torchfleet.ps.net.wire import Command, Reply, Role, decode_reply, pack
from torchfleet.ps.server.server import Server

TIMEOUT, SYNC_TIMEOUT = 5.0, 50.0


class PlayedJob(ABC):
    """`handler`: what workers talk to; the server itself, if a test puts nothing around it."""

    def __init__(self, num_workers: int = 3, on_loss: str = "go_on", min_workers: int = 0) -> None:
        self.num_workers, self.rules = num_workers, {"on_worker_loss": on_loss, "min_workers": min_workers}
        self.server = Server(1 << 20, num_workers, **self.rules)  # type: ignore[arg-type]
        self.handler: Any = self.server
        self.now = time.monotonic()
        self.server.state.now = lambda: self.now
        self.silent: set[int] = set()
        self.workers: list[Talk] = []

    def process(self, worker: int, start: int) -> Talk:
        return Talk(self.handler, client=100 * (start + 1) + worker, worker=worker, role=Role.WORKER)

    def ask_to_join(self, talk: Talk, **fields: Any) -> list[Reply]:
        body = {"host": "here", "pid": talk.client, "num_workers": self.num_workers, **self.rules, **fields}
        return talk.send(talk.message(Command.JOIN, pack({**body, "timeout": TIMEOUT, "sync_timeout": SYNC_TIMEOUT})))

    @abstractmethod
    def give_sign(self, talk: Talk) -> None:
        """The worker joins again, and its test looks at the answer."""

    def later(self, seconds: float) -> list[Reply]:
        """What is told until then; all but `silent` give signs of life."""
        told, until = [], self.now + seconds
        while self.now < until:
            self.now += 0.5
            for talk in self.workers:
                if self.server.state.meetings.presence.incarnation(talk.worker) and talk.worker not in self.silent:
                    self.give_sign(talk)
            told += [decode_reply(frames) for _, frames in self.handler.tick(self.now)]
        return told

    def lose(self, worker: int) -> list[Reply]:
        self.silent.add(worker)
        return self.later(TIMEOUT + 1)
