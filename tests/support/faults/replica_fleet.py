"""Servers with backups: primaries are killed, stopped and cut off, coordinators are out of reach; no client notices."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from unittest import mock

from support.faults.history import Violation, expect
from support.faults.logged_fleet import CLOCK_DEFAULTS
from support.faults.network import Doors
from support.faults.nodes import Node
from support.faults.same_state import check_same
from support.faults.setting import Fleet, Setting
from support.faults.simulated_etcd import ERROR, REFUSED, SILENT, TROUBLES, SimulatedEtcd

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.ps.coordination.etcd_coordinator import EtcdCoordinator
from torchfleet.ps.coordination.etcd_gateway import Access, EtcdGateway
from torchfleet.ps.net import replica_channels, transport
from torchfleet.ps.net.replica_channels import ReplicaChannels
from torchfleet.ps.net.wire import Command, Message, Role, encode, pack
from torchfleet.ps.server.log.durable_server import Durability
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.replicas.between import Identity, LostBody
from torchfleet.ps.server.replicas.replica import Replica
from torchfleet.ps.server.server import Server

RESTART = 0.4  # seconds until a launcher has started a process again


class ReplicaNode(Node):
    """A replica's process; one that is deposed ends, and is started again."""

    def __init__(self, fleet: ReplicaFleet, doors: Doors, shard: int, replica: int) -> None:
        self.fleet, self.shard, self.replica, self.restart = fleet, shard, replica, -1
        if fleet.setting.is_unlucky:
            self.tick_seconds = transport.TICK
        clock = fleet.setting.new_clock(1000.0 * (1 + replica))
        super().__init__(doors, f"{fleet.setting.shards[shard]}.{replica}", self._make_replica, clock)

    def _make_replica(self) -> Replica:
        self.restart += 1
        server = self.fleet.make_server()
        own = Identity(self.shard, self.replica, self.restart, self.world.dice.getrandbits(60) | 1)
        self.own = own
        self.fleet.etcd.askers[self.name] = self.wait
        coordinator = EtcdCoordinator(EtcdGateway([self.name], Access()), "job")
        made = Replica(server, own, coordinator, self._connect, self.clock.monotonic, durability=self._durability())
        made.begin()
        return made

    def _durability(self) -> Durability | None:
        return None

    def _connect(self, replica: int) -> object:
        shard = self.fleet.setting.shards[self.shard]
        number = next(self.fleet.numbers)
        channel = self._doors.connect(f"{self.name}#{number}", f"{shard}.{replica}")
        channel.arrived = self.poke
        return channel

    @property
    def is_sure(self) -> bool:
        """Whether it would acknowledge a change now."""
        primary = self.handler._primary if self.is_alive and not self.is_frozen else None
        return primary is not None and not self.handler.deposed and primary.is_sure(self.clock.monotonic())

    def _look(self) -> None:
        super()._look()
        self.fleet.check_sure(self.shard)
        if self.is_alive and self.handler.deposed:
            self.fleet.setting.history.note(f"{self.name}: {self.handler.deposed}")
            self.crash()
            self.world.after(RESTART, lambda: self.fleet.revive(self))

    def crash(self) -> None:
        primary = self.handler._primary if self.handler is not None else None
        super().crash()
        if primary is not None:  # as the system does at the end of a process
            os.close(primary.logged._bell)


