"""Two replicas of a server in this process, on virtual time; one can be killed, stopped, and cut off.

Messages arrive when `run` lets them, in the order in which they were sent. Logs are written by real threads: virtual
time stands still until they have written all, or have found that a disk is full which the test has filled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path

from support.fleets import MAX_TABLE_BYTES

from torchfleet.base.role.process_settings import log_folder
from torchfleet.ps.coordination.file_coordinator import FileCoordinator
from torchfleet.ps.net.replica_channels import ReplicaChannels
from torchfleet.ps.net.wire import Frame, Role
from torchfleet.ps.server.log.durable_server import Durability
from torchfleet.ps.server.replicas.between import Identity
from torchfleet.ps.server.replicas.liveness import Liveness
from torchfleet.ps.server.replicas.replica import Replica
from torchfleet.ps.server.server import Server

TICK = 0.05
_ONE = 0.001  # seconds that a message takes
_PATIENCE = 100.0  # real seconds that a log may take to be written, on busy cores


class Pair:
    """`replicas`: by number; None: no process is there."""

    def __init__(
        self, folder: Path, num_workers: int = 0, waits_for_backup: bool = True, log_store: Path | None = None
    ) -> None:
        """`folder`: of the coordinator. `log_store`: of the logs; None: there are none."""
        folder.chmod(0o700)
        self.log_store, self.run_name = log_store, "first"
        self._waits_for_backup = waits_for_backup
        self.is_one_machine = False  # whether a replica sees that the other one's process has ended
        self.now = 100.0
        self.coordinator = FileCoordinator(folder)
        self._num_workers = num_workers
        self.replicas: list[Replica | None] = [None, None]
        self.servers: list[Server | None] = [None, None]
        self.restarts = [-1, -1]
        self.stopped: set[int] = set()
        self.full: Collection[int] = ()  # replicas whose logs have no room on their disks
        self.cut: set[tuple[int, int]] = set()  # (from, to): messages that do not arrive; clients are number -1
        self._mail: list[deque[tuple[float, object, list[Frame], Role | None]]] = [deque(), deque()]
        self._next_tick = 0.0

    def start(self, replica: int) -> Replica:
        """A new process."""
        self.restarts[replica] += 1
        server = Server(MAX_TABLE_BYTES, num_workers=self._num_workers)
        own = Identity(0, replica, self.restarts[replica], 1000 * (replica + 1) + self.restarts[replica])
        made = Replica(
            server,
            own,
            self.coordinator,
            lambda to: PairChannel(self, replica, to, Role.SERVER),
            self.clock,
            Liveness(lambda to: self.is_one_machine and self.replicas[to] is None),
            self._waits_for_backup,
            self._durability(replica),
        )
        made.begin()
        self.replicas[replica], self.servers[replica] = made, server
        return made

    def _durability(self, replica: int) -> Durability | None:
        if self.log_store is None:
            return None
        own, other = (log_folder(str(self.log_store), 0, number) for number in (replica, 1 - replica))
        return Durability(own, 10.0, self.run_name, other)

    def kill(self, replica: int) -> None:
        killed, self.replicas[replica] = self.replicas[replica], None
        self._mail[replica].clear()
        if killed is not None and self.log_store is not None:
            killed.deposed = killed.deposed or "killed"  # so that nothing is written into the view
            killed.end(keeps_log=True)

    def clock(self) -> float:
        return self.now

    def send(self, source: int, to: int, peer: object, frames: Sequence[Frame], role: Role | None) -> None:
        if (source, to) not in self.cut and self.replicas[to] is not None:
            copied: list[Frame] = [bytes(memoryview(frame)) for frame in frames]
            self._mail[to].append((self.now + _ONE, peer, copied, role))

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end = self.now + max(seconds, 1e-6)  # less than this may be lost in rounding
        while self.now < end:
            due = min((mail[0][0] for i, mail in enumerate(self._mail) if mail and i not in self.stopped), default=end)
            self.now = max(self.now, min(due, self._next_tick, end))
            self._deliver()
            if self.now >= self._next_tick:
                self._next_tick = self.now + TICK
                self._tick()

    def client(self, role: Role = Role.FIRST_WORKER) -> ReplicaChannels:
        return ReplicaChannels([PairChannel(self, -1, to, role) for to in range(2)], 0, role)

    def primary(self) -> int | None:
        """Which replica is primary and not stopped."""
        found = [i for i, replica in enumerate(self.replicas) if replica and replica.is_primary and not replica.deposed]
        return next((i for i in found if i not in self.stopped), None)

    def _deliver(self) -> None:
        for number, mail in enumerate(self._mail):
            while mail and mail[0][0] <= self.now and number not in self.stopped:
                _, peer, frames, role = mail.popleft()
                replica = self.replicas[number]
                if replica is not None:
                    self._answer(number, replica.handle(peer, frames, role))
                    self._look(number, replica)

    def _tick(self) -> None:
        for number, replica in enumerate(self.replicas):
            if replica is not None and number not in self.stopped:
                self._look(number, replica)

    def _look(self, number: int, replica: Replica) -> None:
        """As the loop of a transport between requests."""
        worked: bool | None = True
        while worked:
            self._write_log(number, replica)
            worked = replica.work()
            self._answer(number, replica.tick(self.now))

    def _write_log(self, number: int, replica: Replica) -> None:
        """Virtual time stands still while a log is written. That a writer is stuck does not say that its disk is full
        now: its thread may not have run since there is room."""
        replica.rest()
        logged = replica._primary.logged if replica._primary is not None else replica._log
        writer = getattr(logged, "_writer", None)
        deadline = time.monotonic() + _PATIENCE
        while writer is not None and not (writer.is_idle or writer.failure):
            if writer.is_stuck and number in self.full:
                break
            assert time.monotonic() < deadline, f"the log of replica {number} is not written: {writer.trouble()}"
            time.sleep(0.0001)

    def _answer(self, number: int, replies: Sequence[tuple[object, list[Frame]]]) -> None:
        for peer, frames in replies:
            if isinstance(peer, PairChannel) and (number, peer.source) not in self.cut:
                peer.inbox.append([bytes(memoryview(frame)) for frame in frames])


class PairChannel:
    """As Channel."""

    def __init__(self, pair: Pair, source: int, to: int, role: Role) -> None:
        self._pair, self.source, self._to, self._role = pair, source, to, role
        self.inbox: deque[list[Frame]] = deque()

    def send(self, frames: Sequence[Frame]) -> bool:
        self._pair.send(self.source, self._to, self, frames, self._role)
        return True

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        end = self._pair.now + timeout
        while not self.inbox and self._pair.now < end:
            self._pair.run(min(_ONE, end - self._pair.now))
        return self.inbox.popleft() if self.inbox else None

    def reconnect(self) -> None:
        self.inbox.clear()

    def close(self) -> None:
        pass

    def now(self) -> float:
        return self._pair.now

    def wakes(self) -> tuple[object, ...]:
        return ()  # time passes in steps, after each of which everybody looks
