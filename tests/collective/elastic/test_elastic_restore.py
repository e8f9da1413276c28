"""Where the ranks go on: each from what all of them have agreed on, whatever it sees itself."""

from __future__ import annotations

import types
from typing import Any

from support.messages import names
from support.rank_threads import RankThread, on_threads

from torchfleet.base.errors import CheckpointError
from torchfleet.collective.elastic.elastic_steps import ElasticSteps
from torchfleet.collective.elastic.newest_copy import NO_STEP


def begun(rank: RankThread, saved: list[int]) -> tuple[list[int], int]:
    """The steps of a rank that sees a save of step `saved[rank]`, and how often it has loaded."""
    loads: list[int] = []
    state: Any = types.SimpleNamespace(world=rank)
    steps = ElasticSteps(state, 10, 0, lambda: saved[rank.rank], lambda: loads.append(rank.rank))
    return list(steps), len(loads)


def test_all_ranks_load_the_save_that_rank_0_sees() -> None:
    for found in on_threads(3, lambda rank: begun(rank, [8, NO_STEP, 5])):
        assert found == ([8, 9], 1)


def test_no_rank_loads_a_save_that_rank_0_does_not_see() -> None:
    for found in on_threads(2, lambda rank: begun(rank, [NO_STEP, 8])):
        assert found == (list(range(10)), 0)


def test_a_save_that_cannot_be_read_is_an_error_on_all_ranks() -> None:
    def unreadable() -> int:
        raise PermissionError("/models/a")

    def begin(rank: RankThread) -> list[int]:
        state: Any = types.SimpleNamespace(world=rank)
        return list(ElasticSteps(state, 10, 0, unreadable, lambda: None))

    for error in on_threads(2, begin):
        assert isinstance(error, CheckpointError)
        assert names(str(error), "rank 0", "PermissionError", "/models/a")
