"""What a worker sees of its servers: gradients on their way, tables, counters; and how rows are dropped."""

from __future__ import annotations

from typing import Any

import msgspec

from torchfleet.api.current_job import get_job, get_worker
from torchfleet.api.job.ps_job import NO_WORKER
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.worker.modes.whole_tables import WholeTables


def settle() -> None:
    """Wait until every gradient handed over so far has been applied."""
    get_worker().communicator.settle()


def flush() -> None:
    """Wait until every gradient of this worker has reached the servers."""
    get_worker().communicator.flush()


def stats() -> dict[str, Any]:
    """Counters and times of this worker and of all servers, staleness histograms among them."""
    return get_worker().stats()


def describe() -> str:
    """The tables, which parameter goes to which, and what each server holds."""
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
    """Drop rows, of one table or of all: those for which any of these holds; without any, each table's own policy acts.

    `delete_after_unseen_days`, `delete_threshold`, `ttl_days`, `max_rows`, `max_bytes`, `min_norm` and `where` are
    those of fleet.Shrink. On worker 0 only; training goes on meanwhile. Returns how many rows of which table were
    dropped: docs/online.md. `max_share`: of a server's rows; a shrink that would drop more drops none and raises
    TableError. None: the table's own, else 0.5.
    """
    policy = Shrink(delete_after_unseen_days, delete_threshold, ttl_days, max_rows, max_bytes, min_norm, where)
    if max_share is not None:
        policy = msgspec.structs.replace(policy, max_share=max_share)
    return get_job(NO_WORKER).first_worker("shrink").shrink(table, policy)


def set_time(seconds: float) -> dict[str, int]:
    """Set the time of all tables, in seconds since 1970 (UTC), until the next call; else they go by the wall clock.

    On worker 0 only. Returns when the shrinks that this makes due are done: how many rows of which table they dropped.
    """
    return get_job(NO_WORKER).first_worker("set_time").set_time(seconds)


def whole_tables(share: float | None = None, shared: bool = False) -> WholeTables:
    """Whole copies of the tables, as arrays to be trained in place: docs/modes/geo.md.

    In one process, or in geo training: then differences are exchanged every k_steps calls of `step_done`. `share` is
    the part of a difference that an exchange sends; unless given, it goes by how often a row was changed. With
    `shared` the workers of one machine train one copy together (Linux; elsewhere each has its own). All workers must
    then call this, and wait for each other here.
    """
    return get_worker().whole_tables(share, shared)
