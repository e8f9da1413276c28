"""Chooses the log that a new run goes on from, of the two logs of a server with a backup: the one with the higher term.

Both replicas of a server keep a log. A replica writes a term into its `start` before it acknowledges anything in it. A
log with the higher term therefore has everything that was acknowledged, and the other one may lack some of it. Two logs
with the same term are those of a primary and of the backup that it waited for, so each of them has everything.
"""

from __future__ import annotations

from pathlib import Path

from torchfleet.base.errors import LogError
from torchfleet.ps.server.log.durable_server import Durability
from torchfleet.ps.server.log.log_start import NOT_IN_STEP, Start, find_start


def log_in_step(folder: Path) -> Start | None:
    """The `start` of a log that a new run can go on from; None if the folder has no such log. A log that is NOT_IN_STEP
    does not count: the log of its primary has all its entries. Raises LogError."""
    start = find_start(folder)
    return start if start is not None and start.is_whole and start.term != NOT_IN_STEP else None


def is_newest(durability: Durability, is_first: bool) -> bool:
    """Whether a run that has had no primary goes on from the log of this replica. `is_first`: this is replica 0, which
    goes on if the terms are equal. Raises LogError if there may be a newer log that is not here."""
    own = log_in_step(durability.folder)
    if own is None:
        return False
    assert durability.other is not None
    if own.term and not durability.other.exists():
        raise LogError(
            f"{durability.folder} has the log of a server with a backup, and {durability.other}, the folder of its "
            "other replica, is not here: that log may have changes that this one lacks. Bring it here, or give a "
            "--log_store that both replicas see; or go on from the last checkpoint, with another folder for the logs."
        )
    other = log_in_step(durability.other)
    if other is None or own.term == other.term:
        return other is None or is_first
    return own.term > other.term


def require_newest(durability: Durability) -> None:
    """Raise LogError if a server without a backup would go on from an older log than its backup had in an earlier
    run."""
    if durability.other is None or (other := log_in_step(durability.other)) is None:
        return
    own = log_in_step(durability.folder)
    if own is None or own.term < other.term:
        found = "none" if own is None else f"one of term {own.term}"
        raise LogError(
            f"{durability.other} has the newest log of this server (term {other.term}), and {durability.folder} has "
            f"{found}: it was the log of a backup that took over. Start the job with --replicas 2 again."
        )
