"""Rows that a cache has dropped, against a dictionary: those of open writes are found, the newest of each key."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.searches import examples

from torchfleet.ps.worker.cache.evicted_keys import EvictedKeys
from torchfleet.ps.worker.cache.evictions import Evictions
from torchfleet.ps.worker.cache.write_back import Write

KEYS = st.sets(st.integers(-8, 24), max_size=12)
CPU = torch.device("cpu")


def written(keys: set[int], value: float) -> Write | None:
    at = torch.tensor(sorted(keys), dtype=torch.int64)
    return Write("t", at, torch.full((len(at), 2), value), None, 0) if keys else None


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(KEYS, KEYS, st.booleans()), max_size=8))
def test_a_dropped_row_is_the_newest_of_the_open_writes(drops: list[tuple[set[int], set[int], bool]]) -> None:
    """`drops`: keys, those of them that had changed, and whether the servers answer the oldest open write then."""
    evictions, open_writes = Evictions(1000, CPU), list[tuple[Write, dict[int, float]]]()
    for value, (keys, changed, is_answered) in enumerate(drops):
        dropped = torch.tensor(sorted(keys | changed), dtype=torch.int64)
        write = written(changed, float(value))
        evictions.add(dropped, write)
        if write is not None:
            open_writes.append((write, dict.fromkeys(changed, float(value))))
        if is_answered and open_writes:
            open_writes.pop(0)[0].finish()
        expected = {key: found for _, rows in open_writes for key, found in rows.items()}
        every = torch.arange(-10, 30)
        places, rows = evictions.on_their_way(every.numpy(), evictions.find(every).long().numpy())
        found = {} if rows is None else dict(zip(every.numpy()[places].tolist(), rows[:, 0].tolist(), strict=True))
        assert found == expected
        assert len(places) == len(found)


def test_rows_of_two_evictions_with_one_number_are_found_while_their_writes_are_open() -> None:
    evictions, first, last = Evictions(1000, CPU), written({1}, 1.0), written({3}, 3.0)
    assert first is not None
    evictions.add(torch.tensor([1]), first)
    for _ in range(EvictedKeys.NUMBERS - 1):
        evictions.add(torch.tensor([2]), None)
    evictions.add(torch.tensor([3]), last)
    every = torch.tensor([1, 2, 3])
    numbers = evictions.find(every).long().numpy()
    assert numbers[0] == numbers[2] != numbers[1]
    places, rows = evictions.on_their_way(every.numpy(), numbers)
    assert rows is not None
    assert dict(zip(places.tolist(), rows[:, 0].tolist(), strict=True)) == {0: 1.0, 2: 3.0}
    first.finish()
    assert evictions.on_their_way(every.numpy(), numbers)[0].tolist() == [2]


def test_a_write_that_the_servers_have_has_no_rows() -> None:
    write = written({1, 2}, 3.0)
    assert write is not None
    is_found, rows = write.rows_of(np.array([0, 2, 5]))
    assert is_found.tolist() == [False, True, False]
    assert rows.tolist() == [[3.0, 3.0]]
    write.finish()
    assert not write.rows_of(np.array([0, 2, 5]))[0].any()
