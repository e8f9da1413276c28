"""Whole fleets in virtual time, under faults from a seed; the checks over their histories; and planted bugs."""

from __future__ import annotations

import numpy as np
import pytest
from support.faults.history import Op, Violation
from support.faults.order_checks import check_registers, check_tokens
from support.faults.planted import BUGS, planted
from support.faults.schedules import FLEETS, SCRIPTS, Plan, run
from support.faults.search import hunt
from support.grids import first_of

pytestmark = pytest.mark.xdist_group("faults")  # kernels are compiled once


CASES = [
    pytest.param(script, fleet, marks=[pytest.mark.long] if fleet == "both" and script != "tokens" else [])
    for script in sorted(SCRIPTS)
    for fleet in sorted(FLEETS)
]


@pytest.mark.parametrize(("script", "fleet"), CASES)
def test_nothing_that_was_acknowledged_is_lost_or_made_twice(script: str, fleet: str) -> None:
    run(Plan.of(0, script, fleet))


@pytest.mark.parametrize("fleet", first_of(sorted(FLEETS)))
def test_a_seed_gives_the_same_history_bit_for_bit(fleet: str) -> None:
    first, again, other = (run(Plan.of(seed, "tokens", fleet)).digest for seed in (5, 5, 6))
    assert first == again
    assert first != other


FOUND = [
    "sessions: outcomes are not kept",
    "log: replies leave before their entries are safe",
    "desertion: the view says that the job is over",
]
FOUND_TOO = [
    "wait: the others go on without a lost worker",
    "primary: its log does not say which term it is of",
    "sync: gradients are summed in the order in which they came",
    "primary: replies do not wait for the backup",
    "coordinator: swaps without comparing",
    "rejoining: servers that are a step apart are taken as they are",
    "log: checksums are not looked at",
    "copy: the server is another one to its clients",
    "coordinator: an answer with an error ends the process that has the rows",
    "backup: takes its own name in the view for being dropped",
    "elastic: servers go on when the last worker has left",
    "replica: is restored from its log though the view does not name it",
    "replica: a new run goes on from any log",
    "starting: servers do not wait for a worker that is being started",
    "desertion: servers end as if all workers had left",
]


@pytest.mark.parametrize("name", [*FOUND, *(pytest.param(name, marks=pytest.mark.long) for name in FOUND_TOO)])
def test_a_planted_bug_is_found(name: str) -> None:
    assert hunt(name, 60) is not None


def test_there_are_enough_planted_bugs_and_the_code_has_their_places() -> None:
    assert len(BUGS) >= 60
    for name in BUGS:
        with planted(name):
            pass
    assert {fleet for bug in BUGS.values() for fleet in bug.fleets} == {"both", "logged", "replicas"}


def op(kind: str, about: object, start: float, end: float, result: object = None) -> Op:
    return Op("somebody", kind, about, start, end, result)


def sight(*tokens: int) -> list[tuple[tuple[float, ...], float]]:
    return [(tuple(float(n in tokens) for n in range(4)), float(len(tokens)))]


class TestOrders:
    """Histories by hand: what the checks let pass, and what not."""

    def check(self, ops: list[Op], *final: int) -> None:
        check_tokens(ops, 0, np.array(sight(*final)[0][0], np.float32), len(final))

    def test_one_growing_set_is_right(self) -> None:
        ops = [op("push", 0, 0, 2, sight(0)), op("push", 1, 1, 3, sight(0, 1)), op("look", None, 1, 4, sight(0))]
        self.check(ops, 0, 1)

    def test_a_push_without_an_answer_may_be_there_or_not(self) -> None:
        self.check([op("push", 0, 0, float("inf"))], 0)
        self.check([op("push", 0, 0, float("inf"))])

    @pytest.mark.parametrize(
        ("ops", "final", "what"),
        [
            ([op("push", 0, 0, 1, sight(0))], (), "was acknowledged"),
            ([op("push", 0, 0, 1, None)], (), "was acknowledged"),
            ([op("push", 0, 0, 1, sight(0)), op("look", None, 2, 3, sight())], (0,), "lacks it"),
            ([op("look", None, 0, 1, sight(0)), op("push", 0, 2, 3, sight(0))], (0,), "which came later"),
            ([op("push", 0, 0, 9, sight(0)), op("push", 1, 0, 9, sight(1))], (0, 1), "no order explains both"),
            ([op("push", 0, 0, 9, sight(0)), op("look", None, 0, 9, [((2.0, 0.0), 1.0)])], (0,), "not made once"),
            ([op("look", None, 0, 1, sight(3))], (3,), "nobody made"),
        ],
    )
    def test_what_no_order_explains_is_refused(self, ops: list[Op], final: tuple[int, ...], what: str) -> None:
        with pytest.raises(Violation, match=what):
            self.check(ops, *final)

    def test_a_register_keeps_the_last_value(self) -> None:
        written = [op("write", (0, 1.0), 0, 2), op("write", (0, 2.0), 1, 3)]
        check_registers([*written, op("read", 0, 2.5, 2.9, 2.0), op("read", 0, 3.5, 4, 1.0)][:3])
        check_registers([*written, op("read", 0, 4, 5, 1.0)])  # the two writes were under way at once
        check_registers([op("write", (0, 1.0), 0, float("inf")), op("read", 0, 1, 2, 0.0)])

    @pytest.mark.parametrize(
        "reads",
        [
            [op("read", 0, 4, 5, 1.0)],  # overwritten before
            [op("read", 0, 4, 5, 0.0)],
            [op("read", 0, 4, 5, 7.0)],  # which was never written
            [op("read", 0, 2.1, 2.2, 2.0), op("read", 0, 2.3, 2.4, 1.0)],  # to and fro
        ],
    )
    def test_a_register_that_goes_back_is_refused(self, reads: list[Op]) -> None:
        written = [op("write", (0, 1.0), 0, 1), op("write", (0, 2.0), 2, 3)]
        with pytest.raises(Violation):
            check_registers([*written, *reads])
