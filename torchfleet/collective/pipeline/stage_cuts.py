"""Where a row of units is cut into stages: an exact dynamic program over contiguous cuts.

Stage s of units a … b-1 takes t = Σ seconds of a micro-batch, and on its rank

    m = Σ state + k_s · (what enters a + Σ kept inside + what leaves b-1)

bytes, where k_s is the number of micro-batches that the schedule has under way there. The cut has the least possible
max_s t_s, which is what a pipeline's micro-batches wait for; of cuts that are equally good in that, the least Σ t_s².
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchfleet.base.errors import StrategyError

Cost = Callable[[int, int, int], float]  # (stage, first unit, unit after its last one) → its cost; inf: not allowed
_MB = 1 << 20
Join = Callable[[float, float], float]


@dataclass(frozen=True)
class Unit:
    """What a dry step measured of one module of a model. Sizes are bytes; all but `state` are of one micro-batch."""

    name: str
    seconds: float  # forward and backward
    state: float  # parameters, gradients and optimizer state
    inside: float  # kept for backward, without what enters
    entering: float
    joined: float  # the part of `entering` that it keeps and the unit before it does not
    leaving: float  # the outputs that are not part of `inside` or `entering`
    is_start: bool = True  # whether a stage may begin with it


@dataclass(frozen=True)
class Stages:
    """The stages that units are cut for. `bound`: the bytes that a rank may take; inf: any number."""

    rank_of: Sequence[int]
    num_kept: Sequence[int]  # by stage: micro-batches that are under way
    bound: float = math.inf

    @property
    def most_on_a_rank(self) -> int:
        return max(self.rank_of.count(rank) for rank in set(self.rank_of))


def best_cut(num_units: int, num_stages: int, cost: Cost, join: Join = max) -> list[int] | None:
    """Where the second, third, ... stage begins, so that the joined costs of the stages are least; None if no cut is
    allowed.

    `join`: max, or a sum. Of equally good cuts the last one wins, from the first stage on: units without any cost stay
    with the unit before them.
    """
    best: list[tuple[float, list[int]]] = [(cost(0, 0, end) if end else math.inf, []) for end in range(num_units + 1)]
    for stage in range(1, num_stages):
        for end in range(num_units, stage, -1):  # backwards: best[first] still has one stage less
            best[end] = min(
                (join(best[first][0], cost(stage, first, end)), [*best[first][1], -first])
                for first in range(stage, end)
            )
    total, cuts = best[num_units]
    return None if total == math.inf else [-first for first in cuts]


class Cutting:
    """The costs of stages that consist of these units."""

    def __init__(self, units: Sequence[Unit], stages: Stages) -> None:
        self._units, self._stages = units, stages
        self._seconds = _sums([unit.seconds for unit in units])
        self._states = _sums([unit.state for unit in units])
        self._kept = _sums([unit.inside + unit.joined for unit in units])

    def seconds(self, first: int, end: int) -> float:
        return self._seconds[end] - self._seconds[first]

    def bytes(self, stage: int, first: int, end: int) -> float:
        """The bytes that the rank takes for this stage."""
        entering, joined = self._units[first].entering, self._units[first].joined
        kept = entering - joined + self._kept[end] - self._kept[first] + self._units[end - 1].leaving
        return self._states[end] - self._states[first] + self._stages.num_kept[stage] * kept

    def fastest(self) -> list[int]:
        """The units at which the second, third, ... stage begins. Raises StrategyError if the bound allows no cut.

        With several stages on a rank: the fastest cut whose stages are each below the bound, if the sums of all ranks
        are below it, too; otherwise each stage may take an equal share of the bound.
        """
        names = [unit.name for unit in self._units]
        if len(names) < len(self._stages.rank_of):
            raise StrategyError(
                f"pipeline_configs['cut']='measured': {len(names)} modules in a row ({', '.join(names)}) cannot be cut "
                f"into {len(self._stages.rank_of)} stages: use fewer ranks (hybrid_configs['pp_degree']) or a smaller "
                "pipeline_configs['vpp_degree'], or cut modules into smaller ones"
            )
        cuts = self._below(self._stages.bound)
        if cuts is not None and max(self.bytes_of_ranks(cuts)) <= self._stages.bound:
            return cuts
        limit = self._stages.bound / self._stages.most_on_a_rank
        cuts = self._below(limit)
        if cuts is None:
            raise self._refusal(limit)
        return cuts

    def spans(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """(first unit, unit after the last one) of each stage."""
        return list(pairwise([0, *cuts, len(self._units)]))

    def bytes_of_ranks(self, cuts: Sequence[int]) -> list[float]:
        found: dict[int, float] = defaultdict(float)
        for stage, (first, end) in enumerate(self.spans(cuts)):
            found[self._stages.rank_of[stage]] += self.bytes(stage, first, end)
        return [found[rank] for rank in sorted(found)]

    def _below(self, limit: float) -> list[int] | None:
        """The fastest cut whose stages each take at most `limit` bytes."""
        cuts = self._cut(lambda stage, first, end: self._seconds_below(limit, stage, first, end), max)
        if cuts is None:
            return None
        slowest = max(self.seconds(first, end) for first, end in self.spans(cuts))

        def squared(stage: int, first: int, end: int) -> float:
            seconds = self._seconds_below(limit, stage, first, end)
            return seconds**2 if seconds <= slowest else math.inf

        return self._cut(squared, operator.add)

    def _cut(self, cost: Cost, join: Join) -> list[int] | None:
        return best_cut(len(self._units), len(self._stages.rank_of), cost, join)

    def _seconds_below(self, limit: float, stage: int, first: int, end: int) -> float:
        is_allowed = self._units[first].is_start and self.bytes(stage, first, end) <= limit
        return self.seconds(first, end) if is_allowed else math.inf

    def _refusal(self, limit: float) -> StrategyError:
        where, num = "pipeline_configs['cut']='measured'", len(self._stages.rank_of)
        least = self._cut(self._bytes_at_start, max)
        if least is None:
            able = ", ".join(unit.name for unit in self._units[1:] if unit.is_start)
            return StrategyError(
                f"{where}: no cut makes {num} stages, since a later one can begin only at: {able or 'no module'}. In a "
                "Sequential that is a module that takes one tensor and does not change it; in any other model, one "
                "after which no parameters of the modules before it are used: assign modules in the order forward "
                "calls them. Or use fewer ranks."
            )
        share = f" ({megabytes(limit)} for each of its stages)" if limit < self._stages.bound else ""
        where += f": a rank may take {megabytes(self._stages.bound)}{share}"
        ways = "Raise pipeline_configs['memory_MB'] if there is more, or use smaller micro-batches, recompute, sharding"
        for place, unit in enumerate(self._units):
            possible = range(max(0, num - len(self._units) + place), min(place, num - 1) + 1)
            alone = min(self.bytes(stage, place, place + 1) for stage in possible)
            if alone > limit:
                return StrategyError(
                    f"{where}, and module {unit.name!r} alone takes {megabytes(alone)}, {megabytes(unit.state)} of "
                    f"them for parameters, gradients and optimizer state. {ways}, or make several modules of it."
                )
        needed = max(self.bytes_of_ranks(least))
        return StrategyError(f"{where}, and in the evenest cut one takes {megabytes(needed)}. {ways}, or more ranks.")

    def _bytes_at_start(self, stage: int, first: int, end: int) -> float:
        return self.bytes(stage, first, end) if self._units[first].is_start else math.inf


def _sums(numbers: Sequence[float]) -> list[float]:
    return list(accumulate(numbers, initial=0.0))


def megabytes(number: float) -> str:
    return f"{number / _MB:,.{0 if number > 100 * _MB else 3}f} MB"
