"""A worker's view of its servers: gradients in flight, tables and counters; and the eviction of rows."""

from __future__ import annotations

from typing import Any

import msgspec

from torchfleet.api.current_job import get_job, get_worker
from torchfleet.api.job.not_begun import NO_WORKER
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.worker.modes.whole_tables import WholeTables


def settle() -> None:
    """Wait until the gradients of all steps so far have been applied."""
    get_worker().communicator.settle()


def flush() -> None:
    """Wait until every gradient of this worker has reached the servers."""
    get_worker().communicator.flush()


def stats() -> dict[str, Any]:
    """Counters and times of this worker and of all servers, including staleness histograms."""
    return get_worker().stats()


def describe() -> str:
    """The tables, the parameters of each, and the contents of each server."""
    return get_job().describe()


def shrink(
    table: str | None = None,
    *,
    delete_after_unseen_days: float | None = None,
    delete_threshold: float | None = None,
    ttl_days: float | None = None,
    max_rows: int | None = None,
    max_bytes: int | None = None,
    min_norm: float | None = None,
    where: str | None = None,
    max_share: float | None = None,
) -> dict[str, int]:
    """Drop the rows of one table, or of all, that match any of the criteria; without criteria, each table's own policy
    applies.

    `delete_after_unseen_days`, `delete_threshold`, `ttl_days`, `max_rows`, `max_bytes`, `min_norm` and `where` are
    those of fleet.Shrink. Worker 0 only; training continues meanwhile. `max_share`: the largest share of a server's
    rows that may be dropped; a shrink that would drop more drops none and raises TableError. None: the table's own,
    else 0.5. Returns the number of dropped rows by table: docs/online.md.
    """
    policy = Shrink(delete_after_unseen_days, delete_threshold, ttl_days, max_rows, max_bytes, min_norm, where)
    if max_share is not None:
        policy = msgspec.structs.replace(policy, max_share=max_share)
    return get_job(NO_WORKER).first_worker("shrink").shrink(table, policy)


def set_time(seconds: float) -> dict[str, int]:
    """Set the time of all tables, in seconds since 1970 (UTC), until the next call. By default they use the wall clock.

    Worker 0 only. Waits for the shrinks that become due. Returns the number of rows that they dropped, by table.
    """
    return get_job(NO_WORKER).first_worker("set_time").set_time(seconds)


def whole_tables(share: float | None = None, shared: bool = False) -> WholeTables:
    """Whole copies of the tables, as arrays to be trained in place: docs/modes/geo.md.

    Available in one process or in geo mode, where differences are exchanged every k_steps calls of `step_done`.
    `share`: the part of a difference that an exchange sends; by default it depends on how often a row was changed.
    `shared`: the workers of one machine train one copy together (Linux; elsewhere each has its own). All workers must
    then call this, and wait for each other here.
    """
    return get_worker().whole_tables(share, shared)
