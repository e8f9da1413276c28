"""Replicas that keep logs, on virtual time: whatever is killed, what was acknowledged is there once."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.replica_pair import Pair

from torchfleet.base.errors import LogError
from torchfleet.base.role.process_settings import log_folder
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.log.durable_server import Durability
from torchfleet.ps.server.log.log_start import NOT_IN_STEP, Start, find_start, write_start
from torchfleet.ps.server.log.newest_log import is_newest, require_newest
from torchfleet.ps.server.replicas import replica_log
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

ROWS = TableSpec("rows", dim=2, rule=Rule("sgd", lr=1.0))
KEYS = np.arange(200, dtype=np.uint64)
START = 3.0  # virtual seconds in which a backup is filled, and named


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = begin(tmp_path)
    yield made
    for number in range(2):
        made.kill(number)


def begin(folder: Path, run: str = "first", num_workers: int = 0) -> Pair:
    """Both replicas of a run, in step."""
    views = folder / f"views of {run}"
    views.mkdir()
    (folder / "store").mkdir(mode=0o700, exist_ok=True)
    made = Pair(views, num_workers, log_store=folder / "store")
    made.run_name = run
    made.start(0)
    made.start(1)
    made.run(START)
    return made


class Counting:
    """A client that counts what it was told to be done."""

    def __init__(self, pair: Pair, total: float = 0.0) -> None:
        self._client = Client([pair.client()], patience=Patience(60.0, 3), window=4)
        self._client.create_table(ROWS)
        self.total = total

    def push(self) -> None:
        self._client.push("rows", KEYS, np.full((len(KEYS), 2), -1.0, np.float32)).result()
        self.total += 1

    def check(self) -> None:
        rows = self._client.pull("rows", KEYS).result()
        assert np.array_equal(rows, np.full((len(KEYS), 2), self.total, np.float32))


def terms(pair: Pair) -> list[int | None]:
    """By replica, the term that its log has."""
    assert pair.log_store is not None
    found = [find_start(log_folder(str(pair.log_store), 0, number)) for number in range(2)]
    return [None if start is None else start.term for start in found]


def restart(pair: Pair, *numbers: int) -> None:
    for number in numbers:
        pair.start(number)
    pair.run(START)


def test_both_logs_have_the_term_of_the_view(pair: Pair) -> None:
    view = pair.coordinator.read(0)
    assert view is not None
    assert terms(pair) == [view.term, view.term]


def test_a_backup_takes_over_and_goes_on_with_its_own_log(pair: Pair) -> None:
    client = Counting(pair)
    client.push()
    pair.kill(0)
    client.push()
    assert pair.primary() == 1
    stale, newest = terms(pair)
    assert stale is not None
    assert newest is not None
    assert stale < newest
    pair.kill(1)  # no replica is left, and the log of the first one lacks a push
    restart(pair, 0, 1)
    client.push()
    assert pair.primary() == 1
    client.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_replicas_killed_are_restored_from_a_log(pair: Pair, order: tuple[int, int]) -> None:
    client = Counting(pair)
    for _ in range(3):
        client.push()
    for number in order:
        pair.kill(number)
    before = pair.now
    for number in order:
        pair.start(number)
    client.push()
    assert pair.now - before < 2.0, "each sees that the other one was started again"
    client.check()
    pair.run(START)
    view = pair.coordinator.read(0)
    assert view is not None
    assert view.backup, "the other one was filled"


def test_a_replica_whose_disk_is_lost_does_not_keep_the_other_from_going_on(pair: Pair) -> None:
    client = Counting(pair)
    client.push()
    pair.kill(0)
    pair.kill(1)
    assert pair.log_store is not None
    shutil.rmtree(log_folder(str(pair.log_store), 0))
    restart(pair, 0, 1)
    client.push()
    assert pair.primary() == 1
    client.check()


def test_a_primary_that_went_on_alone_is_not_replaced_by_the_log_of_its_former_backup(pair: Pair) -> None:
    client = Counting(pair)
    client.push()
    pair.kill(1)
    client.push()  # which the backup's log lacks
    pair.kill(0)
    pair.start(1)
    pair.run(20.0)
    assert pair.primary() is None
    pair.start(0)
    client.push()
    client.check()


@pytest.mark.parametrize("first", [0, 1])
def test_a_new_run_goes_on_from_the_newest_log(tmp_path: Path, first: int) -> None:
    """`first`: which replica was primary in the end, after the other one was lost."""
    pair = begin(tmp_path)
    client = Counting(pair)
    client.push()
    pair.kill(1 - first)
    client.push()
    pair.kill(first)
    again = begin(tmp_path, "second")
    assert again.primary() == first
    client = Counting(again, total=2.0)
    client.push()
    client.check()
    view = again.coordinator.read(0)
    assert view is not None
    assert terms(again) == [view.term, view.term], "the stale log was removed, and begun anew"
    for number in range(2):
        again.kill(number)
    third = begin(tmp_path, "third")
    assert third.primary() == 0, "both have all"
    Counting(third, total=3.0).check()
    third.kill(0)
    third.kill(1)


def test_a_run_that_ended_before_its_backup_was_filled_keeps_no_other_from_going_on(tmp_path: Path) -> None:
    """Its replicas have made their folders, so that none of them is taken for lost."""
    views, store = tmp_path / "views", tmp_path / "store"
    views.mkdir()
    store.mkdir(mode=0o700)
    pair = Pair(views, log_store=store)
    pair.start(1)
    pair.start(0)
    pair.kill(0)
    pair.kill(1)
    assert terms(pair) == [1, None]
    again = begin(tmp_path, "second")
    assert again.primary() == 0
    client = Counting(again)
    client.push()
    client.check()
    for number in range(2):
        again.kill(number)


def test_the_logs_of_a_job_that_is_over_are_removed(tmp_path: Path) -> None:
    pair = begin(tmp_path, num_workers=1)
    client = Client([pair.client(Role.LAUNCHER)], role=Role.LAUNCHER, patience=Patience(5.0, 3))
    client.leave()
    first, second = pair.replicas
    assert first is not None
    assert second is not None
    second.end(keeps_log=True)  # as fleetrun tells it
    first.end()
    assert terms(pair) == [None, None]


def test_a_primary_that_is_told_to_end_keeps_its_log(tmp_path: Path) -> None:
    pair = begin(tmp_path, num_workers=1)
    Client([pair.client(Role.LAUNCHER)], role=Role.LAUNCHER, patience=Patience(5.0, 3)).leave()
    first = pair.replicas[0]
    assert first is not None
    first.end(keeps_log=True)
    assert terms(pair)[0] is not None
    pair.kill(1)


def test_the_log_of_a_backup_is_cut(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Counting(pair)
    client.push()
    replica = pair.replicas[1]
    assert replica is not None
    assert replica._log is not None
    monkeypatch.setattr(replica_log, "most_bytes", lambda copied: copied + 20_000)
    replica._log._most_bytes = 1
    for _ in range(30):
        client.push()
        pair.run(0.05)
    assert pair.log_store is not None
    start = find_start(log_folder(str(pair.log_store), 0, 1))
    assert start is not None
    assert start.first > 2
    pair.kill(0)
    pair.kill(1)
    shutil.rmtree(log_folder(str(pair.log_store), 0))
    restart(pair, 0, 1)
    client.check()


@pytest.mark.parametrize("seed", range(4))
def test_replicas_killed_one_by_one_and_together_lose_nothing(pair: Pair, seed: int) -> None:
    dice, client = random.Random(seed), Counting(pair)
    for _ in range(8):
        killed = dice.choice([[0], [1], [0, 1], [1, 0]])
        future = client._client.push("rows", KEYS, np.full((len(KEYS), 2), -1.0, np.float32))
        pair.run(dice.choice([0.0, 0.0005, 0.003, 0.3]))
        for number in killed:
            pair.kill(number)
            pair.run(dice.choice([0.0, 0.1, 1.0]))
        for number in dice.sample(range(2), 2):
            begin_anew(pair, number)
            pair.run(dice.choice([0.0, 0.5]))
        future.result()
        client.total += 1
        for _ in range(3):
            pair.run(1.0)
            begin_anew(pair, 0)
            begin_anew(pair, 1)
    client.check()


def begin_anew(pair: Pair, number: int) -> None:
    """As the launcher does with what was killed or deposed."""
    replica = pair.replicas[number]
    if replica is None or replica.deposed:
        pair.kill(number)
        pair.start(number)


def folders(store: Path) -> tuple[Path, Path]:
    for number in range(2):
        log_folder(str(store), 0, number).mkdir()
    return log_folder(str(store), 0), log_folder(str(store), 0, 1)


@pytest.mark.parametrize(
    ("own", "other", "first", "second"),
    [(3, 2, True, False), (2, 3, False, True), (2, 2, True, False), (2, None, True, False), (None, 2, False, True)],
)
def test_the_higher_term_decides(tmp_path: Path, own: int | None, other: int | None, first: bool, second: bool) -> None:
    places = folders(tmp_path)
    for folder, term in zip(places, (own, other), strict=True):
        if term is not None:
            write_start(folder, Start(1, 1, "run", term))
    assert is_newest(Durability(places[0], other=places[1]), True) == first
    assert is_newest(Durability(places[1], other=places[0]), False) == second


def test_a_backup_that_was_never_in_step_is_no_reason_to_go_on(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    write_start(second, Start(1, 1, "run", NOT_IN_STEP))
    assert not is_newest(Durability(second, other=first), False)


def test_a_log_whose_other_replica_is_elsewhere_is_refused(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    second.rmdir()
    write_start(first, Start(1, 1, "run", 4))
    with pytest.raises(LogError, match=second.name):
        is_newest(Durability(first, other=second), True)
    write_start(first, Start(1, 1, "run", 0))  # it had no backup
    assert is_newest(Durability(first, other=second), True)


def test_a_server_without_a_backup_does_not_go_on_from_an_older_log(tmp_path: Path) -> None:
    first, second = folders(tmp_path)
    write_start(second, Start(1, 1, "run", 4))
    for own in (None, 3):
        if own is not None:
            write_start(first, Start(1, 1, "run", own))
        with pytest.raises(LogError, match="--replicas 2"):
            require_newest(Durability(first, other=second))
    write_start(first, Start(1, 1, "run", 4))
    require_newest(Durability(first, other=second))
