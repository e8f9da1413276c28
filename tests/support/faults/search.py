"""Looking for what is wrong: one schedule after the other, with a planted bug or without."""

from __future__ import annotations

from dataclasses import dataclass, replace

from support.faults.bugs import (
    planted_answers,
    planted_copies,
    planted_folders,
    planted_logs,
    planted_meetings,
    planted_members,
    planted_replica_logs,
    planted_replicas,
    planted_starts,
)
from support.faults.planted import BUGS, planted
from support.faults.schedules import Plan, load_kernels, run
from support.messages import INTERNAL_ERROR

# Importing them has filled BUGS.
PLANTED = (
    planted_answers,
    planted_copies,
    planted_folders,
    planted_logs,
    planted_meetings,
    planted_members,
    planted_replica_logs,
    planted_replicas,
    planted_starts,
)
MISTAKES = (TypeError, AttributeError, NameError)


@dataclass(frozen=True)
class Found:
    """After how many schedules, and what they said."""

    num_schedules: int
    seed: int
    text: str


def failure(
    seed: int, fleet: str | None = None, script: str | None = None, is_unlucky: bool = False
) -> tuple[str, Exception | None]:
    """The kind of the schedule, and what is wrong with it, if anything is."""
    plan = Plan.of(seed, script, fleet)
    plan = replace(plan, is_unlucky=is_unlucky or plan.is_unlucky)
    try:
        run(plan)
    except Exception as error:  # whatever it is, somebody has to look at it
        return f"{plan.script} on {plan.fleet}", error
    return f"{plan.script} on {plan.fleet}", None


def hunt(name: str, num_schedules: int) -> Found | None:
    """Run schedules with this bug, of the kinds in which it can show, until one finds it."""
    load_kernels()  # as they are without the bug
    fleets, script = BUGS[name].fleets or (None,), BUGS[name].script
    with planted(name):
        for seed in range(num_schedules):
            _, error = failure(seed, fleets[seed % len(fleets)], script, BUGS[name].is_unlucky)
            if error is not None:
                _check_plant(error)
                return Found(seed + 1, seed, f"{type(error).__name__}: {error}")
    return None


def _check_plant(error: Exception) -> None:
    """A planted bug that cannot run is not found: it is none."""
    if isinstance(error, MISTAKES) or INTERNAL_ERROR in str(error):
        raise RuntimeError("what was planted does not fit the code any longer") from error
