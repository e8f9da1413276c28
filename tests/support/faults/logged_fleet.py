"""Servers with logs on simulated disks: killed, cut off from power, and started again from what the disk has kept."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from support.faults.clocks import MachineClock
from support.faults.disks import Disk, Disks
from support.faults.history import Violation, expect
from support.faults.nodes import Node
from support.faults.same_state import check_same, make_first_values
from support.faults.setting import Fleet, Setting, contents
from support.faults.virtual_world import Over

from torchfleet.base.errors import LogError
from torchfleet.ps.server.log.durable_server import Durability, DurableServer, begin_log, go_on
from torchfleet.ps.server.log.log_records import Records
from torchfleet.ps.server.log.log_start import START, read_start
from torchfleet.ps.server.log.logged_server import LoggedServer
from torchfleet.ps.server.server import Server

FAST_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _clock() -> float:
    return time.monotonic()  # as it is when it is asked: the name may stand for another clock by then


CLOCK_DEFAULTS = (0, 0, None, _clock)  # of LoggedServer


class LoggedNode(Node):
    """A server's process, and the disk that outlives it."""

    def __init__(self, fleet: LoggedFleet, name: str, clock: MachineClock) -> None:
        self.fleet = fleet
        path = Path(fleet.folder) / name
        self.disk = fleet.disks.add(path, fleet.has_power_cuts)
        if fleet.setting.is_unlucky:
            self.disk.syncing = self._be_unlucky
        self._failures = random.Random(f"{name} {fleet.setting.world.dice.getstate()}")  # beside the other dice
        super().__init__(fleet.setting.doors, name, self._make_durable, clock)

    def _make_durable(self) -> DurableServer:
        fsync_ms = 0.0 if self.fleet.has_power_cuts else 10.0
        server, durability = self.fleet.make_server(), Durability(self.disk.folder, fsync_ms, self.fleet.run)
        made = go_on(server, durability, lambda text: None) or begin_log(server, durability)
        ring = made.wake
        made._writer._wake = lambda: (ring(), self.world.after(0.0, self.poke))
        return made

    def crash(self) -> None:
        handler = self.handler
        super().crash()
        self.disk.crash()
        if handler is not None:  # as the system does at the end of a process
            handler._folder.close()
            os.close(handler._bell)

    def _be_unlucky(self) -> bool:
        """Now and then it is killed in the middle of a sync, or the sync fails. That may lose what was acknowledged if
        syncs are put off: not in these schedules."""
        dice = self.world.dice
        if dice.random() < 0.02 and self.is_alive:
            self.world.after(dice.uniform(0.0, self.disk.delay), lambda: self.fleet.kill(self, 0.5))
        may_fail = self.fleet.has_power_cuts and self.fleet.setting.has_faults and self.is_alive
        return may_fail and self._failures.random() < 0.01

    def _look(self) -> None:
        try:
            super()._look()
        except LogError:
            if not self.disk.has_failed:
                raise
            self.end()

    def end(self) -> None:
        """It ends by itself, as its log cannot be written."""
        self.fleet.setting.history.note(f"a sync of {self.name} has failed, and it is started again")
        self.crash()
        self.world.after(0.5, lambda: self.fleet.revive(self))

    def release(self) -> None:
        """As the system does at the end of a process that was killed while it began or ended."""
        self.disk.crash()
        for file in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                # Not those of segments: a mapped file has one of its own, which it closes itself.
                if os.readlink(f"/proc/self/fd/{file}") == f"{self.disk.folder}/lock":
                    os.close(int(file))

    def freeze(self, seconds: float) -> None:
        super().freeze(seconds)
        for writer in self.disk.writers:
            writer.freeze(seconds)


def finish_with_log(node: Node, disk: Disk) -> None:
    """The process ends because all workers are lost. Its log, if it has one, is kept."""
    start = disk.folder / START
    had_log = start.exists()
    if node.finish():
        expect(start.exists() or not had_log, f"{node.name} has removed its log, although workers are lost")


