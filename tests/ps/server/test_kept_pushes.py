"""Pushes that servers keep: gathered ones are one update with their mean, held ones are applied in time; once each."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fleets import Talk, assert_ok, keys_of, push_arrays, refusal
from support.messages import names
from support.searches import examples
from test_waiting import ROWS as SGD_ROWS
from test_waiting import SYNC_TIMEOUT, TIMEOUT, Meeting

from torchfleet.ps.net.wire import (
    BOUNDED,
    DENSE_BACK,
    GATHERED,
    SYNC,
    VERSIONS,
    Array,
    Command,
    Message,
    Reply,
    decode_reply,
    pack,
    unpack,
)
from torchfleet.ps.server import sliced_pull
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

ROWS = TableSpec("rows", dim=2, rule=Rule("adam", lr=0.1))
BLOCK = TableSpec("block", kind="dense", size=3, rule=Rule("adam", lr=0.1))


class Job:
    """A server and its workers, which push to a block and to rows."""

    def __init__(self, num_workers: int, num: int = 0, max_age: int = 4) -> None:
        self.server = Server(1 << 22, num_workers)
        self.workers = [Talk(self.server, client=10 + worker, worker=worker) for worker in range(num_workers)]
        self.settings = (num, max_age)
        for spec in (ROWS, BLOCK):
            self.workers[0].create(spec)

    def message(self, worker: int, keys: Any, seed: int, flags: int, *, samples: float = 1.0, version: float = np.nan,
                settings: tuple[int, ...] | None = None) -> Message:  # fmt: skip
        rng = np.random.default_rng(seed)
        lines = np.array([[np.nan, version, samples], [np.nan, np.nan, samples]])
        block, rows = rng.normal(size=(3, 1)).astype(np.float32), rng.normal(size=(len(keys), 2)).astype(np.float32)
        arrays = [
            Array(0, lines),
            Array(BLOCK.number, np.empty(0, np.uint64)),
            Array(BLOCK.number, block),
            Array(ROWS.number, np.array(keys, np.uint64)),
            Array(ROWS.number, rows),
        ]
        if flags & (GATHERED | BOUNDED):
            arrays.append(Array(0, np.array(self.settings if settings is None else settings, np.uint64)))
        return self.workers[worker].message(Command.PUSH, *arrays, once=True, flags=flags)

    def apply_rest(self) -> None:
        empty = [Array(0, np.empty((0, 1))), Array(0, np.array(self.settings, np.uint64))]
        assert_ok(self.workers[0].ask(Command.PUSH, *empty, once=True, flags=GATHERED))

    def values(self) -> list[bytes]:
        """All values, to the bit."""
        talk = self.workers[0]
        rows = talk.pull(ROWS, range(6), flags=1)
        return [talk.pull(BLOCK, [0, 3]).tobytes(), rows.tobytes()]

    def stats(self) -> dict[str, Any]:
        return unpack(self.workers[0].ask(Command.STATS).arrays[0], dict)


STEP = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 99), st.integers(0, 3)), min_size=3, max_size=3
)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(STEP, st.permutations(range(3)), st.booleans()), min_size=1, max_size=4))
def test_one_push_of_each_worker_is_a_sync_step_to_the_bit(steps: list[Any]) -> None:
    """In whatever order they come, and however often they are repeated; weighted by samples."""
    sync, gathered = Job(3), Job(3, num=3)
    for pushes, order, repeat in steps:
        for job, flags in ((sync, SYNC), (gathered, GATHERED)):
            for worker in order:
                keys, seed, samples = pushes[worker]
                message = job.message(worker, keys, seed, flags, samples=float(samples))
                for _ in range(1 + repeat):
                    for reply in job.workers[worker].send(message):
                        assert_ok(reply)
        assert gathered.values() == sync.values()
    assert gathered.stats()["gathered"] == 0


def test_a_push_is_acknowledged_when_it_is_kept_and_its_memory_is_free_then() -> None:
    job = Job(2, num=2)
    before = job.values()
    message = job.message(0, [1], 5, GATHERED | DENSE_BACK | VERSIONS)
    (reply,) = job.workers[0].send(message)
    assert [array.data.tolist() for array in reply.arrays] == [[[0], [0], [0]], [[0]]]  # the block, and its version
    for array in message.arrays[2:5:2]:
        array.data[:] = 1e9  # the worker uses its arrays again
    assert job.values() == before
    assert job.stats()["gathered"] == 1
    (reply,) = job.workers[1].send(job.message(1, [1], 6, GATHERED | DENSE_BACK | VERSIONS))
    assert reply.arrays[1].data.tolist() == [[1]]
    twin = Job(2, num=2)
    for worker, seed in ((1, 6), (0, 5)):
        twin.workers[worker].send(twin.message(worker, [1], seed, GATHERED))
    assert job.values() == twin.values()


@settings(max_examples=examples(40))
@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 99), st.booleans())),
)
def test_every_kept_push_reaches_the_tables_once(num: int, pushes: list[Any]) -> None:
    """Means of `num` pushes in the order of their arrival, and of the rest at the end, against updates by hand."""
    job, plain = Job(3, num=num), Job(3)
    for worker, keys, seed, is_repeated in pushes:
        message = job.message(worker, keys, seed, GATHERED)
        for _ in range(1 + is_repeated):
            assert_ok(job.workers[worker].send(message)[0])
    job.apply_rest()
    for start in range(0, len(pushes), num):
        some = sorted(enumerate(pushes[start : start + num]), key=lambda pair: (pair[1][0], pair[0]))
        parts = [plain.message(0, keys, seed, 0).arrays for _, (_, keys, seed, _) in some]
        share = np.float32(1 / len(parts))
        block = parts[0][2].data.copy()
        for arrays in parts[1:]:
            block += arrays[2].data
        keys = np.concatenate([arrays[3].data.reshape(-1) for arrays in parts])
        rows = np.concatenate([arrays[4].data for arrays in parts]) * share
        no_keys = Array(BLOCK.number, np.empty(0, np.uint64))
        sections = [no_keys, Array(BLOCK.number, block * share), Array(ROWS.number, keys), Array(ROWS.number, rows)]
        assert_ok(plain.workers[0].ask(Command.PUSH, Array(0, np.full(2, np.nan)), *sections, once=True))
    assert job.values() == plain.values()


def test_gradients_of_an_old_network_are_dropped_and_counted_and_their_rows_are_not() -> None:
    job, twin = Job(1, num=2, max_age=1), Job(1, num=2, max_age=1)
    for each in (job, twin):
        for seed in range(4):  # two updates
            each.workers[0].send(each.message(0, [1], seed, GATHERED, version=seed // 2))
    before = job.values()[0]
    job.workers[0].send(job.message(0, [2], 7, GATHERED, version=0.0))  # two updates old
    job.workers[0].send(job.message(0, [3], 8, GATHERED, version=0.0))
    twin.workers[0].send(twin.message(0, [2], 7, GATHERED, version=2.0))
    twin.workers[0].send(twin.message(0, [3], 8, GATHERED, version=1.0))
    assert job.values()[0] == before
    assert job.values()[1] == twin.values()[1]
    assert job.stats()["dropped"] == 2
    assert job.stats()["tables"]["block"]["staleness"] == {0: 4}
    assert twin.stats()["dropped"] == 0
    assert twin.stats()["tables"]["block"]["staleness"] == {0: 5, 1: 1}


@pytest.mark.parametrize("how", ["leave", "save", "ask"])
def test_what_is_gathered_is_applied_before_a_worker_leaves_and_in_a_save(how: str, tmp_path: Path) -> None:
    job, full = Job(2, num=3), Job(2, num=1)
    for each in (job, full):
        each.workers[0].send(each.message(0, [1, 2], 3, GATHERED))
    assert job.values() != full.values()
    if how == "ask":
        job.apply_rest()
    elif how == "leave":
        assert_ok(job.workers[1].ask(Command.LEAVE))
    else:
        body = {"dirname": str(tmp_path), "folder": "save-1", "with_state": True, "token": 5}
        assert job.workers[0].send(job.workers[0].message(Command.SAVE, pack(body))) == []
        while job.server.work() is not None:
            pass
        assert len(job.server.tick(time.monotonic())) == 1
    assert job.values() == full.values()


def test_pushes_that_do_not_belong_together_are_refused() -> None:
    job = Job(2, num=3)
    job.workers[0].send(job.message(0, [1], 1, GATHERED))
    for message, text in (
        (job.message(1, [1], 1, GATHERED, settings=(2, 4)), "gather and gather_max_age are"),
        (job.message(1, [1], 1, GATHERED | SYNC), f"flags {GATHERED | SYNC}"),
        (job.message(1, [1], 1, GATHERED, settings=(0, 4)), "1 to 1024"),
        (job.message(1, [1], 1, GATHERED, settings=(3,)), "2 numbers"),
        (job.message(1, [1], 1, BOUNDED, settings=(0,)), "Use at least 1"),
    ):
        assert text in refusal(job.workers[1].send(message)[0])[1]
    assert job.stats()["gathered"] == 1


# Held pushes


class Held(Job):
    """Three workers that compute, and may be two updates late."""

    def __init__(self, limit: int = 2) -> None:
        super().__init__(3)
        self.settings = (limit,)  # type: ignore[assignment]
        for worker in range(3):
            self.begin(worker)

    def begin(self, worker: int) -> float:
        key = Array(BLOCK.number, np.array([0, 3], np.uint64))
        reply = self.workers[worker].ask(Command.PULL, key, flags=BOUNDED | VERSIONS)
        return float(reply.arrays[-1].data[0, 0])

    def push(self, worker: int, version: float) -> tuple[Message, list[Reply]]:
        message = self.message(worker, [1], worker, BOUNDED | DENSE_BACK | VERSIONS, version=version)
        return message, self.workers[worker].send(message)

    def release(self, worker: int) -> list[Reply]:
        arrays = [Array(0, np.empty((0, 1))), Array(0, np.array(self.settings, np.uint64))]
        return self.workers[worker].send(self.workers[worker].message(Command.PUSH, *arrays, once=True, flags=BOUNDED))


def test_a_held_push_that_is_repeated_is_applied_once_and_answered_to_the_repeat() -> None:
    job = Held()
    (first,) = job.push(0, 0.0)[1]
    message, none = job.push(0, 1.0)  # a second step, while the others are at their first
    assert not none
    assert not job.workers[0].send(message)
    (own,) = job.push(1, 0.0)[1]
    assert own.worker == 1
    replies = job.push(2, 0.0)[1]
    assert sorted(reply.worker for reply in replies) == [0, 2]
    assert [int(reply.arrays[1].data[0, 0]) for reply in (first, own)] == [1, 2]
    (again,) = job.workers[0].send(message)
    assert again.arrays == []  # a repeat of what was applied
    assert job.stats()["tables"]["block"]["step"] == 4
    assert max(job.stats()["tables"]["block"]["staleness"]) <= 2


@pytest.mark.parametrize("how", ["release", "leave", "join"])
def test_nobody_waits_for_a_worker_that_rests_or_is_gone(how: str) -> None:
    job = Held()
    job.push(0, 0.0)
    assert not job.push(0, 1.0)[1]
    job.push(1, 0.0)
    if how == "release":
        replies = job.release(2)
    elif how == "leave":
        replies = job.workers[2].send(job.workers[2].message(Command.LEAVE))
    else:  # another process in its place
        body = {"host": "h", "pid": 1, "num_workers": 3, "timeout": 5.0, "sync_timeout": 9.0}
        replies = job.workers[2].send(job.workers[2].message(Command.JOIN, pack(body)))
    assert 0 in {reply.worker for reply in replies}
    assert job.stats()["tables"]["block"]["step"] == 3


def test_a_worker_that_was_given_up_and_comes_back_is_not_older_than_the_bound() -> None:
    """Its rows are taken; its gradients of the network are dropped."""
    job = Held()
    job.release(2)
    versions = itertools.count()
    for _ in range(3):
        job.push(0, float(next(versions)))
        job.push(1, float(next(versions)))
    (reply,) = job.push(2, 0.0)[1]
    assert int(reply.arrays[1].data[0, 0]) == 6
    assert job.stats()["dropped"] == 1
    assert max(job.stats()["tables"]["block"]["staleness"]) <= 2
    assert job.stats()["tables"]["rows"]["step"] == 7


class Slow(Meeting):
    """Two workers that have joined and compute; worker 1 is slow, so that worker 0 is held."""

    def __init__(self) -> None:
        super().__init__(2)
        for talk in self.workers:
            assert_ok(talk.ask(Command.PULL, keys_of(SGD_ROWS, [1]), flags=BOUNDED))
        assert len(self.push_bounded(0)) == 1
        assert self.push_bounded(0) == []

    def push_bounded(self, worker: int) -> list[Reply]:
        talk, limit = self.workers[worker], Array(0, np.array([1], np.uint64))
        return talk.send(
            talk.message(Command.PUSH, *push_arrays(SGD_ROWS, [1], [[1]]), limit, once=True, flags=BOUNDED)
        )


def test_a_push_is_not_held_longer_than_agreed_and_its_worker_is_told_for_whom_it_waited() -> None:
    slow = Slow()
    assert slow.later(SYNC_TIMEOUT - 1) == []
    ((worker, kind, text),) = slow.later(SYNC_TIMEOUT + 2)
    assert (worker, kind) == (0, "WorkerMissing")
    assert "worker 1" in text


def test_a_silent_worker_is_given_up() -> None:
    slow = Slow()
    assert slow.later(TIMEOUT - 1) == []
    replies, now = [], TIMEOUT - 1
    while not replies and now < 2 * TIMEOUT:
        now += 0.5
        slow.server.state.meetings.presence._members[0].heard = slow.start + now
        replies = [decode_reply(frames) for _, frames in slow.server.tick(slow.start + now)]
    assert [reply.worker for reply in replies] == [0]
    assert_ok(replies[0])


def test_workers_that_wait_in_a_held_push_and_elsewhere_are_a_circle() -> None:
    meeting = Meeting(3)
    for talk in meeting.workers:
        talk.pull(SGD_ROWS, [1], flags=BOUNDED)
    arrays = [*push_arrays(SGD_ROWS, [1], [[1]]), Array(0, np.array([2], np.uint64))]
    talk = meeting.workers[0]
    assert_ok(talk.ask(Command.PUSH, *arrays, once=True, flags=BOUNDED))
    assert talk.send(talk.message(Command.PUSH, *arrays, once=True, flags=BOUNDED)) == []  # waits for the others
    assert meeting.barrier(1) == meeting.gather(2) == []
    told = meeting.later(1.0)
    assert sorted(worker for worker, _, _ in told) == [0, 1, 2]
    assert {kind for _, kind, _ in told} == {"WorkerMissing"}
    assert all(names(text, "worker 0", "max_staleness", "worker 1", "worker 2") for _, _, text in told)


def test_a_bounded_pull_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused pull is in no log: a backup would not know that its worker computes."""
    job = Held()
    assert job.release(1)
    before = job.server.state.pushes.bound.export()
    monkeypatch.setattr(sliced_pull, "MAX_BYTES", 1000)
    keys = Array(ROWS.number, np.zeros(sliced_pull.WHOLE + 1, np.uint64))
    assert refusal(job.workers[1].ask(Command.PULL, keys, flags=BOUNDED))[0] == "TableError"
    assert job.server.state.pushes.bound.export() == before