class ReplicaFleet(Fleet):
    """`--replicas 2`."""

    can_crash = False  # of both replicas at once nothing is promised
    nodes: list[ReplicaNode]
    node_type: Callable[..., ReplicaNode] = ReplicaNode

    def __init__(self, setting: Setting) -> None:
        self.setting, self.etcd = setting, SimulatedEtcd(setting.world)
        setting.stack.enter_context(self.etcd.attached())
        self.numbers = itertools.count()
        setting.stack.enter_context(mock.patch.object(LoggedServer.__init__, "__defaults__", CLOCK_DEFAULTS))
        # Every look costs a change of threads: this halves the time that a schedule takes.
        setting.stack.enter_context(mock.patch.object(replica_channels, "_STEP", 0.1))
        setting.connect = self._connect  # type: ignore[method-assign]
        self.nodes = []
        for shard, replica in itertools.product(range(len(setting.shards)), range(2)):
            self.nodes.append(self.node_type(self, setting.doors, shard, replica))
        setting.stack.callback(lambda: [node.crash() for node in self.nodes])
        setting.world.run(self._is_whole, 300.0)
        self.etcd.share_lost = setting.share_lost
        if setting.is_unlucky:
            self.etcd.changed = self._be_unlucky

    def _is_whole(self) -> bool:
        return all((views := self.etcd.views(shard)) and views[-1].backup for shard in range(len(self.setting.shards)))

    def _connect(self, name: str, shard: int) -> ReplicaChannels:
        names = [f"{self.setting.shards[shard]}.{replica}" for replica in range(2)]
        return ReplicaChannels([self.setting.doors.connect(name, to) for to in names], shard, Role.FIRST_WORKER)

    def deserted(self) -> Iterator[tuple[Node, str]]:
        for node in self.nodes:
            if not node.is_alive or node.is_frozen:
                continue
            expect(not node.handler.is_over, f"{node.name} ends as if all workers had left")
            if node.handler._server.desertion:
                yield node, node.handler._server.desertion

    def servers(self) -> list[Server]:
        """By shard, the primary's."""
        found = []
        for shard in range(len(self.setting.shards)):
            sure = [node for node in self._pair(shard) if node.is_sure]
            expect(len(sure) == 1, f"shard {shard} has {len(sure)} primaries in the end")
            found.append(sure[0].handler._server)
        return found

    def check_sure(self, shard: int) -> None:
        sure = [node for node in self._pair(shard) if node.is_sure]
        if len(sure) > 1:
            terms = [node.handler.term for node in sure]
            raise Violation(f"shard {shard} has two primaries that both acknowledge, in terms {terms}")

    def disturb(self, dice: random.Random) -> None:
        node = dice.choice(self.nodes)
        (kind,) = dice.choices(["kill", "apart", "away"], (5, 5 if self.setting.is_unlucky else 2, 3))
        seconds = dice.choice([0.3, 1.0, 3.0, 8.0])
        note = self.setting.history.note
        other = self._pair(node.shard)[1 - node.replica]
        if kind == "kill":
            later, told = dice.uniform(0.2, 3.0), dice.random() < 0.5
            node.when_it_serves(lambda: self._kill(node, other, later, told), dice.choice([0.0, 0.001, 0.01, 0.1]))
        elif kind == "apart":
            both = dice.random() < 0.5
            note(f"{node.name} cannot reach {other.name} for {seconds:g} s{', nor back' if both else ''}")
            self._separate(node, other, seconds)
            if both:
                self._separate(other, node, seconds)
        else:
            how = dice.choice(TROUBLES)
            nodes = dice.choice([[node], self.nodes])
            note(f"etcd: {how} for {seconds:g} s, to {[each.name for each in nodes]}")
            for each in nodes:
                self.etcd.disturb(each.name, how, seconds)

    def _be_unlucky(self, name: str) -> bool:
        """A replica has changed its view. Often it does not hear of it, and its link to the other one breaks, or is
        whole again, at that moment. Whether the answer is lost."""
        dice, setting = self.setting.world.dice, self.setting
        if not setting.has_faults or dice.random() < 0.5:
            return False
        node = next(node for node in self.nodes if node.name == name)
        other = self._pair(node.shard)[1 - node.replica]
        if dice.random() < 0.5:
            setting.history.note(f"{name} has changed the view, and is cut off from {other.name}")
            for one, another in ((node, other), (other, node)):
                self._separate(one, another, 1.5)
        else:
            setting.history.note(f"{name} has changed the view, and hears {other.name} again")
            setting.network.mend(name, other.name)
        self.etcd.disturb(name, dice.choice((REFUSED, SILENT, ERROR)), dice.choice([1.0, 3.0]))
        return True

    def _kill(self, node: ReplicaNode, other: ReplicaNode, later: float, told: bool) -> None:
        """It is started again so much later. `told`: the launcher tells the other one."""
        if not self._may_kill(node, other) or not self.setting.has_faults:
            return
        self.setting.history.note(f"{node.name} is killed{', which its launcher tells' if told else ''}")
        lost = node.own
        node.crash()
        if told:
            self.setting.world.after(0.1, lambda: self._tell_lost(other, lost))
        self.setting.world.after(later, lambda: self.revive(node))

    def _separate(self, source: ReplicaNode, target: ReplicaNode, seconds: float) -> None:
        self.setting.network.cut(source.name, target.name, seconds)

    def _may_kill(self, node: ReplicaNode, other: ReplicaNode) -> bool:
        """Of two that have all, one may be lost."""
        view = self.etcd.views(node.shard)[-1]
        return node.is_alive and other.is_alive and other.own.name in (view.primary, view.backup)

    def _tell_lost(self, to: ReplicaNode, lost: Identity) -> None:
        body = pack(LostBody(lost.replica, lost.restart))
        to.take(b"launcher/0", encode(Message(Command.LOST, Role.LAUNCHER, arrays=[body], shard=to.shard)))

    def revive(self, node: ReplicaNode) -> None:
        if node.is_alive or node.is_starting:
            return
        try:
            node.start()
        except CoordinatorUnreachable:
            self.setting.world.after(RESTART, lambda: self.revive(node))

    def heal(self) -> None:
        super().heal()
        self.etcd.heal()
        for node in self.nodes:
            self.revive(node)

    def settle(self) -> None:
        """Until every shard has a primary and a backup that is in step."""
        self.setting.world.run(self._is_whole, self.setting.world.now + 100.0)
        super().settle()

    def check(self) -> None:
        """The backup has all that the primary has; terms rise by one at a time."""
        for shard, primary in enumerate(self.servers()):
            terms = [view.term for view in self.etcd.views(shard)]
            expect(terms == list(range(1, len(terms) + 1)), f"shard {shard}: terms are {terms}")
            (follower,) = (node for node in self._pair(shard) if not node.is_sure)
            replay = follower.handler._follower.replay
            leader = next(node for node in self._pair(shard) if node.is_sure).handler._primary.logged
            expect(replay.index == leader.index, f"shard {shard}: the backup is at {replay.index}, not {leader.index}")
            check_same(follower.name, replay.server, primary)

    def _pair(self, shard: int) -> list[ReplicaNode]:
        return self.nodes[2 * shard : 2 * shard + 2] if hasattr(self, "nodes") else []
