"""Cuts into stages against all cuts that there are."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import naming

from torchfleet.base.errors import StrategyError
from torchfleet.collective.pipeline.stage_cuts import Cutting, Stages, Unit, best_cut

Spans = list[tuple[int, int]]
SMALL = st.integers(0, 6).map(float)


def every_cut(num_units: int, num_stages: int) -> list[Spans]:
    found = combinations(range(1, num_units), num_stages - 1)
    return [list(zip((0, *cuts), (*cuts, num_units), strict=True)) for cuts in found]


@given(st.lists(st.integers(0, 50), min_size=5, max_size=9), st.integers(1, 5), st.sampled_from([max, operator.add]))
def test_the_cut_has_the_least_cost(sizes: list[int], num_stages: int, join: Callable[[float, float], float]) -> None:
    def cost(stage: int, first: int, end: int) -> float:
        return (stage + 1) * sum(sizes[first:end]) ** 2

    def joined(spans: Spans) -> float:
        total = 0.0
        for stage, (first, end) in enumerate(spans):
            total = join(total, cost(stage, first, end))
        return total

    cuts = best_cut(len(sizes), num_stages, cost, join)
    assert cuts is not None
    spans = list(zip((0, *cuts), (*cuts, len(sizes)), strict=True))
    assert joined(spans) == min(map(joined, every_cut(len(sizes), num_stages)))


def test_what_costs_nothing_stays_with_what_is_before_it() -> None:
    sizes = [4, 0, 4, 0, 0, 4]
    assert best_cut(6, 3, lambda _, first, end: sum(sizes[first:end])) == [2, 5]


def test_without_an_allowed_cut_there_is_none() -> None:
    assert best_cut(4, 2, lambda _, first, end: math.inf if end - first > 1 else 1.0) is None


@st.composite
def rows_of_units(draw: st.DrawFn) -> list[Unit]:
    numbers = draw(st.lists(st.tuples(SMALL, SMALL, SMALL, SMALL, SMALL, st.booleans()), min_size=4, max_size=8))
    units = []
    for place, (seconds, state, inside, entering, leaving, is_joined) in enumerate(numbers):
        joined = entering if is_joined else 0.0
        is_start = place == 0 or seconds != 5.0
        units.append(Unit(f"unit{place}", seconds, state, inside, entering, joined, leaving, is_start))
    return units


def taken(units: Sequence[Unit], num_kept: int) -> float:
    """Bytes of a stage of these units, by the definitions."""
    kept = units[0].entering + sum(unit.inside for unit in units) + sum(unit.joined for unit in units[1:])
    return sum(unit.state for unit in units) + num_kept * (kept + units[-1].leaving)


def slowest_and_squares(units: Sequence[Unit], spans: Spans) -> tuple[float, float]:
    seconds = [sum(unit.seconds for unit in units[first:end]) for first, end in spans]
    return max(seconds), sum(number**2 for number in seconds)


def allowed(units: Sequence[Unit], spans: Spans, stages: Stages, limit: float = math.inf) -> bool:
    """Whether all ranks are below the bound, and all stages below `limit`."""
    of_ranks = dict.fromkeys(stages.rank_of, 0.0)
    for stage, (first, end) in enumerate(spans):
        number = taken(units[first:end], stages.num_kept[stage])
        of_ranks[stages.rank_of[stage]] += number
        if number > limit or not units[first].is_start:
            return False
    return max(of_ranks.values()) <= stages.bound


@given(rows_of_units(), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(5, 120))
def test_the_fastest_cut_below_the_bound_is_found(units: list[Unit], num_kept: list[int], bound: int) -> None:
    stages = Stages(list(range(len(num_kept))), num_kept, float(bound))
    found = [spans for spans in every_cut(len(units), len(num_kept)) if allowed(units, spans, stages)]
    cutting = Cutting(units, stages)
    if not found:
        with pytest.raises(StrategyError, match="pipeline_configs"):
            cutting.fastest()
        return
    spans = cutting.spans(cutting.fastest())
    assert allowed(units, spans, stages)
    best = min(slowest_and_squares(units, other) for other in found)
    assert slowest_and_squares(units, spans) == pytest.approx(best)


@pytest.mark.parametrize("rank_of", [[0, 1, 0, 1], [0, 1, 1, 0]])
@given(units=rows_of_units(), bound=st.integers(5, 200) | st.just(math.inf))
def test_several_stages_on_a_rank_stay_below_its_bound(rank_of: list[int], units: list[Unit], bound: float) -> None:
    stages = Stages(rank_of, [2, 3, 1, 1], float(bound))
    every = every_cut(len(units), 4)
    shared = [spans for spans in every if allowed(units, spans, stages, stages.bound / 2)]
    cutting = Cutting(units, stages)
    try:
        spans = cutting.spans(cutting.fastest())
    except StrategyError:
        assert not shared
        return
    assert allowed(units, spans, stages)
    if shared:  # never slower than if each stage had half of the bound
        assert slowest_and_squares(units, spans) <= min(slowest_and_squares(units, other) for other in shared)
    if bound == math.inf:
        found = [other for other in every if allowed(units, other, stages)]
        assert slowest_and_squares(units, spans) == min(slowest_and_squares(units, other) for other in found)


def unit(name: str, seconds: float = 1.0, state: float = 0.0, kept: float = 0.0, is_start: bool = True) -> Unit:
    return Unit(name, seconds, state * (1 << 20), kept * (1 << 20), 0.0, 0.0, 0.0, is_start)


def test_a_dear_unit_is_alone() -> None:
    units = [unit(str(place), 10.0 if place == 3 else 1.0) for place in range(7)]
    assert Cutting(units, Stages([0, 1, 2], [1, 1, 1])).fastest() == [3, 4]


def test_memory_moves_a_cut_of_equal_times() -> None:
    units = [unit("words", 1.0, 300.0), *(unit(f"block{place}", 1.0, 10.0) for place in range(5))]
    assert Cutting(units, Stages([0, 1], [2, 1])).fastest() == [3]
    assert Cutting(units, Stages([0, 1], [2, 1], 310.0 * (1 << 20))).fastest() == [2]


@pytest.mark.parametrize(
    ("units", "rank_of", "bound", "text"),
    [
        ([unit("a"), unit("b")], [0, 1, 2], math.inf, "2 a b 3 hybrid_configs['pp_degree']"),
        ([unit("a"), unit("wide", 1, 80.0, 30.0)], [0, 1], 100, "100.000 'wide' 110 80.000 ['memory_MB'] recompute"),
        ([unit("a", 1, 60.0), unit("b", 1, 60.0)], [0, 1, 0, 1], 100, "4 a b"),
        ([unit("a", 1, 60.0)] * 4, [0, 1, 0, 1], 100, "100.000 50.000 'a' 60.000"),
        ([unit("a", 1, 60.0)] * 3, [0, 1], 100, "100.000 120 recompute"),
        ([unit("a"), unit("b", is_start=False)], [0, 1], math.inf, "2 Sequential order ranks"),
        ([unit("a"), unit("b"), unit("c", is_start=False)], [0, 1, 2], math.inf, "3 b order ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_named(units: list[Unit], rank_of: list[int], bound: float, text: str) -> None:
    stages = Stages(rank_of, [1] * len(rank_of), bound * (1 << 20))
    with pytest.raises(StrategyError, match=naming(*text.split())):
        Cutting(units, stages).fastest()
