"""Looking for what is wrong: one schedule after the other, with a planted bug or without."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from support.faults.bugs import planted_copies, planted_logs, planted_meetings, planted_replicas
from support.faults.planted import BUGS, planted
from support.faults.schedules import Plan, run

from torchfleet.errors import FleetError

PLANTED = (planted_copies, planted_logs, planted_meetings, planted_replicas)  # importing them has filled BUGS


@dataclass(frozen=True)
class Found:
    """After how many schedules, and what they said."""

    num_schedules: int
    seed: int
    text: str


def failure(seed: int, fleet: str | None = None, script: str | None = None) -> tuple[str, str]:
    """The kind of the schedule, and what is wrong with it; "": nothing."""
    plan = Plan.of(seed, script, fleet)
    kind = f"{plan.script} on {plan.fleet}"
    try:
        run(plan)
    except Exception as error:  # whatever it is, somebody has to look at it
        _check_plant(error)
        return kind, f"{type(error).__name__}: {error}"
    return kind, ""


def _check_plant(error: Exception) -> None:
    """A planted bug that cannot run is not found: it is none."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    is_own = files[-1].rpartition("/")[2].startswith("planted") and not isinstance(error, FleetError | AssertionError)
    if is_own or "internal error of the server" in str(error):
        raise RuntimeError("what was planted does not fit the code any longer") from error


def hunt(name: str, num_schedules: int) -> Found | None:
    """Run schedules with this bug, of the kinds in which it can show, until one finds it."""
    fleets, script = BUGS[name].fleets or (None,), BUGS[name].script
    with planted(name):
        for seed in range(num_schedules):
            _, text = failure(seed, fleets[seed % len(fleets)], script)
            if text:
                return Found(seed + 1, seed, text)
    return None
