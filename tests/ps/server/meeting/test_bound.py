"""The bound of ages: never exceeded, whatever the order; the oldest never waits; and everybody gets on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Command, Message
from torchfleet.ps.server.meeting.bound import Bound


class Job:
    """Workers at a bound. The oracle is a list: who got values after how many pushes."""

    def __init__(self, limit: int) -> None:
        self.bound, self.limit = Bound(), limit
        self.num_applied, self.sequence = 0, 0
        self.seen: dict[int, int] = {}  # by worker that computes, or whose push waits: pushes before its values
        self.waiting: set[int] = set()
        self.ages: list[int] = []

    def begin(self, worker: int) -> None:
        if worker not in self.seen:
            self.bound.begin(worker)
            self.seen[worker] = self.num_applied

    def push(self, worker: int) -> None:
        if worker not in self.seen or worker in self.waiting:
            return
        is_oldest = self.seen[worker] == min(self.seen.values())
        self.sequence += 1
        self.bound.arrive(Request(Message(Command.PUSH, worker=worker, sequence=self.sequence), None), self.limit)
        self.waiting.add(worker)
        self.apply()
        assert not (is_oldest and worker in self.waiting), "the oldest waits"

    def apply(self) -> None:
        for request in self.bound.ready():
            worker = request.message.worker
            self.ages.append(self.num_applied - self.seen[worker])
            assert self.ages[-1] <= self.limit
            self.bound.applied(worker)
            self.num_applied += 1
            self.seen[worker] = self.num_applied
            self.waiting.discard(worker)

    def release(self, worker: int) -> None:
        if worker in self.seen and worker not in self.waiting:
            self.bound.release(worker)
            del self.seen[worker]
            self.apply()

    def leave(self, worker: int) -> None:
        held = self.bound.leave(worker)
        assert (held is not None) == (worker in self.waiting)
        self.seen.pop(worker, None)
        self.waiting.discard(worker)
        self.apply()


@pytest.mark.slow
@given(
    st.integers(1, 5),
    st.integers(0, 4),
    st.lists(
        st.tuples(st.sampled_from(["push"] * 6 + ["begin", "begin", "release", "leave"]), st.integers(0, 4)),
        min_size=20,
        max_size=60,
    ),
)
def test_no_push_is_older_than_the_bound_and_nobody_waits_in_a_circle(
    num_workers: int, slack: int, events: list[tuple[str, int]]
) -> None:
    job = Job(max(1, num_workers - 1 + slack))
    for worker in range(num_workers):
        job.begin(worker)
    for event, worker in events:
        getattr(job, event)(worker % num_workers)
    for _ in range(num_workers):  # everybody who computes comes to its push: then all that waited have gone on
        for worker in sorted(set(job.seen) - job.waiting):
            job.push(worker)
            job.release(worker)
    assert not job.waiting
    assert not job.bound.waiting()


def test_a_fast_worker_waits_for_the_slow_one() -> None:
    job = Job(limit=3)
    job.begin(0)
    job.begin(1)
    for _ in range(5):
        job.push(0)
    assert job.waiting == {0}  # three of its pushes are between the slow worker and its values
    assert job.bound.slow() == [1]
    job.push(1)
    assert not job.waiting
    assert job.ages == [0, 0, 0, 3, 1]
