"""Servers with backups and logs: one replica is killed, or both; disks are slow, full and cut off from power."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from typing import Any
from unittest import mock

from support.faults.disks import Disks
from support.faults.history import expect
from support.faults.logged_fleet import FAST_FOLDER, finish_with_log
from support.faults.network import Doors
from support.faults.replica_fleet import ReplicaFleet, ReplicaNode
from support.faults.same_state import check_same, make_first_values
from support.faults.setting import Setting, contents

from torchfleet.base.role.process_settings import log_folder
from torchfleet.ps.server.log.durable_server import Durability, DurableServer
from torchfleet.ps.server.replicas.replica_log import ReplicaLog
from torchfleet.ps.tables.settings.spec import TableSpec

PAUSE = 0.01  # seconds after which a kill is tried again, of a process that waits for its disk


class LoggedReplicaNode(ReplicaNode):
    """A replica's process, and the disk that outlives it."""

    fleet: LoggedReplicaFleet

    def __init__(self, fleet: LoggedReplicaFleet, doors: Doors, shard: int, replica: int) -> None:
        folder = log_folder(fleet.folder, shard, replica)
        folder.mkdir(mode=0o700)
        self.disk = fleet.disks.add(folder, fleet.has_power_cuts)
        super().__init__(fleet, doors, shard, replica)

    def _durability(self) -> Durability:
        other = log_folder(self.fleet.folder, self.shard, 1 - self.replica)
        fsync_ms = 0.0 if self.fleet.has_power_cuts else 10.0
        return Durability(self.disk.folder, fsync_ms, self.fleet.run, other)

    @property
    def is_busy(self) -> bool:
        """Whether its code runs: it waits for its disk, or for the coordinator."""
        return self._busy_life == self._life

    def crash(self) -> None:
        handler = self.handler
        super().crash()
        self.disk.crash()
        if handler is not None:  # as the system does at the end of a process
            logged = None if handler._primary is None else handler._primary.logged
            restored = None if handler._restored is None else handler._restored.logged
            for held in (logged, restored, handler._log):
                if getattr(held, "_folder", None) is not None:
                    held._folder.close()
                if held is not None and held is not logged:
                    os.close(held._bell)

    def freeze(self, seconds: float) -> None:
        super().freeze(seconds)
        for writer in self.disk.writers:
            writer.freeze(seconds)


class LoggedReplicaFleet(ReplicaFleet):
    """`--replicas 2 --durability log`."""

    can_crash = True
    run = "first"
    nodes: list[LoggedReplicaNode]  # type: ignore[assignment]
    node_type = LoggedReplicaNode

    def __init__(self, setting: Setting) -> None:
        self.has_power_cuts = setting.world.dice.random() < 0.5
        self._held = tempfile.TemporaryDirectory(prefix="faults-", dir=FAST_FOLDER)
        self.folder = self._held.name
        self.disks = Disks(setting.world)
        setting.stack.callback(self._held.cleanup)
        setting.stack.enter_context(self.disks.attached())
        self.nodes = []
        for kind, name in ((DurableServer, "wake"), (ReplicaLog, "_ring")):
            setting.stack.enter_context(mock.patch.object(kind, name, self._poking(getattr(kind, name))))
        super().__init__(setting)

    def _poking(self, ring: Any) -> Any:
        """As `ring`, a method that a log's thread calls. Then the node of that log looks at once."""

        def ring_and_poke(held: Any) -> None:
            with contextlib.suppress(OSError):  # of a process that was killed
                ring(held)
            folder = held._durability.folder if isinstance(held, ReplicaLog) else held._folder.path
            for node in self.nodes:
                if node.disk.folder == folder:
                    self.setting.world.after(0.0, node.poke)

        return ring_and_poke

    def disturb(self, dice: random.Random) -> None:
        node = dice.choice(self.nodes)
        (kind,) = dice.choices(["one", "both", "slow", "full"], (4, 4, 1, 1))
        if kind == "one":
            super().disturb(dice)
        elif kind == "both":
            pauses = [dice.choice([0.0, 0.001, 0.05, 0.5]) for _ in range(2)]
            later = [dice.choice([0.05, 0.5, 3.0]) for _ in range(2)]
            node.when_it_serves(lambda: self._kill_both(node, pauses, later), dice.choice([0.0, 0.001, 0.01, 0.1]))
        elif kind == "slow":
            self.setting.history.note(f"the disk of {node.name} becomes slow")
            node.disk.delay = 0.3
        else:
            seconds = dice.choice([0.5, 4.0])
            self.setting.history.note(f"the disk of {node.name} is full for {seconds:g} s")
            node.disk.full_until = self.setting.world.now + seconds

    def finish(self, node: LoggedReplicaNode) -> None:
        finish_with_log(node, node.disk)

    def _kill_both(self, node: LoggedReplicaNode, pauses: list[float], later: list[float]) -> None:
        both = node, self._pair(node.shard)[1 - node.replica]
        for each, other, pause, seconds in zip(both, reversed(both), pauses, later, strict=True):
            self.setting.world.after(pause, lambda e=each, o=other, s=seconds: self._kill(e, o, s, False))

    def _kill(self, node: ReplicaNode, other: ReplicaNode, later: float, told: bool) -> None:
        assert isinstance(node, LoggedReplicaNode)
        if node.is_alive and node.is_busy:
            self.setting.world.after(PAUSE, lambda: self._kill(node, other, later, told))
        else:
            super()._kill(node, other, later, told)

    def _may_kill(self, node: ReplicaNode, other: ReplicaNode) -> bool:
        return node.is_alive

    def heal(self) -> None:
        super().heal()
        for node in self.nodes:
            node.disk.delay, node.disk.full_until = 0.001, 0.0

    def restart_all(self) -> None:
        """Whatever was promised is on the disks."""
        before = self.servers()
        self._start_again()
        for shard, server in enumerate(self.servers()):
            check_same(f"shard {shard}", server, before[shard])

    def begin_next_run(self) -> None:
        """The job is started again over the same logs. One replica of each shard was lost before the last change of the
        first run, so that its log is older."""
        world = self.setting.world
        for shard in range(len(self.setting.shards)):
            world.dice.choice(self._pair(shard)).crash()
        world.pass_time(5.0)
        client = self.setting.client("late", 0)
        late = self.setting.actor("late", lambda: client.create_table(TableSpec("late", dim=2)))
        world.run(lambda: late.has_ended, world.now + 100.0)
        expect(late.has_ended and late.error is None, f"no table can be made after a loss: {late.error}")
        before = self.servers()
        self.run = "second"
        self._start_again(new_job=True)
        for shard, found in enumerate(self.servers()):
            make_first_values(found, before[shard])
            is_same = bool(before[shard].state.pushes.gathered) or contents(found) == contents(before[shard])
            expect(is_same, f"shard {shard} has other rows in a new run")
            expect(not found.state.meetings.members.num_joined, f"shard {shard} knows workers of the run before")

    def _start_again(self, new_job: bool = False) -> None:
        for node in self.nodes:
            node.crash()
        num_before = [len(self.etcd.views(shard)) for shard in range(len(self.setting.shards))]
        if new_job:
            self.etcd._written.clear()
            num_before = [0 for _ in num_before]
        for node in self.setting.world.dice.sample(self.nodes, len(self.nodes)):
            node.start()
        world = self.setting.world

        def are_restored() -> bool:
            return all(len(self.etcd.views(shard)) > num for shard, num in enumerate(num_before)) and self._is_whole()

        world.run(are_restored, world.now + 100.0)
        expect(are_restored(), "replicas that have logs are not restored from them")
        world.pass_time(1.0)
