"""Which copy the ranks go on from: the newest step that every rank has, in its own memory or in its keeper's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchfleet.base.errors import FleetError
from torchfleet.collective.checkpoint.planning import Report

NO_STEP = -1


class Copies(Report, kw_only=True):
    """The copies that a rank has, by step."""

    own: list[int] = msgspec.field(default_factory=list)
    kept: list[int] = msgspec.field(default_factory=list)  # of its ward
    saved: int = NO_STEP  # the step of the last save; rank 0's counts


class Start(NamedTuple):
    """Where training goes on."""

    step: int
    is_copy: bool
    is_save: bool = False  # neither: from the beginning
    wards: Sequence[int] = ()  # ranks that get their copy from their keeper
    lost: str = ""  # a message that says what is missing of newer copies


def newest(copies: Sequence[Copies], distance: int, copy_steps: int) -> Start:
    """Where all ranks go on: from the newest complete copy, or else from the last save. A save may be a few steps
    newer, but it has no random numbers.

    Raises FleetError if copies are lost and there is no save: a copy newer than the first one shows that every rank
    had one.
    """
    step, wards = _complete(copies, distance)
    if step != NO_STEP:
        return Start(step, is_copy=True, wards=wards)
    saved = copies[0].saved
    latest = max((one for rank in copies for one in (*rank.own, *rank.kept)), default=NO_STEP)
    lost = _missing(copies, distance, latest) if latest > saved else ""
    if saved != NO_STEP:
        return Start(saved, is_copy=False, is_save=True, lost=lost)
    if latest > copy_steps:
        raise FleetError(
            f"{lost}, and there is no save to go on from: expected a save in the folder that fleet.elastic.steps got "
            "as dirname. Start the job again to train from the beginning."
        )
    return Start(0, is_copy=False)


def _complete(copies: Sequence[Copies], distance: int) -> tuple[int, list[int]]:
    """(the newest step that all ranks have, the ranks that have it in their keeper's memory only)."""
    for step in sorted({one for rank in copies for one in (*rank.own, *rank.kept)}, reverse=True):
        without = [rank for rank, found in enumerate(copies) if step not in found.own]
        if all(_is_kept(copies, rank, distance, step) for rank in without):
            return step, without
    return NO_STEP, []


def _is_kept(copies: Sequence[Copies], rank: int, distance: int, step: int) -> bool:
    return bool(distance) and step in copies[(rank + distance) % len(copies)].kept


def _missing(copies: Sequence[Copies], distance: int, step: int) -> str:
    missing = [
        rank
        for rank, found in enumerate(copies)
        if step not in found.own and not _is_kept(copies, rank, distance, step)
    ]
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"the copies of step {step} in memory are not complete: those of {ranks} are lost"
