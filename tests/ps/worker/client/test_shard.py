"""Shards: every process divides keys among the servers in the same way, now and in later releases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import twins
from support.cases import each_of

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.shard import as_keys, shard

SPARSE, ARRAY = TableSpec("t"), TableSpec("t", "array", size=10_000)

# Recorded output, on purpose: a saved fleet of servers holds its rows by this division. It must never change.
GOLDEN_KEYS = [0, 1, 2, 3, 10**6, 2**32, 2**63, 2**64 - 1]
GOLDEN_OWNERS = {
    2: [0, 0, 0, 1, 0, 0, 1, 1],
    3: [0, 0, 0, 1, 0, 0, 1, 2],
    5: [1, 1, 0, 2, 0, 0, 3, 4],
    7: [1, 2, 0, 3, 0, 0, 4, 6],
    64: [13, 18, 6, 36, 5, 3, 41, 63],
}

some_keys = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 30), max_size=200)


def owners(spec: TableSpec, keys: np.ndarray, num_servers: int) -> list[int]:
    parts = shard(spec, keys, num_servers)
    found = np.full(len(keys), -1)
    for server, places in enumerate(parts.places):
        found[places] = server
    return found.tolist()


@each_of("num_servers", GOLDEN_OWNERS)
def test_owners_are_those_of_every_release_and_architecture(num_servers):
    assert owners(SPARSE, np.array(GOLDEN_KEYS, np.uint64), num_servers) == GOLDEN_OWNERS[num_servers]


@given(some_keys.map(lambda keys: np.array(keys, np.uint64)), st.integers(2, 70))
def test_the_owner_of_a_key_is_that_of_the_formula(keys, num_servers):
    assert owners(SPARSE, keys, num_servers) == [twins.owner_of(key, num_servers) for key in keys.tolist()]


@each_of("num_servers", [2, 3, 4, 5, 6, 7])
@each_of("first", [0, 10**9, 2**40])
def test_consecutive_ids_are_spread_within_a_twentieth_of_evenly(num_servers, first):
    ids = np.arange(first, first + 100_000, dtype=np.uint64)
    counts = np.array([len(keys) for keys in shard(SPARSE, ids, num_servers).keys])
    assert np.abs(counts / (100_000 / num_servers) - 1).max() < 0.05


@each_of("stride", [2, 3, 7, 64, 2**20, 2**32])
def test_ids_that_share_a_divisor_are_spread_too(stride):
    ids = np.arange(100_000, dtype=np.uint64) * np.uint64(stride)
    for num_servers in (2, 3, 4, 7):
        counts = np.array([len(keys) for keys in shard(SPARSE, ids, num_servers).keys])
        assert np.abs(counts / (100_000 / num_servers) - 1).max() < 0.05


def test_ids_of_an_array_table_are_dealt_like_cards():
    ids = np.arange(20, dtype=np.uint64)
    assert owners(ARRAY, ids, 3) == [key % 3 for key in range(20)]


@given(some_keys.map(lambda keys: np.array(keys, np.uint64)), st.integers(1, 8), st.sampled_from([SPARSE, ARRAY]))
def test_keys_keep_their_order_within_a_server(keys, num_servers, spec):
    parts = shard(spec, keys, num_servers)
    assert parts.num_keys == sum(map(len, parts.keys)) == len(keys)
    divide = (lambda key: key % num_servers) if spec is ARRAY else (lambda key: twins.owner_of(key, num_servers))
    for server in range(num_servers):
        assert parts.keys[server].tolist() == [key for key in keys.tolist() if divide(key) == server]


@given(some_keys.map(lambda keys: np.array(keys, np.uint64)), st.integers(1, 8), st.integers(1, 9))
def test_rows_go_to_the_owners_of_their_keys_and_come_back_to_their_places(keys, num_servers, dim):
    values = np.random.default_rng(len(keys)).standard_normal((len(keys), dim), np.float32)
    by_key: dict[int, list] = {}
    for key, row in zip(keys.tolist(), values.tolist(), strict=True):
        by_key.setdefault(key, []).append(row)
    parts = shard(SPARSE, keys, num_servers)
    split = parts.split_rows(values)
    for own_keys, rows in zip(parts.keys, split, strict=True):
        for key, row in zip(own_keys.tolist(), rows.tolist(), strict=True):
            assert row == by_key[key].pop(0)  # its own row, and of a repeated key the rows in their order
    assert twins.same_bits(parts.join_rows(split), values)


def test_one_server_gets_the_arrays_themselves():
    keys, values = np.arange(5, dtype=np.uint64), np.ones((5, 2), np.float32)
    parts = shard(SPARSE, keys, 1)
    assert parts.keys[0] is keys
    assert parts.split_rows(values)[0] is values


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_signed_keys_keep_their_64_bits(dtype):
    assert as_keys(np.array([-1, 0, 5, -128], dtype)).tolist() == [2**64 - 1, 0, 5, 2**64 - 128]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_unsigned_keys_keep_their_value(dtype):
    largest = int(np.iinfo(dtype).max)
    found = as_keys(np.array([0, largest], dtype))
    assert found.tolist() == [0, largest]
    assert found.dtype == np.uint64


@each_of("order", ["<", ">"])
@each_of("kind", ["i4", "u4", "i8", "u8"])
def test_keys_keep_their_value_in_either_byte_order(kind, order):
    """Arrays that were read from a file in network order have a dtype that says so."""
    assert as_keys(np.array([1, 2, 258], order + kind)).tolist() == [1, 2, 258]


def test_keys_of_any_shape_and_any_container_become_flat():
    assert as_keys([[1, 2], [3, 4]]).tolist() == [1, 2, 3, 4]
    assert as_keys(7).tolist() == [7]
    assert as_keys([2**64 - 1]).tolist() == [2**64 - 1]
    assert as_keys(np.arange(12).reshape(3, 4)[:, ::2]).tolist() == [0, 2, 4, 6, 8, 10]
    assert as_keys(np.arange(10)[::-3]).tolist() == [9, 6, 3, 0]


@pytest.mark.parametrize("empty", [[], np.empty(0), np.empty(0, np.float32), np.empty((0, 3), np.int32)])
def test_no_keys_are_keys_whatever_their_dtype(empty):
    found = as_keys(empty)
    assert found.dtype == np.uint64
    assert found.shape == (0,)


@each_of("bad", [[1.0], [True], ["1"], [2**64], [-1, 2**64 - 1], [None]])
def test_keys_that_are_not_integers_of_64_bits_are_refused(bad):
    with pytest.raises(TableError, match="keys"):
        as_keys(bad)
