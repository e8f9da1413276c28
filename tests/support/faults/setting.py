"""The stage of a schedule: a world, a network, servers behind doors, and clients that are connected to them."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.faults.clocks import MAX_DRIFT, MAX_WALL_JUMP, MachineClock
from support.faults.history import History
from support.faults.network import Doors, Network
from support.faults.nodes import Node
from support.faults.virtual_world import Actor, World
from support.lossy import Faults

from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.server import Server
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

MAX_TABLE_BYTES = 1 << 16
PATIENT = Patience(timeout=400.0, retries=10)
QUIET = Faults()


@dataclass
class Setting:
    """Where actors live. `shards`: names of the doors, one per server."""

    world: World
    network: Network
    doors: Doors
    history: History
    shards: list[str]
    num_workers: int
    on_loss: str = "end"  # what the loss of a worker means to the others
    min_workers: int = 0  # above 0: the job is elastic
    has_faults: bool = True  # until the script is done
    fleet: Fleet | None = None  # for scripts with a launcher
    drift: float = 0.0  # by which rates of clocks differ from 1
    share_lost: float = 0.0  # of the coordinator's answers
    is_unlucky: bool = False  # see Plan
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed at the end
    _clocks: Iterator[int] = field(default_factory=itertools.count)  # counts those that were made

    @classmethod
    def make(cls, seed: int, faults: Faults, num_shards: int, num_workers: int) -> Setting:
        world = World(seed)
        network = Network(world, faults)
        shards = [f"shard{i}" for i in range(num_shards)]
        return cls(world, network, Doors(network), History(world), shards, num_workers)

    def client(
        self, name: str, worker: int, window: int = 4, process: int = 0, role: Role = Role.FIRST_WORKER
    ) -> Client:
        """`process`: the number of the worker's process, if it has several."""
        channels = [self.connect(name, i) for i in range(len(self.shards))]
        number = process or 1000 + worker
        return Client(channels, worker=worker, role=role, patience=PATIENT, window=window, process=number)

    def connect(self, name: str, shard: int) -> Channel:
        """A client's way to a server; fleets with replicas put another in its place."""
        return self.doors.connect(name, self.shards[shard])

    def actor(self, name: str, work: Callable[[], None]) -> Actor:
        return self.world.spawn(name, work)

    def start_workers(self, live: Callable[[int, Client], None]) -> None:
        """An actor for each worker, with a client of its own."""
        for worker in range(self.num_workers):
            name = f"worker{worker}"
            client = self.client(name, worker)
            self.actor(name, lambda w=worker, c=client: live(w, c))

    def new_clock(self, offset: float) -> MachineClock:
        """The clock of another machine."""
        dice = self.world.dice
        drift = dice.uniform(-self.drift, self.drift)
        if self.is_unlucky:  # one replica is slow, the other fast
            drift = MAX_DRIFT if next(self._clocks) % 2 else -MAX_DRIFT
        rate = 1.0 + drift
        return MachineClock(self.world, offset, rate, dice.uniform(-MAX_WALL_JUMP, MAX_WALL_JUMP))

    @property
    def are_done(self) -> bool:
        return all(actor.has_ended for actor in self.world.actors)


class Fleet:
    """Servers of a setting: how they are made, stopped and looked at. This one has plain servers, which never crash."""

    can_crash = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.nodes = [self.make_node(shard, i) for i, shard in enumerate(setting.shards)]

    def make_node(self, shard: str, index: int) -> Node:
        return Node(self.setting.doors, shard, self.make_server, self.setting.new_clock(1000.0 * (index + 1)))

    def make_server(self) -> Server:
        setting = self.setting
        rules = {"min_workers": setting.min_workers, "on_worker_loss": setting.on_loss}
        return Server(MAX_TABLE_BYTES, num_workers=setting.num_workers, orphan_timeout=0.0, **rules)

    def heal(self) -> None:
        """No more faults: everybody is there, and can be reached."""
        self.setting.network.heal()

    def disturb(self, dice: random.Random) -> None:
        """One fault of a kind that only this fleet has."""

    def settle(self) -> None:
        """All that is under way arrives; called when no client asks for anything any longer."""
        self.setting.world.pass_time(5.0)

    def deserted(self) -> Iterator[tuple[Node, str]]:
        """Nodes that are about to end because all workers are lost, each with its reason."""
        for node in self.nodes:
            if node.is_alive and not node.is_frozen and node.handler.desertion:
                yield node, node.handler.desertion

    def finish(self, node: Any) -> None:
        """The node's process ends by itself; only where rows outlive it."""

    def servers(self) -> list[Server]:
        """By shard, the replica that serves it now."""
        return [node.handler for node in self.nodes]

    def restart_all(self) -> None:
        """Every process ends, and begins again with what is kept of it."""

    def begin_next_run(self) -> None:
        """The job is over, and another one begins with what is kept."""

    def check(self) -> None:
        """What must hold of these servers beside what clients see."""


def contents(server: Server) -> dict[str, Any]:
    """All that the tables of a server hold, in an order that does not depend on how it came there."""
    held: dict[str, Any] = {}
    for table in server.state.tables.values():
        pieces: list[tuple[Any, ...]] = []
        for saved in table.save_slices("full", 1 << 12):
            arrays = {name: np.asarray(array) for name, array in sorted(saved.arrays.items())}
            if "keys" in arrays:
                keys = arrays["keys"].reshape(-1)
                if not len(keys):
                    continue
                order = np.argsort(keys, kind="stable")
                arrays = {name: array[order] for name, array in arrays.items() if len(array) == len(keys)}
            pieces.append((saved.kind, saved.start, *((name, array.tobytes()) for name, array in arrays.items())))
        held[table.spec.name] = (table.step, *sorted(pieces))
    return held
