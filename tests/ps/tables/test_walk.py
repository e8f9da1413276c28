"""Walks over a table's rows: each row that stays comes exactly once, whatever happens to others in between."""

from __future__ import annotations

import numpy as np
import pytest
from support.fleets import Fleet
from support.messages import naming

from torchfleet.base.errors import FleetError
from torchfleet.ps.tables.rows.packed_map import FEWEST_WALKED
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

STAYING, GOING, COMING = np.arange(0, 3000), np.arange(3000, 4000), np.arange(4000, 9000)


@pytest.mark.parametrize(
    "spec",
    [TableSpec("packed", dim=2), TableSpec("wide", dim=16), TableSpec("sized", "array", dim=3, size=9000)],
    ids=lambda spec: spec.name,
)
def test_a_row_that_stays_comes_once_while_others_come_and_go(spec: TableSpec) -> None:
    table = SparseTable(spec, 1 << 26)
    first = np.random.default_rng(0).permutation(np.concatenate([STAYING, GOING])).astype(np.uint64)
    expected = table.pull(first)[np.argsort(first)][: len(STAYING)]
    seen: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    cursor, going, coming = 0, iter(np.array_split(GOING, 30)), iter(np.array_split(COMING, 30))
    while True:
        keys, values, cursor = table.walk(cursor, 100)
        assert len(keys) <= (FEWEST_WALKED if spec.name == "packed" else 100)
        seen.append(keys)
        rows.append(values)
        if not cursor:
            break
        table.erase(next(going, GOING[:0]).astype(np.uint64))
        table.pull(next(coming, COMING[:0]).astype(np.uint64))  # the map grows meanwhile
    keys, values = np.concatenate(seen), np.concatenate(rows)
    stay = keys < len(STAYING)
    order = np.argsort(keys[stay])
    np.testing.assert_array_equal(keys[stay][order], STAYING)
    np.testing.assert_array_equal(values[stay][order], expected)


def test_a_walk_does_not_show_where_the_map_keeps_a_key() -> None:
    """Whatever a client gives as cursor and number of rows, it gets a hundred rows or so, in the order of their keys:
    it can neither look for the hash of one key, nor read the order of hashes."""
    table, rng = SparseTable(TableSpec("packed", dim=2), 1 << 26), np.random.default_rng(0)
    table.pull(np.arange(20_000, dtype=np.uint64))
    replies: set[frozenset[int]] = set()
    for cursor in rng.integers(0, 1 << 63, 400).tolist():
        keys, _, _ = table.walk(cursor, 1)
        assert (np.diff(keys.astype(np.int64)) > 0).all()
        # About a third of the positions of a window have keys, by a secret hash: 5 or fewer of 40 or more that are
        # expected, with a probability below 1e-9 each.
        assert 5 < len(keys) <= FEWEST_WALKED
        replies.add(frozenset(keys.tolist()))
    for one in replies:
        assert all(one <= other or other <= one or not one & other for other in replies)


def test_two_tables_walk_in_different_orders() -> None:
    tables = [SparseTable(TableSpec("packed", dim=2), 1 << 26) for _ in range(3)]
    firsts = [(table.pull(np.arange(5000, dtype=np.uint64)), table.walk(0, 1)[0].tolist())[1] for table in tables]
    assert len({tuple(first) for first in firsts}) == 3


def test_an_empty_table_has_no_rows_and_a_dense_one_is_refused(fleet: Fleet) -> None:
    client = fleet.client()
    empty, dense = TableSpec("empty", dim=2), TableSpec("dense", "dense", size=4)
    for spec in (empty, dense):
        client.create_table(spec)
    assert sum(len(keys) for keys, _ in client.walk(empty)) == 0
    with pytest.raises(FleetError, match=naming("'dense'")):
        list(client.walk(dense))
