"""The results of a simulated job: steps, samples per second, waits, staleness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from torchfleet.launch.simulate.inside.step_watch import SETTINGS, STEP, StepRecord, decode_body, decode_step
from torchfleet.launch.simulate.packets import Packet

_WARM_STEPS = 3  # the first steps of a worker allocate memory and create rows
_WAITS = ("pull", "push", "reduce")

History = Sequence[tuple[float, float]]  # (time, seconds that the process had computed by then)


class Figures(msgspec.Struct):
    """The result of a simulation, as written to simulation.json."""

    num_workers: int
    num_servers: int
    virtual_seconds: float
    wall_seconds: float
    steps: int
    start: float = 0.0  # training was measured from here to `end`
    end: float = 0.0
    samples_per_s: float = 0.0  # of all workers
    steps_per_s: float = 0.0
    waits: dict[str, float] = {}  # shares of the workers' time: for pulls, pushes, other ranks
    servers_busy: list[float] = []  # shares of the time
    staleness: dict[str, float] = {}  # by table, the mean

    def lines(self) -> Iterator[str]:
        """Yield the lines for the terminal."""
        yield f"{self.virtual_seconds:.3f} s of virtual time simulated in {self.wall_seconds:.1f} s"
        if not self.samples_per_s:
            yield (
                f"no rates: the run is too short. Rates are measured after the first {_WARM_STEPS} steps of every "
                "worker; run more steps than that."
            )
            return
        yield (
            f"training: {self.samples_per_s:,.0f} samples/s, {self.steps_per_s:,.1f} steps/s of {self.num_workers} "
            f"workers together, measured from {self.start:.3f} s to {self.end:.3f} s"
        )
        pull, push, reduce = (self.waits[name] for name in _WAITS)
        yield f"workers waited for pulls {pull:.1%}, for pushes {push:.1%}, for other ranks {reduce:.1%} of the time"
        if self.servers_busy:
            each = ", ".join(f"{share:.0%}" for share in self.servers_busy[:16])
            yield f"servers computed {each}{' ...' if len(self.servers_busy) > 16 else ''} of the time"
        for name, mean in self.staleness.items():
            yield f"staleness of '{name}': {mean:.1f} updates between a batch's pull and its push"


class Forecast:
    """Collects the steps of all workers."""

    def __init__(self, num_servers: int, num_workers: int) -> None:
        self._num_servers, self._num_workers = num_servers, num_workers
        self.steps: list[list[StepRecord]] = [[] for _ in range(num_workers)]
        self._finals: dict[int, dict[str, Any]] = {}
        self.settings: dict[str, Any] = {}  # of the workers: "mode", "queue_size", "pulls_ahead"

    def note(self, packet: Packet) -> None:
        """Record a report of a worker."""
        worker = packet.sender[0] - self._num_servers
        if packet.to[1] == STEP:
            self.steps[worker].append(decode_step(packet.frames[0]))
        elif packet.to[1] == SETTINGS:
            self.settings = decode_body(packet.frames[0])
        else:
            self._finals[worker] = decode_body(packet.frames[0])

    @property
    def fewest_steps(self) -> int:
        """Return the number of steps of the slowest worker."""
        return min(len(steps) for steps in self.steps)

    def num_steps(self, start: float, end: float) -> int:
        """Return the number of steps of all workers that ended after `start` and not after `end`."""
        return sum(start < step.time <= end for steps in self.steps for step in steps)

    def figures(self, now: float, wall: float, servers: Sequence[History]) -> Figures:
        """Return the figures known so far."""
        figures = Figures(self._num_workers, self._num_servers, now, wall, sum(len(steps) for steps in self.steps))
        if any(len(steps) <= _WARM_STEPS for steps in self.steps):
            return figures
        figures.start = max(steps[_WARM_STEPS - 1].time for steps in self.steps)
        figures.end = max(figures.start, min(steps[-1].time for steps in self.steps))
        self._fill_rates(figures)
        figures.servers_busy = [_share(history, figures.start, figures.end) for history in servers]
        figures.staleness = self._staleness()
        return figures

    def _fill_rates(self, figures: Figures) -> None:
        """Sum the rates of the workers, each over the time that it trained: the time between passes is left out."""
        waits, total = dict.fromkeys(_WAITS, 0.0), 0.0
        for steps in self.steps:
            pairs = list(_intervals(steps, figures.start, figures.end))
            seconds = sum(later.time - earlier.time for earlier, later in pairs)
            if not seconds:
                continue
            figures.samples_per_s += sum(later.samples - earlier.samples for earlier, later in pairs) / seconds
            figures.steps_per_s += len(pairs) / seconds
            for name in _WAITS:
                waits[name] += sum(getattr(later, name) - getattr(earlier, name) for earlier, later in pairs)
            total += seconds
        figures.waits = {name: seconds / max(total, 1e-9) for name, seconds in waits.items()}

    def _staleness(self) -> dict[str, float]:
        """Return the staleness by table: the mean number of updates between a batch's pull and its push, as reported by
        the last worker."""
        final: Mapping[str, Any] = list(self._finals.values())[-1] if self._finals else {}
        ages: dict[str, list[tuple[int, int]]] = {}
        for server in final.get("servers", []):
            for name, table in server["tables"].items():
                ages.setdefault(name, []).extend((int(age), count) for age, count in table["staleness"].items())
        return {
            name: sum(age * count for age, count in counts) / sum(count for _, count in counts)
            for name, counts in ages.items()
            if counts
        }


def _intervals(steps: Sequence[StepRecord], start: float, end: float) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Yield the pairs of consecutive steps within the window between which the worker only trained."""
    for earlier, later in pairwise(steps):
        if start <= earlier.time and later.time <= end and not later.is_broken:
            yield earlier, later


def _share(history: History, start: float, end: float) -> float:
    """Return the share of the time from `start` to `end` in which a process computed."""
    within = [(time, busy) for time, busy in history if start <= time <= end]
    if len(within) < 2 or within[-1][0] == within[0][0]:
        return 0.0
    return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])
