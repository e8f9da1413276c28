"""Limits on the rows of a table in GPU memory, which is cut over ranks."""

from __future__ import annotations

import pytest

from torchfleet.base.errors import TableError
from torchfleet.ps.gpu.eviction import row_limit
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import TableSpec

NUM_RANKS = 4


@pytest.mark.parametrize("limit", [1, NUM_RANKS - 1])
def test_a_limit_below_the_number_of_ranks_is_an_error_on_all_of_them(limit: int) -> None:
    for rank in range(NUM_RANKS):
        with pytest.raises(TableError):
            row_limit(TableSpec("t", dim=2).for_shard(rank, NUM_RANKS), Shrink(max_rows=limit), 10)


def test_ranks_share_a_limit() -> None:
    spec = TableSpec("t", dim=2)
    assert sum(row_limit(spec.for_shard(rank, NUM_RANKS), Shrink(max_rows=7), 10) or 0 for rank in range(4)) == 7
