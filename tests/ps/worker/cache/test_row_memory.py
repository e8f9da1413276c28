"""The slots of a cache against a dict, and its evictions against the order of use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchfleet.ps.gpu.table_memory import EMPTY, REMOVED
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.cache.evicted_keys import NEVER, EvictedKeys
from torchfleet.ps.worker.cache.row_memory import RowMemory

CPU = torch.device("cpu")


def memory(num_slots: int, **settings: object) -> RowMemory:
    return RowMemory(TableSpec("items", dim=4, rule=Rule("sgd", 0.5), **settings), num_slots, CPU)


def test_keys_have_the_slots_of_a_dict_after_insertions_and_erasures() -> None:
    draws, own, known = np.random.default_rng(3), memory(300), dict[int, int]()
    extremes = [EMPTY, REMOVED, (1 << 63) - 1, 0]
    for turn in range(40):
        drawn = [*draws.integers(-60, 120, 20).tolist(), *extremes[: turn % 5], 7]
        slots = own.place(torch.tensor(drawn), padding=7).tolist()
        new = own.read_counters()
        keys = [key for key in drawn if key != 7]
        assert sorted(own.keys_of(new).tolist()) == sorted({*keys} - known.keys())
        known |= dict(zip(own.keys_of(new).tolist(), new.tolist(), strict=True))
        assert slots == [-1 if key == 7 else known[key] for key in drawn]
        assert len({*known.values()}) == len(known) == own.num_rows
        if turn % 3 == 2:
            gone = [key for key in known if draws.random() < 0.4]
            own.erase(torch.tensor([known.pop(key) for key in gone], dtype=torch.int64))
            assert own.num_rows == len(known)


def test_keys_beyond_the_slots_are_refused_and_get_one_after_an_erasure() -> None:
    own = memory(10)
    slots = own.place(torch.arange(12), None)
    assert len(own.read_counters()) == 10
    assert own.has_refused
    assert own.num_free == 0
    assert int((slots < 0).sum()) == 2
    assert bool(own.values(slots)[slots < 0].isnan().all())  # never zeros
    own.erase(slots[slots >= 0][:3].long())
    assert not own.has_refused
    again = own.place(torch.arange(12)[slots < 0], None)
    assert sorted(own.read_counters().tolist()) == sorted(again.tolist())
    assert own.num_rows == 9


def test_the_rows_used_least_recently_come_first() -> None:
    own = memory(100)
    slots = own.place(torch.arange(100), None)
    own.read_counters()
    for batch in range(1, 11):
        own.use(slots[10 * batch - 10 :], batch)  # the first ten were used by batch 1 alone, the last ten by all
    assert sorted(own.oldest(20, before=9).tolist()) == sorted(slots[:20].tolist())
    assert sorted(own.oldest(15, before=9).tolist()) == sorted(slots[:20].tolist())
    assert len(own.oldest(4, before=9)) == 8
    assert sorted(own.oldest(60, before=3).tolist()) == sorted(slots[:20].tolist())
    assert int(own.count_used(10)) == 10
    own.last_use[own.last_use == 10] = 1_000_000  # gaps in the numbers of batches
    assert sorted(own.oldest(90, before=1_000_000).tolist()) == sorted(slots[:90].tolist())


def test_ids_beyond_the_declared_size_are_counted_once() -> None:
    own = memory(10, kind="array", size=5)
    slots = own.place(torch.tensor([1, 5, 2, -1]), None)
    assert len(own.read_counters()) == 2
    assert slots.lt(0).tolist() == [False, True, False, True]
    assert own.take_outside() == 2
    own.read_counters()
    assert own.take_outside() == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_with_a_gradient_that_is_not_finite_stays(value: float) -> None:
    own = memory(10)
    own.is_exact = False  # as on a GPU
    slots = own.place(torch.arange(3), None)
    before = own.values(slots)
    grads = torch.ones(5, 4)
    grads[3, 2] = value
    own.update(torch.cat([slots, slots[1:2], torch.tensor([-1])]).int(), grads, None, None, 1)
    assert bool(own.has_failed)
    expected = before - 0.5
    expected[1] = before[1]
    torch.testing.assert_close(own.values(slots), expected)
    assert own.is_changed[slots.long()].tolist() == [True] * 3


def test_evicted_keys_are_known_by_the_last_eviction() -> None:
    evicted, keys = EvictedKeys(1000, CPU), torch.arange(-500, 500) * 6364136223846793005
    assert bool((evicted.find(keys) == NEVER).all())
    evicted.add(keys[:200], EvictedKeys.number(1))
    evicted.add(keys[100:200], EvictedKeys.number(2))
    assert bool((evicted.find(keys[100:200]) == EvictedKeys.number(2)).all())
    assert bool((evicted.find(keys[:100]) != NEVER).all())
    assert (evicted.find(keys[200:]) != NEVER).float().mean() < 0.1
    assert {EvictedKeys.number(eviction) for eviction in range(2000)} == {*range(1, 251)}
