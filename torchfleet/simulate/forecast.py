"""What a simulated job tells of itself: steps, samples per second, waits, staleness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchfleet.simulate.packets import Packet
from torchfleet.simulate.step_watch import STEP, StepRecord, decode_final, decode_step

_WARM_STEPS = 3  # the first steps of a worker allocate, and make rows


@dataclass
class Rates:
    """Of the training of all workers together: from when each has made its first steps to the end of the first."""

    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)  # shares of the workers' time


class Forecast:
    """Collects the steps of all workers."""

    def __init__(self, num_servers: int, num_workers: int) -> None:
        self._num_servers = num_servers
        self._steps: list[list[StepRecord]] = [[] for _ in range(num_workers)]
        self._finals: dict[int, dict[str, Any]] = {}

    def note(self, packet: Packet) -> None:
        """What a worker tells about itself."""
        worker = packet.sender[0] - self._num_servers
        if packet.to[1] == STEP:
            self._steps[worker].append(decode_step(packet.frames[0]))
        else:
            self._finals[worker] = decode_final(packet.frames[0])

    @property
    def num_steps(self) -> int:
        return sum(len(steps) for steps in self._steps)

    def window(self) -> tuple[float, float]:
        """From when every worker has made its first steps to when the first makes its last; empty if there is none."""
        if any(len(steps) <= _WARM_STEPS for steps in self._steps):
            return 0.0, 0.0
        start = max(steps[_WARM_STEPS - 1].time for steps in self._steps)
        return start, max(start, min(steps[-1].time for steps in self._steps))

    def rates(self) -> Rates:
        """Sums over the workers, each by the time that it has trained: what stands between passes is left out."""
        start, end = self.window()
        rates, waited = Rates(waits={"pull": 0.0, "push": 0.0, "reduce": 0.0}), 0.0
        for steps in self._steps:
            pairs = list(_intervals(steps, start, end))
            seconds = sum(later.time - earlier.time for earlier, later in pairs)
            if not seconds:
                continue
            rates.samples_per_s += sum(later.samples - earlier.samples for earlier, later in pairs) / seconds
            rates.steps_per_s += len(pairs) / seconds
            for name in rates.waits:
                rates.waits[name] += sum(getattr(later, name) - getattr(earlier, name) for earlier, later in pairs)
            waited += seconds
        rates.waits = {name: seconds / max(waited, 1e-9) for name, seconds in rates.waits.items()}
        return rates

    def staleness(self) -> dict[str, float]:
        """By table, how many updates by others lay between a batch's pull and its push, on average."""
        servers: Sequence[Mapping[str, Any]] = next(iter(self._finals.values()), {}).get("servers", [])
        ages: dict[str, list[tuple[int, int]]] = {}
        for final in servers:
            for name, table in final["tables"].items():
                ages.setdefault(name, []).extend((int(age), count) for age, count in table["staleness"].items())
        return {
            name: sum(age * count for age, count in counts) / sum(count for _, count in counts)
            for name, counts in ages.items()
            if counts
        }


def _intervals(
    steps: Sequence[StepRecord], start: float, end: float
) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Pairs of steps between which nothing but training happened, within the window."""
    for earlier, later in zip(steps, steps[1:], strict=False):
        if start <= earlier.time and later.time <= end and not later.is_broken:
            yield earlier, later
