"""Keys that wait for the end of a step, against a list of (worker, keys) in the order of the pulls."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchfleet.ps.tables.policies.new_keys import WaitingKeys

PULLS = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1 << 63), unique=True, max_size=4)), max_size=8)


def waiting_of(pulls: list[tuple[int, list[int]]]) -> WaitingKeys:
    waiting = WaitingKeys()
    for worker, keys in pulls:
        waiting.add(worker, np.array(keys, np.uint64))
    return waiting


@settings(deadline=None)
@given(PULLS, st.integers(0, 3))
def test_keys_are_taken_in_the_order_of_workers_without_those_that_were_forgotten(
    pulls: list[tuple[int, list[int]]], gone: int
) -> None:
    waiting = waiting_of(pulls)
    waiting.forget(gone)
    expected = [keys for worker, keys in sorted(pulls, key=lambda pull: pull[0]) if worker != gone]
    assert waiting.num == sum(map(len, expected))
    assert [keys.tolist() for keys in waiting] == expected
    assert [keys.tolist() for keys in waiting.take()] == expected
    assert (waiting.num, list(waiting)) == (0, [])


@settings(deadline=None)
@given(PULLS)
def test_a_copy_has_the_same_keys(pulls: list[tuple[int, list[int]]]) -> None:
    waiting, copy = waiting_of(pulls), WaitingKeys()
    copy.restore(waiting.export())
    assert copy.num == waiting.num
    assert [keys.tolist() for keys in copy] == [keys.tolist() for keys in waiting]
