"""Whether there is one order of all changes that explains everything that clients were told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from support.faults.history import UNKNOWN, Op, Violation, expect

INITIAL = 0.0  # of a register


@dataclass
class Sight:
    """A set of pushes that somebody was shown, at some moment between `op.start` and `op.end`."""

    op: Op
    tokens: frozenset[int]
    version: float


def check_tokens(ops: Sequence[Op], shard: int, final: npt.NDArray[np.float32], num_updates: int) -> None:
    """Every acknowledged push is in the final block once; all sights are one growing set, in the order of time."""
    pushes = [op for op in ops if op.kind == "push"]
    sights = [
        Sight(op, _tokens(op.result[shard][0], op), op.result[shard][1])
        for op in ops
        if op.kind in ("push", "look") and op.is_acknowledged and op.result is not None
    ]
    end = Op("nobody", "look", None, UNKNOWN, UNKNOWN)
    sights.append(Sight(end, _tokens(final.tolist(), end), float(num_updates)))
    known = {op.about for op in pushes}
    for sight in sights:
        expect(sight.tokens <= known, lambda sight=sight: f"{sight} shows pushes that nobody made")
        expect(sight.version == len(sight.tokens), lambda sight=sight: f"{sight}: its version is not its size")
        if sight.op.kind == "push":
            expect(sight.op.about in sight.tokens, lambda sight=sight: f"{sight} does not show itself")
    _check_chain(sights)
    _check_times(pushes, sights)


def _check_chain(sights: list[Sight]) -> None:
    by_size = sorted(sights, key=lambda sight: len(sight.tokens))
    for smaller, larger in itertools.pairwise(by_size):
        if not smaller.tokens <= larger.tokens:
            lost = sorted(smaller.tokens - larger.tokens)
            raise Violation(f"no order explains both {smaller} and {larger}: pushes {lost} are in the first alone")
    own = [sight for sight in by_size if sight.op.kind == "push"]
    for first, second in itertools.pairwise(own):
        expect(len(first.tokens) < len(second.tokens), lambda f=first, s=second: f"{f} and {s} are the same moment")


def _check_times(pushes: list[Op], sights: list[Sight]) -> None:
    for sight in sights:
        for push in pushes:
            if push.is_acknowledged and push.precedes(sight.op):
                expect(push.about in sight.tokens, lambda p=push, s=sight: f"{p} was acknowledged, and {s} lacks it")
            elif sight.op.precedes(push):
                expect(push.about not in sight.tokens, lambda p=push, s=sight: f"{s} shows {p}, which came later")
    by_start = sorted(sights, key=lambda sight: sight.op.start)
    for i, later in enumerate(by_start):
        for earlier in by_start[:i]:
            if earlier.op.precedes(later.op):
                expect(
                    earlier.tokens <= later.tokens,
                    lambda e=earlier, s=later: f"{s} has lost what {e} showed: {sorted(e.tokens - s.tokens)}",
                )


def _tokens(columns: Sequence[float], op: Op) -> frozenset[int]:
    wrong = {n: value for n, value in enumerate(columns) if value not in (0.0, 1.0)}
    expect(not wrong, lambda: f"{op} shows pushes that were not made once: {wrong}")
    return frozenset(n for n, value in enumerate(columns) if value)


def check_registers(ops: Sequence[Op]) -> None:
    """All writes have different values, so what each read has read is known, and the check is exact.

    A write and the reads of its value form a group, between the first end and the last start of any of them. If the
    first end comes first, the register had this value from there to there. Two such stretches must not overlap, and no
    group that fits between its start and end may lie within another's stretch.
    """
    keys = {op.about if op.kind == "read" else op.about[0] for op in ops}
    for key in sorted(keys):
        reads = [op for op in ops if op.kind == "read" and op.about == key and op.is_acknowledged]
        writes = {op.about[1]: op for op in ops if op.kind == "write" and op.about[0] == key}
        for read in reads:
            if read.result == INITIAL:
                continue
            expect(read.result in writes, lambda read=read: f"{read}: nobody wrote that")
            expect(not read.precedes(writes[read.result]), lambda read=read: f"{read} saw what was not yet written")
        _check_zones(_zones(reads, writes))


def _zones(reads: list[Op], writes: dict[float, Op]) -> list[tuple[float, float, str]]:
    """Per value: (first end, last start, in words)."""
    first = Op("nobody", "write", (0, INITIAL), -2.0, -1.0)
    zones = []
    for value, write in ((INITIAL, first), *writes.items()):
        group = [write, *(op for op in reads if op.result == value)]
        if len(group) == 1 and not write.is_acknowledged:
            continue  # never answered, never seen
        zones.append((min(op.end for op in group), max(op.start for op in group), f"value {value:g}: {group}"))
    return zones


def _check_zones(zones: list[tuple[float, float, str]]) -> None:
    stretches = sorted(zone for zone in zones if zone[0] < zone[1])
    for one, other in itertools.pairwise(stretches):
        expect(one[1] <= other[0], lambda a=one, b=other: f"a register had two values at once: {a[2]}; {b[2]}")
    for end, start, words in zones:
        if end < start:
            continue
        for one in stretches:
            expect(not (one[0] < start and end < one[1]), lambda one=one, w=words: f"{w} lies within {one[2]}, unseen")