class LoggedFleet(Fleet):
    """`--durability log`."""

    can_crash = True
    run = "first"
    nodes: list[LoggedNode]

    def __init__(self, setting: Setting) -> None:
        self.has_power_cuts = setting.world.dice.random() < 0.5
        self._held = tempfile.TemporaryDirectory(prefix="faults-", dir=FAST_FOLDER)
        self.folder = self._held.name
        self.disks = Disks(setting.world)
        setting.stack.callback(self._held.cleanup)
        setting.stack.enter_context(self.disks.attached())
        setting.stack.enter_context(mock.patch.object(LoggedServer.__init__, "__defaults__", CLOCK_DEFAULTS))
        super().__init__(setting)
        setting.stack.callback(lambda: [node.crash() for node in self.nodes])

    def make_node(self, shard: str, index: int) -> LoggedNode:
        return LoggedNode(self, shard, self.setting.new_clock(1000.0 * (index + 1)))

    def deserted(self) -> Iterator[tuple[Node, str]]:
        for node in self.nodes:
            if node.is_alive and not node.is_frozen and node.handler.server.desertion:
                yield node, node.handler.server.desertion

    def finish(self, node: LoggedNode) -> None:
        finish_with_log(node, node.disk)

    def servers(self) -> list[Server]:
        return [node.handler.server for node in self.nodes]

    def disturb(self, dice: random.Random) -> None:
        node = dice.choice(self.nodes)
        (kind,) = dice.choices(["kill", "cut", "slow", "full"], (6, 2, 2, 1))
        note = self.setting.history.note
        if kind == "kill" and node.is_alive:
            seconds = dice.choice([0.05, 0.5, 3.0])
            node.when_it_serves(lambda: self.kill(node, seconds), dice.choice([0.0, 0.001, 0.01, 0.1]))
        elif kind == "cut" and node.is_alive:
            note(f"the log of {node.name} is cut")
            with self.setting.world.on_machine(node.clock):
                node.handler._cut()
            if dice.random() < 0.5:
                self.setting.world.after(dice.uniform(0.0, 0.02), lambda: self.kill(node, 0.5))
        elif kind == "slow":
            note(f"the disk of {node.name} becomes slow")
            node.disk.delay = 0.3
        else:
            seconds = dice.choice([0.5, 4.0])
            note(f"the disk of {node.name} is full for {seconds:g} s")
            node.disk.full_until = self.setting.world.now + seconds

    def kill(self, node: LoggedNode, seconds: float) -> None:
        if node.is_alive and self.setting.has_faults:
            self.setting.history.note(f"{node.name} is killed, and started again {seconds:g} s later")
            node.crash()
            self.setting.world.after(seconds, lambda: self.revive(node))

    def heal(self) -> None:
        super().heal()
        for node in self.nodes:
            if node.disk.has_failed:
                node.end()
            self.revive(node)
            node.disk.delay, node.disk.full_until = 0.001, 0.0

    def settle(self) -> None:
        super().settle()
        for node in self.nodes:
            expect(node.handler.confirmed == node.handler.index, f"{node.name}: its last entries never become safe")

    def restart_all(self) -> None:
        """Whatever was promised is on the disks."""
        for node in self.nodes:
            before = node.handler.server
            node.crash()
            node.start()
            check_same(node.name, node.handler.server, before)

    def begin_next_run(self) -> None:
        """The job is started again over the same logs, and a server is killed while it begins; then all is over."""
        self.run = "second"
        for node in self.nodes:
            before = node.handler.server
            node.crash()
            self._start_and_kill(node)
            found = node.handler.server
            make_first_values(found, before)
            is_same = bool(before.state.pushes.gathered) or contents(found) == contents(before)
            expect(is_same, f"{node.name} has other rows in a new run")
            expect(not found.state.meetings.members.num_joined, f"{node.name} knows workers of the run before")
            self._end_and_kill(node)

    def _start_and_kill(self, node: LoggedNode) -> None:
        node.disk.steps_left = self.setting.world.dice.randint(0, 12)
        try:
            node.start()
        except (Over, LogError):
            if not node.disk.is_dead:
                raise
            node.release()
            node.start()
        node.disk.steps_left = None

    def _end_and_kill(self, node: LoggedNode) -> None:
        """The log is removed. Whenever that ends, another server can begin there."""
        handler, node.handler = node.handler, None
        node.disk.steps_left = self.setting.world.dice.randint(0, 5)
        with contextlib.suppress(Over, OSError), self.setting.world.on_machine(node.clock):
            handler.close(is_over=True)
        node.release()
        node.start()

    def check(self) -> None:
        """A log with one bit that is wrong, wherever, is not used."""
        dice = self.setting.world.dice
        for node in self.nodes:
            held = [path for path in sorted(node.disk.folder.glob("segment-*")) if path.stat().st_size]
            if not held:
                continue  # a segment that has just begun is empty
            data, salt = bytearray(held[-1].read_bytes()), read_start(held[-1].parent).salt
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            records = Records(memoryview(bytes(data)), "a spoiled copy", is_synced=True, salt=salt)
            with contextlib.suppress(LogError):
                num = sum(1 for _ in records)
                raise Violation(f"{node.name}: {num} records of a log with a wrong bit were read, as if it were right")

    @staticmethod
    def revive(node: LoggedNode) -> None:
        if not node.is_alive and not node.is_starting:
            node.start()
