"""Disks of replicas that are full or fail, on virtual time: nothing is lost, and who cannot go on says so."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.replica_pair import Pair
from support.scripts.launching import wait_until

from torchfleet.base.errors import LogError
from torchfleet.ps.server.log import log_writer
from torchfleet.ps.server.replicas import backup_sink
from torchfleet.ps.server.replicas.primary import Primary
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client, Future
from torchfleet.ps.worker.client.connection import Patience

ROWS = TableSpec("rows", dim=2, rule=Rule("sgd", lr=1.0))
KEYS = np.arange(50, dtype=np.uint64)
START = 3.0  # virtual seconds in which a backup is filled, and named
FOLDERS = ("/server-0/", "/server-0.replica1/")


class Disks:
    """The disks under the logs of both replicas. `full`: the numbers of those that are; `failing`: of whose the next
    sync fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: set[int] = set()
        self.failing: set[int] = set()
        self._write, self._sync = os.pwritev, os.fdatasync
        monkeypatch.setattr(os, "pwritev", self._pwritev)
        monkeypatch.setattr(os, "fdatasync", self._fdatasync)
        monkeypatch.setattr(log_writer, "_PAUSE", 0.001)

    def _pwritev(self, file: int, buffers: Any, offset: int) -> int:
        if self._replica(file) in self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(file, buffers, offset)

    def _fdatasync(self, file: int) -> None:
        if self._replica(file) in self.failing:
            self.failing.discard(self._replica(file))
            raise OSError(errno.EIO, "Input/output error")
        self._sync(file)

    @staticmethod
    def _replica(file: int) -> int:
        path = os.readlink(f"/proc/self/fd/{file}")
        return next((number for number, folder in enumerate(FOLDERS) if folder in path), -1)


class Fleet:
    """Two replicas with logs, and a client that counts its pushes."""

    def __init__(self, folder: Path, disks: Disks) -> None:
        (folder / "views").mkdir()
        (folder / "store").mkdir(mode=0o700)
        self.pair = Pair(folder / "views", log_store=folder / "store", waits_for_backup=False)
        self.pair.full = disks.full
        self.total = 0.0

    def begin(self) -> None:
        self.pair.start(0)
        self.pair.start(1)
        self.pair.run(START)
        self.connect()

    def run_until_failure(self) -> None:
        """Until a sync of the primary's log has failed, and the primary has seen it. A real thread syncs: virtual time
        stands still meanwhile."""
        self.pair.run(0.1)  # what was pushed is written
        writer = self.primary.logged._writer
        wait_until(lambda: bool(writer.failure), 100.0, "failure of the primary's log")
        self.pair.run(0.1)

    def connect(self) -> None:
        self._client = Client([self.pair.client()], patience=Patience(60.0, 3), window=4)
        self._client.create_table(ROWS)

    def push(self) -> Future[None]:
        self.total += 1
        return self._client.push("rows", KEYS, np.full((len(KEYS), 2), -1.0, np.float32))

    def check(self) -> None:
        """What was acknowledged is there, once."""
        rows = self._client.pull("rows", KEYS).result()
        assert np.array_equal(rows, np.full((len(KEYS), 2), self.total, np.float32))

    @property
    def primary(self) -> Primary:
        replica = self.pair.replicas[self.pair.primary() or 0]
        assert replica is not None
        assert replica._primary is not None
        return replica._primary


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Disks:
    return Disks(monkeypatch)


@pytest.fixture
def fleet(tmp_path: Path, disks: Disks) -> Iterator[Fleet]:
    made = Fleet(tmp_path, disks)
    yield made
    disks.full.clear()
    for number in range(2):
        made.pair.kill(number)


@pytest.mark.parametrize("number", [0, 1], ids=["primary", "backup"])
def test_while_one_disk_is_full_changes_are_refused_and_none_is_lost(fleet: Fleet, disks: Disks, number: int) -> None:
    fleet.begin()
    fleet.push().result()
    disks.full.add(number)
    waiting = [fleet.push()]
    fleet.pair.run(1.0)
    index = fleet.primary.logged.index
    waiting.append(fleet.push())
    fleet.pair.run(5.0)
    assert fleet.primary.logged.index == index, "the second push was not taken in"
    assert fleet.primary.has_backup
    disks.full.clear()
    for pushed in waiting:
        pushed.result()
    fleet.check()


def test_a_backup_that_falls_behind_holds_changes_up(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup_sink, "MAX_BEHIND", 1000)
    fleet.begin()
    fleet.pair.stopped.add(1)
    waiting = [fleet.push() for _ in range(2)]  # of more than 1000 bytes
    fleet.pair.run(0.3)
    index = fleet.primary.logged.index
    waiting.append(fleet.push())
    fleet.pair.run(0.3)
    assert fleet.primary.logged.index == index
    fleet.pair.stopped.clear()
    for pushed in waiting:
        pushed.result()
    fleet.check()


def test_changes_do_not_wait_for_a_backup_that_has_no_room_while_it_is_filled(fleet: Fleet, disks: Disks) -> None:
    disks.full.add(1)
    fleet.begin()
    for _ in range(5):
        fleet.push().result()
    assert not fleet.primary.has_backup
    assert fleet.primary._sink is None, "no entries are kept for it"
    disks.full.clear()
    fleet.pair.kill(1)
    fleet.pair.start(1)
    fleet.pair.run(START)
    assert fleet.primary.has_backup
    fleet.pair.kill(0)
    fleet.push().result()
    fleet.check()


def test_a_primary_whose_sync_fails_ends_and_its_backup_takes_over(fleet: Fleet, disks: Disks) -> None:
    fleet.begin()
    fleet.push().result()
    disks.failing.add(0)
    pushed = fleet.push()
    with pytest.raises(LogError):
        fleet.run_until_failure()
    fleet.pair.kill(0)
    pushed.result()
    fleet.push().result()
    assert fleet.pair.primary() == 1
    fleet.check()
