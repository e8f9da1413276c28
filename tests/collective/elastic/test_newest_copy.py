"""Which copy the ranks go on from, held against every case that a lost machine can leave."""

from __future__ import annotations

import itertools

import pytest
from support.messages import naming

from torchfleet.base.errors import FleetError
from torchfleet.collective.elastic.neighbours import distance
from torchfleet.collective.elastic.newest_copy import Copies, newest


def test_a_copy_that_one_rank_has_not_completed_is_not_taken() -> None:
    found = newest([Copies(own=[3, 6]), Copies(own=[3]), Copies(own=[6, 3])], 0, 3)
    assert (found.step, found.is_copy, list(found.wards)) == (3, True, [])


def test_a_lost_copy_is_taken_from_the_keeper() -> None:
    """Rank 2 keeps rank 0's copies, rank 3 those of rank 1."""
    copies = [Copies(), Copies(), Copies(own=[6, 9], kept=[6, 9]), Copies(own=[6, 9], kept=[6])]
    found = newest(copies, 2, 3)
    assert (found.step, found.is_copy, list(found.wards)) == (6, True, [0, 1])


@pytest.mark.parametrize("lost", [set(pair) for num in range(5) for pair in itertools.combinations(range(4), num)])
def test_every_loss_of_machines_is_survived_unless_two_in_a_row_are_lost(lost: set[int]) -> None:
    """Four machines of one rank each, each with the copy of its predecessor."""
    copies = [Copies() if rank in lost else Copies(own=[6], kept=[6]) for rank in range(4)]
    is_whole = not any(rank in lost and (rank + 1) % 4 in lost for rank in range(4))
    if is_whole or len(lost) == 4:
        found = newest(copies, 1, 3)
        assert found.is_copy == is_whole
        assert found.step == (6 if is_whole else 0)
    else:
        missing = [rank for rank in lost if (rank + 1) % 4 in lost]
        with pytest.raises(FleetError, match=naming("step 6", *missing)):
            newest(copies, 1, 3)


def test_a_complete_copy_is_taken_before_a_newer_save_and_a_save_before_nothing() -> None:
    assert newest([Copies(own=[6], saved=8), Copies(own=[6], saved=8)], 0, 3).is_copy
    found = newest([Copies(own=[9], saved=8), Copies(saved=8)], 0, 3)
    assert (found.step, found.is_copy, found.is_save) == (8, False, True)
    assert "rank 1" in found.lost


def test_ranks_that_never_had_a_copy_begin_at_the_beginning() -> None:
    """One rank was killed in its first copy: the others had completed theirs."""
    found = newest([Copies(own=[3]), Copies()], 0, 3)
    assert (found.step, found.is_copy, found.is_save, found.lost) == (0, False, False, "")


@pytest.mark.parametrize(
    ("machines", "expected"),
    [("0", 0), ("000", 0), ("01", 1), ("0011", 2), ("001122", 2), ("00011122", 3)],
)
def test_the_keeper_of_every_rank_is_on_another_machine(machines: str, expected: int) -> None:
    found = distance(list(machines))
    assert found == expected
    assert not found or all(machines[i] != machines[(i + found) % len(machines)] for i in range(len(machines)))


def test_where_no_distance_serves_all_ranks_it_serves_most() -> None:
    machines = "0001"
    apart = [sum(machines[i] != machines[(i + step) % 4] for i in range(4)) for step in (1, 2, 3)]
    assert apart[distance(list(machines)) - 1] == max(apart)
