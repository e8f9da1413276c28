"""A profile in a few lines: phases of a step, what training waits for, and what servers do meanwhile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchfleet.base.tracing.profile_folder import Part
from torchfleet.base.tracing.span import HANDLE, HELD, PHASE, REQUEST, STEP, WAIT, Span
from torchfleet.base.tracing.step_spans import BACKWARD, DATA, FORWARD, LOSS, UNSEEN, UPDATE

_ORDER = (DATA, UNSEEN, FORWARD, LOSS, BACKWARD, UPDATE)
_STEPS = "steps"  # prefix of the tracks of training threads


@dataclass(frozen=True)
class Row:
    """Milliseconds of every step."""

    name: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / max(1, len(self.values))

    @property
    def p99(self) -> float:
        ordered = sorted(self.values)
        return ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)] if ordered else 0.0


@dataclass(frozen=True)
class ServerLoad:
    """What one server did for all workers, in milliseconds for each of their steps."""

    name: str
    computing: float
    held: float
    num_requests: float
    by_command: dict[str, float]


class Summary:
    """Figures of a profile, over the steps of all workers together."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._workers = [part for part in parts if part.role != "server"]
        self._servers = [part for part in parts if part.role == "server"]
        self.steps = Row("step", tuple(_ms(span) for span in self._of(STEP)))
        self.phases = [row for row in (self._row(PHASE, name) for name in _ORDER) if row.values]
        self.waits = self._waits()
        self.servers = [self._load(part) for part in self._servers]

    @property
    def slowest(self) -> ServerLoad | None:
        return max(self.servers, key=lambda load: load.computing + load.held, default=None)

    def lines(self) -> list[str]:
        modes = "/".join(sorted({part.mode for part in self._workers if part.mode}))
        what = f"{self._workers[0].role}{'s' * (len(self._workers) > 1)}"
        total = self.steps.mean
        lines = [
            f"{len(self.steps.values)} steps of {len(self._workers)} {what}{f', {modes}' if modes else ''}",
            f"{'':<26}{'mean ms':>10}{'p99 ms':>10}{'of the step':>13}",
            *(_line(row, total, "  " * (row is not self.steps)) for row in (self.steps, *self.phases)),
        ]
        if self.waits:
            lines.append("of this, training waits for replies:")
            lines += [_line(row, total, "  ") for row in self.waits]
        return [*lines, *self._server_lines()]

    def _server_lines(self) -> list[str]:
        if not self.servers:
            return []
        way = [span.more["way_ms"] for span in self._of(REQUEST) if "way_ms" in span.more]
        lines = [f"{'servers, for each step':<26}{'computing':>10}{'held':>10}{'requests':>13}"]
        for load in self.servers:
            commands = ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(load.by_command.items()))
            lines.append(
                f"  {load.name:<24}{load.computing:>10.2f}{load.held:>10.2f}{load.num_requests:>13.1f}  {commands}"
            )
        slowest = self.slowest
        if slowest is not None and len(self.servers) > 1:
            lines.append(f"slowest server: {slowest.name}")
        if way:
            middle = sorted(float(ms) for ms in way)[len(way) // 2]
            where = "on the network, in queues, or received but not yet read"
            lines.append(f"a request spends {middle:.2f} ms (median) {where}")
        return lines

    def _of(self, kind: str) -> list[Span]:
        return [span for part in self._workers for span in part.spans if span.kind == kind]

    def _row(self, kind: str, name: str) -> Row:
        """Sums by step of the spans of this kind and name; no values if there are no such spans."""
        return Row(name, _by_step(self._workers, lambda span: span.kind == kind and span.name == name))

    def _waits(self) -> list[Row]:
        names = {span.name for span in self._of(WAIT) if span.track.startswith(_STEPS)}
        rows = [
            Row(
                name.removeprefix("wait for "),
                _by_step(self._workers, lambda span, name=name: _is_wait(span, name)),  # type: ignore[misc]
            )
            for name in names
        ]
        return sorted(rows, key=lambda row: -row.mean)

    def _load(self, part: Part) -> ServerLoad:
        num = max(1, len(self.steps.values))
        by_command: dict[str, float] = defaultdict(float)
        for span in part.spans:
            if span.kind == HANDLE:
                by_command[span.name.partition(" ")[0]] += _ms(span) / num
        held = sum(_ms(span) for span in part.spans if span.kind == HELD) / num
        num_requests = sum(span.kind == HANDLE for span in part.spans) / num
        return ServerLoad(part.name, sum(by_command.values()), held, num_requests, dict(by_command))


def _is_wait(span: Span, name: str) -> bool:
    return span.kind == WAIT and span.name == name and span.track.startswith(_STEPS)


def _by_step(parts: Iterable[Part], is_meant: Callable[[Span], bool]) -> tuple[float, ...]:
    """Sum the milliseconds of matching spans by step. A step without any counts as 0 if other steps have some."""
    sums: dict[tuple[int, int], float] = {}
    found = False
    for part in parts:
        for span in part.spans:
            if span.kind == STEP:
                sums.setdefault((span.origin, span.trace), 0.0)
        for span in part.spans:
            if is_meant(span) and (span.origin, span.trace) in sums:
                sums[span.origin, span.trace] += _ms(span)
                found = True
    return tuple(sums.values()) if found else ()


def _ms(span: Span) -> float:
    return (span.end - span.start) / 1e6


def _line(row: Row, total: float, indent: str) -> str:
    share = f"{100 * row.mean / total:.0f} %" if total else ""
    return f"{indent + row.name:<26}{row.mean:>10.2f}{row.p99:>10.2f}{share:>13}"
