"""One time axis for the clocks of several machines, from the times that requests carried."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torchfleet.base.tracing.profile_folder import Part


@dataclass(frozen=True)
class Clock:
    """A machine's clock against that of the first worker's machine, in nanoseconds."""

    ahead: int
    round_trip: int  # of the requests that it was measured by: it is right to half of that
    is_measured: bool = True


def clocks(parts: Sequence[Part]) -> dict[str, Clock]:
    """By machine. Those that no chain of requests connects to the first worker's are taken to be right."""
    edges = _edges(parts)
    first = next((part.machine for part in parts if part.role != "server"), parts[0].machine)
    found: dict[str, Clock] = {}
    waiting = [(0, first, 0)]
    while waiting:  # the way with the shortest round trips to every machine
        round_trip, machine, ahead = heapq.heappop(waiting)
        if machine in found:
            continue
        found[machine] = Clock(ahead, round_trip)
        for (here, there), (more, further) in edges.items():
            if here == machine and there not in found:
                heapq.heappush(waiting, (round_trip + more, there, ahead + further))
    return {part.machine: found.get(part.machine, Clock(0, 0, False)) for part in parts}


def _edges(parts: Sequence[Part]) -> dict[tuple[str, str], tuple[int, int]]:
    """Machine to machine, both ways: the shortest round trip, and how far the second is ahead of the first."""
    machine_of = {part.process: part.machine for part in parts}
    best: dict[tuple[str, str], tuple[int, int]] = {}
    for part in parts:
        for offset in part.offsets:
            there = machine_of.get(offset.process)
            if there is None or there == part.machine:
                continue
            for pair, ahead in (((part.machine, there), offset.ahead), ((there, part.machine), -offset.ahead)):
                if pair not in best or offset.round_trip < best[pair][0]:
                    best[pair] = offset.round_trip, ahead
    return best
