"""Servers with logs on simulated disks: killed, cut off from power, and started again from what the disk has kept."""

from __future__ import annotations

import random
from collections.abc import Sequence

from support.faults.disks import Disk, DiskSink
from support.faults.history import expect
from support.faults.nodes import Node
from support.faults.same_state import check_same
from support.faults.setting import Fleet, Setting

from torchfleet.server.log.entry import decode_entry
from torchfleet.server.log.logged_server import LoggedServer
from torchfleet.server.log.replay import Replay
from torchfleet.server.server import Server


class LoggedNode(Node):
    """A server's process, and the disk that outlives it."""

    def __init__(self, fleet: LoggedFleet, name: str, skew: float) -> None:
        self.fleet = fleet
        self.disk = Disk(fleet.setting.world, self.poke, is_safe_when_written=fleet.is_safe_when_written)
        super().__init__(fleet.setting.doors, name, self._make_logged, skew)

    def _make_logged(self) -> LoggedServer:
        server = self.fleet.make_server()
        sink = DiskSink(self.disk)
        if not self.disk.kept:
            logged = LoggedServer(server, [sink])
            logged.copy_to(sink.append, lambda: True)
            return logged
        replay = recovered(server, self.disk.kept)
        sink.last = replay.index
        return LoggedServer(server, [sink], replay.index, replay.term, begun=replay.time)

    def crash(self) -> None:
        super().crash()
        self.disk.lose(self.world.dice)


def recovered(server: Server, entries: Sequence[Sequence[bytes]]) -> Replay:
    replay = Replay(server)
    for frames in entries:
        replay.apply(decode_entry(frames))
    replay.finish()
    return replay


class LoggedFleet(Fleet):
    """`--durability log`."""

    can_crash = True
    nodes: list[LoggedNode]

    def __init__(self, setting: Setting) -> None:
        self.is_safe_when_written = setting.world.dice.random() < 0.5
        super().__init__(setting)

    def make_node(self, shard: str, index: int) -> LoggedNode:
        return LoggedNode(self, shard, 1000.0 * (index + 1))

    def servers(self) -> list[Server]:
        return [node.handler.server for node in self.nodes]

    def disturb(self, dice: random.Random) -> None:
        node = dice.choice(self.nodes)
        (kind,) = dice.choices(["kill", "slow", "full"], (5, 1, 1))
        note = self.setting.history.note
        if kind == "kill" and node.is_alive:
            seconds = dice.choice([0.05, 0.5, 3.0])
            note(f"{node.name} is killed, and started again {seconds:g} s later")
            node.crash()
            self.setting.world.after(seconds, lambda: self._revive(node))
        elif kind == "slow":
            note(f"the disk of {node.name} becomes slow")
            node.disk.delay = 0.5
        else:
            seconds = dice.choice([0.5, 4.0])
            note(f"the disk of {node.name} is full for {seconds:g} s")
            node.disk.full_until = self.setting.world.now + seconds

    def heal(self) -> None:
        super().heal()
        for node in self.nodes:
            self._revive(node)
            node.disk.delay, node.disk.full_until = 0.001, 0.0

    def settle(self) -> None:
        super().settle()
        for node in self.nodes:
            expect(node.handler.confirmed == node.handler.index, f"{node.name}: its last entries never become safe")

    def restart_all(self) -> None:
        """Whatever was promised is on the disks."""
        for node in self.nodes:
            node.crash()
            node.start()

    def check(self) -> None:
        """Whoever replays the log comes to the state of the server that wrote it."""
        for node in self.nodes:
            again = recovered(self.make_server(), node.disk.kept)
            expect(again.index == node.handler.index, f"{node.name}: the log ends at {again.index}")
            check_same(node.name, again.server, node.handler.server)

    @staticmethod
    def _revive(node: LoggedNode) -> None:
        if not node.is_alive:
            node.start()
