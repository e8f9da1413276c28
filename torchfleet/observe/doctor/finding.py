"""A finding: a problem, its severity, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

STOPS, SLOWS, NOTE = "stops", "slows", "note"  # a job fails; it is slow; worth knowing
_ORDER = {STOPS: 0, SLOWS: 1, NOTE: 2}


class Finding(msgspec.Struct):
    """`weight`: findings of one kind are sorted by it, the largest first."""

    kind: str
    what: str
    to_do: str
    weight: float = 0.0


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings, the most severe first."""
    return sorted(findings, key=lambda finding: (_ORDER[finding.kind], -finding.weight))


def will_hurt(findings: Iterable[Finding]) -> bool:
    """Whether any finding is more than a note."""
    return any(finding.kind != NOTE for finding in findings)
