"""What fleetrun does when a worker is lost: the rule passed to servers and workers, and its effect on the job."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from torchfleet.base.role.process_settings import MAX_RESTART, MIN_WORKERS, ON_LOSS, loss_of
from torchfleet.base.role.role_info import GO_ON, LOSS_END, LOSS_RULES, LOSS_WAIT
from torchfleet.launch.surroundings import surroundings

FREE_MODES = ("async", "half_async", "geo")  # workers do not wait for each other: training continues without one


def add_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--on_worker_loss",
        choices=LOSS_RULES,
        help="what happens to workers that wait for a lost worker. end: they fail. wait: they wait until it is "
        "restarted (--max_restart), for sync_timeout at most. go_on: they go on without it (default: "
        "FLEET_ON_WORKER_LOSS, else end)",
    )


def loss_variables(
    options: argparse.Namespace,
    num_workers: int,
    min_workers: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables that tell servers and workers the rule (if one was given), how often a worker is restarted,
    and the minimum number of workers (if the job is elastic). Raises RoleError."""
    environment = surroundings() if environment is None else environment
    rule = {ON_LOSS: options.on_worker_loss or environment.get(ON_LOSS) or ""}
    elastic = {} if min_workers is None else {MIN_WORKERS: str(min_workers)}
    loss_of({MIN_WORKERS: environment.get(MIN_WORKERS) or "", **rule, **elastic}, num_workers)
    restarts = {MAX_RESTART: str(options.max_restart) if options.max_restart else ""}
    return {name: value for name, value in (rule | elastic | restarts).items() if value}


def may_restart(mode: str, variables: Mapping[str, str]) -> bool:
    """Whether one worker can be restarted while the others keep running. `variables`: of its process."""
    return mode in FREE_MODES or (mode in ("sync", "hybrid") and _rule(variables) != LOSS_END)


def may_be_missed(returncode: int, variables: Mapping[str, str]) -> bool:
    """Whether the job continues without a worker that ended with `returncode`. A script that failed on one worker would
    fail on others too, so the job then ends, unless the rule says to continue in any case."""
    rule = _rule(variables)
    return rule == GO_ON or (returncode < 0 and rule != LOSS_WAIT)


def _rule(variables: Mapping[str, str]) -> str:
    return variables.get(ON_LOSS) or (GO_ON if variables.get(MIN_WORKERS) else LOSS_END)
