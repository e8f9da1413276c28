"""A worker that joins a job under way: what its mode allows, and the step with which it begins."""

from __future__ import annotations

from collections.abc import Sequence

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.notices import tell
from torchfleet.base.role.role_info import LOSS_END, RoleInfo
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.requests import Joined

_FREE_MODES = ("async", "half_async", "geo")  # no worker waits for another


def check_loss_rule(mode: str, info: RoleInfo) -> None:
    """Raise RoleError if this mode cannot keep to what was said about lost workers."""
    if info.is_elastic and mode not in _FREE_MODES:
        raise RoleError(
            f"FLEET_MIN_WORKERS={info.min_workers} lets workers come and go, which is for {', '.join(_FREE_MODES)}; "
            f"this is {mode}. Leave it out, or train in one of these modes."
        )
    if info.on_worker_loss != LOSS_END and mode == "hybrid":
        raise RoleError(
            f"on_worker_loss={info.on_worker_loss} is for sync, {', '.join(_FREE_MODES)}: in hybrid mode no worker can "
            "go on without another. Leave it out; --max_restart starts all workers again together."
        )


def catch_up(client: Client, told: Sequence[Joined], num_optimizers: int, timeout: float) -> int:
    """The step with which this worker begins, the same on all servers.

    From the moment it has joined, each server's step waits for it. Servers may be a step apart: the process of before
    was killed when only some had its push, or the others went on between two answers. The steps of several optimizers
    of one loop belong together. What is behind is made without this worker's part.
    """
    steps = [joined.step for joined in told]
    first = -(-max(steps) // num_optimizers) * num_optimizers
    for step in range(min(steps), first):
        behind = [server for server, own in enumerate(steps) if own <= step]
        tell(f"step {step} is made without this worker's part on {len(behind)} of {len(told)} servers")
        client.skip_step(behind, timeout)
    return first // num_optimizers
