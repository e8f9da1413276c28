"""The sketch of a window: bit-equal to plain Python, never too low, the same however it is divided."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import twins
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels.partition import owners_by_hash
from torchfleet.ps.tables.policies.window_sketch import WindowSketch

NUM_BLOCKS = 5040
WINDOW = 400  # panes of 100 seconds
POSITION_SALT = 0xBB67AE8584CAA73B


def block_of(key: int, num_blocks: int = NUM_BLOCKS) -> int:
    return (twins.mix(key ^ twins.OWNER_SALT) >> 32) * num_blocks >> 32


def positions_of(key: int) -> list[int]:
    """Three cards of a pack of fifteen."""
    bits, pack = twins.mix(key ^ POSITION_SALT), list(range(15))
    fields = [bits >> shift & 0xFFFFF for shift in (0, 20, 40)]
    first = pack.pop(fields[0] * 15 >> 20)
    second = pack.pop(fields[1] * 14 >> 20)
    return [first, second, pack[fields[2] * 13 >> 20]]


def keys_in_blocks(blocks: list[int], num_each: int) -> list[int]:
    """Keys that share few blocks, so that a short stream has many collisions."""
    step = (1 << 32) // NUM_BLOCKS
    return [
        twins.unmix((block * step + step // 2) << 32 | low) ^ twins.OWNER_SALT
        for block in blocks
        for low in range(num_each)
    ]


CROWD = keys_in_blocks([0, 7, 1679, 1680, 2520, NUM_BLOCKS - 1], 12)


class Twin:
    """The sketch in plain Python: per block the newest pane and, by pane, 15 counters."""

    def __init__(self) -> None:
        self.newest: dict[int, int] = defaultdict(int)
        self.counters: dict[int, dict[int, list[int]]] = defaultdict(dict)

    def count(self, key: int, now: int) -> int:
        block = block_of(key)
        pane = self.newest[block] = max(self.newest[block], now // (WINDOW // 4))
        panes = {p: counters for p, counters in self.counters[block].items() if p > pane - 4}
        self.counters[block] = panes
        current = panes.setdefault(pane, [0] * 15)
        mine = positions_of(key)
        least = min(current[position] for position in mine)
        for position in mine:
            if current[position] == least:
                current[position] = min(least + 1, 255)
        return sum(min(counters[position] for position in mine) for counters in panes.values())

    def blocks(self) -> np.ndarray:
        found = np.zeros((NUM_BLOCKS, 64), np.uint8)
        for block, panes in self.counters.items():
            found[block, :4] = list(self.newest[block].to_bytes(4, "little"))
            for (pane, counters), position in product(panes.items(), range(15)):
                found[block, 4 + 4 * position + pane % 4] = counters[position]
        return found


def array(keys: list[int]) -> np.ndarray:
    return np.array(keys, np.uint64)


def everything(shard: WindowSketch) -> np.ndarray:
    return shard.blocks(shard.first, shard.first + shard.num)


def stream(seed: int, num_batches: int, back: int = 0):
    """Batches of crowded keys with the time of each, which makes steps of up to six panes."""
    random, now = np.random.default_rng(seed), 1_700_000_000
    for _ in range(num_batches):
        now += int(random.choice([0, 10, 60, 100, 250, 600], p=[0.4, 0.2, 0.2, 0.1, 0.06, 0.04]))
        crowd = [CROWD[i] for i in random.integers(0, len(CROWD), random.integers(0, 150))]
        yield crowd, now - int(random.integers(0, back + 1))


@pytest.mark.parametrize(("seed", "back"), [(0, 0), (1, 0), (2, 300), (3, 1000)])
def test_the_counters_are_those_of_plain_python(seed, back):
    shard, twin = WindowSketch(NUM_BLOCKS, 0, 1, WINDOW), Twin()
    for keys, now in stream(seed, 120, back):
        assert shard.count(array(keys), now).tolist() == [twin.count(key, now) for key in keys]
    assert np.array_equal(everything(shard), twin.blocks())


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(CROWD[:12]) | st.integers(0, 2**64 - 1)), st.integers(0, 2000)), max_size=20
    )
)
@example([([CROWD[0]] * 600, 0), ([CROWD[0]] * 300, 100), ([CROWD[0]], 399), ([CROWD[0]], 400)])
def test_any_stream_at_any_times_agrees_with_plain_python(batches):
    shard, twin = WindowSketch(NUM_BLOCKS, 0, 1, WINDOW), Twin()
    for keys, now in batches:
        assert shard.count(array(keys), now).tolist() == [twin.count(key, now) for key in keys]
    assert np.array_equal(everything(shard), twin.blocks())


@pytest.mark.parametrize("seed", range(4))
def test_a_count_is_never_below_the_exact_one(seed):
    shard = WindowSketch(NUM_BLOCKS, 0, 1, WINDOW)
    panes: dict[int, list[int]] = defaultdict(list)
    num_right = num_all = 0
    for keys, now in stream(seed, 200):
        for key, found in zip(keys, shard.count(array(keys), now).tolist(), strict=True):
            panes[key] = [pane for pane in panes[key] if pane > now // 100 - 4] + [now // 100]
            assert found >= min(len(panes[key]), 255)
            num_right += found == len(panes[key])
            num_all += 1
    assert 0 < num_right < num_all  # with this number of keys in a block both happen


def test_an_appearance_outlives_those_of_other_keys_that_hid_it():
    """Counters of one key stand high by another key in an old pane. What it adds now must still be there when that
    pane is over: sums over the window would not have noted it."""
    crowd = keys_in_blocks([3], 400)
    key = crowd[0]
    other = next(member for member in crowd if len({*positions_of(member)} & {*positions_of(key)}) == 1)
    shard = WindowSketch(NUM_BLOCKS, 0, 1, WINDOW)
    shard.count(array([other] * 5), 0)
    assert shard.count(array([key]), 300).tolist() == [1]
    assert shard.count(array([key]), 400).tolist() == [2]
    assert shard.count(array([key]), 699).tolist() == [3]
    assert shard.count(array([key]), 700).tolist() == [3]  # the first is over


def test_a_lone_key_is_counted_exactly_while_it_is_in_the_window():
    shard, key = WindowSketch(NUM_BLOCKS, 0, 1, WINDOW), array([99])
    found = [shard.count(key, now).tolist() for now in (0, 99, 100, 399, 400, 800, 1199, 1200, 10_000)]
    assert found == [[1], [2], [3], [4], [3], [1], [2], [2], [1]]


def test_a_clock_that_goes_back_counts_into_the_newest_pane():
    shard, key = WindowSketch(NUM_BLOCKS, 0, 1, WINDOW), array([99])
    assert shard.count(key, 1000).tolist() == [1]
    assert shard.count(key, 10).tolist() == [2]
    assert shard.count(key, -5).tolist() == [3]
    assert shard.count(key, 1399).tolist() == [4]
    assert shard.count(key, 1400).tolist() == [2]
    assert shard.count(key, 1 << 60).tolist() == [1]  # the last pane there is
    assert shard.count(key, 1 << 61).tolist() == [2]


def test_a_full_counter_stays_full():
    shard, key = WindowSketch(NUM_BLOCKS, 0, 1, WINDOW), array([99])
    assert shard.count(array([99] * 300), 0).tolist() == [*range(1, 256)] + [255] * 45
    assert shard.count(array([99] * 300), 100)[-1] == 510
    assert shard.count(key, 400).tolist() == [256]
    assert everything(shard)[:, 4:].max() == 255


@pytest.mark.parametrize(("window", "pane"), [(1, 1), (4, 1), (7, 1), (8, 2), (86_400, 21_600)])
def test_the_window_is_four_panes(window, pane):
    shard, key = WindowSketch(NUM_BLOCKS, 0, 1, window), array([99])
    counts = [shard.count(key, pane * step).tolist()[0] for step in range(8)]
    assert counts == [1, 2, 3, 4, 4, 4, 4, 4]


def owners(keys: np.ndarray, num_shards: int) -> np.ndarray:
    found = np.empty(len(keys), np.int32)
    owners_by_hash(keys, num_shards, found)
    return found


def count_in_shards(shards: list[WindowSketch], keys: np.ndarray, now: int) -> np.ndarray:
    owner, counts = owners(keys, len(shards)), np.zeros(len(keys), np.int64)
    for number, shard in enumerate(shards):
        counts[owner == number] = shard.count(keys[owner == number], now)
    return counts


def divided(num_shards: int) -> list[WindowSketch]:
    return [WindowSketch(NUM_BLOCKS, shard, num_shards, WINDOW) for shard in range(num_shards)]


@pytest.mark.parametrize("num_shards", [2, 3, 10])
def test_shards_count_as_one_whole_does(num_shards):
    shards, whole = divided(num_shards), WindowSketch(NUM_BLOCKS, 0, 1, WINDOW)
    for crowd, now in stream(5, 60):
        keys = array(crowd + list(range(50)))
        assert count_in_shards(shards, keys, now).tolist() == whole.count(keys, now).tolist()
    assert np.array_equal(np.concatenate([everything(shard) for shard in shards]), everything(whole))
    assert sum(shard.num_bytes for shard in shards) == whole.num_bytes == 64 * NUM_BLOCKS


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 10, 11, 13, 64, 1000])
def test_the_block_of_every_key_is_held_by_its_owner(num_shards):
    """Also for the first and the last hash of each shard."""
    borders = [shard * (1 << 32) // num_shards + step for shard in range(num_shards + 1) for step in (-1, 0, 1)]
    keys = array([twins.unmix(tag << 32 | 5) ^ twins.OWNER_SALT for tag in borders if 0 <= tag < 1 << 32])
    shards = divided(num_shards)
    assert count_in_shards(shards, keys, 0).min() == 1
    assert shards[0].first == 0
    assert shards[-1].first + shards[-1].num == NUM_BLOCKS
    shared = [before.first + before.num - after.first for before, after in pairwise(shards)]
    assert set(shared) <= ({0} if NUM_BLOCKS % num_shards == 0 else {0, 1})


def resharded(shards: list[WindowSketch], num_shards: int) -> list[WindowSketch]:
    """As a save and a load do it: in slices, of which every new shard sees all."""
    made = divided(num_shards)
    for shard in shards:
        for start in range(shard.first, shard.first + shard.num, 1000):
            saved = shard.blocks(start, min(start + 1000, shard.first + shard.num))
            for target in made:
                target.load(start, saved)
    return made


def test_counters_survive_other_numbers_of_servers_to_the_bit():
    whole, shards = WindowSketch(NUM_BLOCKS, 0, 1, WINDOW), divided(2)
    batches = list(stream(6, 90))
    for at, (crowd, now) in enumerate(batches):
        if at in (30, 60):
            shards = resharded(shards, 3 if at == 30 else 1)
        keys = array(crowd)
        assert count_in_shards(shards, keys, now).tolist() == whole.count(keys, now).tolist()
    assert np.array_equal(everything(shards[0]), everything(whole))


def test_a_border_block_of_two_servers_is_joined_without_losing_a_count():
    """11 servers do not divide 5040 blocks; each border block has keys of both neighbours."""
    shards = divided(11)
    tags = [shard * (1 << 32) // 11 + step for shard in range(1, 11) for step in (-900, -1, 0, 900)]
    keys = array([twins.unmix(tag << 32 | 5) ^ twins.OWNER_SALT for tag in tags])
    seen = np.zeros(len(keys), np.int64)
    random = np.random.default_rng(7)
    for now in range(0, 200, 5):  # no pane ends before the last count
        mask = random.random(len(keys)) < 0.5
        count_in_shards(shards, keys[mask], now)
        seen += mask
    for num_shards in (1, 13, 4):
        shards = resharded(shards, num_shards)
    assert (count_in_shards(shards, keys, 200) >= seen + 1).all()


def test_loading_onto_counters_keeps_the_larger_ones_of_the_same_pane():
    key = array([99])
    saved, shard = WindowSketch(NUM_BLOCKS, 0, 1, WINDOW), WindowSketch(NUM_BLOCKS, 0, 1, WINDOW)
    saved.count(array([99] * 3), 0)
    saved.count(array([99] * 2), 300)
    shard.count(array([99] * 5), 0)
    shard.count(array([99] * 1), 300)
    shard.count(array([99] * 4), 400)  # pane 0 is over
    shard.load(0, everything(saved))
    assert shard.count(key, 400).tolist() == [2 + 4 + 1]
    saved.load(0, everything(shard))
    assert np.array_equal(everything(saved), everything(shard))


def test_blocks_are_copies():
    shard = WindowSketch(NUM_BLOCKS, 1, 2, WINDOW)
    shard.blocks(shard.first, shard.first + 10)[:] = 1
    assert not everything(shard).any()
    assert shard.blocks(shard.first + 5, shard.first + 5).shape == (0, 64)
    saved = np.ones((10, 64), np.uint8)
    shard.load(shard.first - 5, saved)
    saved[:] = 2
    assert everything(shard)[:5].min() == everything(shard).max() == 1
    assert not everything(shard)[5:].any()
    shard.load(0, saved)  # all of it before this shard's
    shard.load(NUM_BLOCKS, saved)
    assert everything(shard).max() == 1


def test_what_belongs_elsewhere_is_an_error_and_nothing_is_counted():
    shard, keys = WindowSketch(NUM_BLOCKS, 0, 2, WINDOW), np.arange(100, dtype=np.uint64)
    with pytest.raises(TableError, match=naming(100)):
        shard.count(keys, 0)
    assert not everything(shard).any()
    for start, stop in ((-1, 5), (5, 4), (0, shard.num + 1)):
        with pytest.raises(IndexError, match=naming(f"0..{shard.num}")):
            shard.blocks(start, stop)
    for wrong in (np.zeros((3, 63), np.uint8), np.zeros(64, np.uint8), np.zeros((3, 64), np.int8)):
        with pytest.raises(TableError, match=naming("uint8", 64)):
            shard.load(0, wrong)


def test_no_keys_are_no_counts():
    assert WindowSketch(NUM_BLOCKS, 0, 1, WINDOW).count(array([]), 5).shape == (0,)


def test_positions_are_distinct_and_every_triple_is_as_likely():
    """Found by what a fresh block looks like after one appearance."""
    keys = array(keys_in_blocks(list(range(NUM_BLOCKS)), 1))
    shard = WindowSketch(NUM_BLOCKS, 0, 1, WINDOW)
    shard.count(keys, 0)
    marked = everything(shard)[:, 4::4]
    assert (marked.sum(axis=1) == 3).all()
    per_position = marked.sum(axis=0, dtype=np.int64)
    assert per_position.min() > 0.85 * NUM_BLOCKS / 5
    assert per_position.max() < 1.15 * NUM_BLOCKS / 5
    assert len({tuple(row) for row in marked.tolist()}) == 455


def test_the_counts_of_100_000_keys_in_1_6_megabytes_are_mostly_exact():
    shard = WindowSketch(5 * NUM_BLOCKS, 0, 1, WINDOW)
    assert shard.num_bytes == 1_612_800
    keys = np.random.default_rng(8).permutation(100_000).astype(np.uint64)
    first, second = (shard.count(keys, 0) for _ in range(2))
    assert (first >= 1).all()
    assert (second >= 2).all()
    assert (first > 1).mean() < 0.09
    assert (second > 2).mean() < 0.13
    assert (second > 4).mean() < 0.001
