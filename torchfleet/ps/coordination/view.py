"""The record of which replica is primary, and the coordinator that keeps it.

A coordinator keeps one View per shard. Every change of a view is a compare-and-swap that raises the term by one, so of
two replicas that propose different changes only one succeeds. The changes:

(t, P, B)  → (t+1, P, "")   the primary goes on without its backup
(t, P, B)  → (t+1, B, "")   the backup takes over
(t, P, "") → (t+1, P, B)    a backup is in step: from now on the primary acknowledges only what the backup has
(t, P, B)  → (t+1, P, B)    the backup is heard again, after the primary asked to go on without it and got no answer
(t, P, ..) → (t+1, ENDED)   the job is over
(t, P, B)  → (t+1, P, B), deserted: all workers are lost, and both replicas end. What their logs have is still the job's

Going on alone and taking over change the same record, so they cannot both happen. Only the backup that the view names
may take over: any other replica may lack acknowledged changes.
"""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.base.prepared_types import prepared

MAX_NAME = 64
MAX_REASON = 1000
ENDED = "ended"  # in place of the primary's name


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which replica answers for a shard. A replica's name has its number and its process: "1.0.5f0c"."""

    term: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    primary: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    backup: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    deserted: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""  # which workers are lost; "": the job goes on

    @property
    def is_last(self) -> bool:
        """Whether the replicas have ended with their job. It may go on from their logs."""
        return self.primary == ENDED or bool(self.deserted)

    def alone(self) -> View:
        """The primary goes on without its backup."""
        return View(self.term + 1, self.primary)

    def taken_over(self) -> View:
        """The backup is primary now."""
        return View(self.term + 1, self.backup)

    def over(self) -> View:
        """The job is over; no replica may take over."""
        return View(self.term + 1, ENDED)

    def left_by(self, workers: str) -> View:
        """The replicas end because all workers are lost. `workers`: which, and how."""
        return View(self.term + 1, self.primary, self.backup, workers[:MAX_REASON])

    def joined_by(self, backup: str) -> View:
        """A backup is in step."""
        return View(self.term + 1, self.primary, backup)


class Coordinator(Protocol):
    """Keeps the views. Every method raises CoordinatorUnreachable if there is no good answer.

    That may take seconds: etcd's members are tried one after the other, each for up to 0.4 s until it is connected and
    0.4 s until it has answered; `replace` sends up to four requests; and each of them is sent up to three times, log-in
    included, if the user's token has expired. A loop that must not wait asks through a BackgroundCoordinator.

    After such an error it is unknown whether a change happened; it may also happen later, until the view has another
    term. A replica that asked for a change and finds it in the view has made it: the names of processes are unique.
    """

    def read(self, shard: int) -> View | None:
        """The current view; None if the shard has had no primary yet."""

    def replace(self, shard: int, before: View | None, after: View) -> bool:
        """Replace `before` by `after`. Returns False, and changes nothing, if the current view is neither. True if it
        is `after` already: an earlier call has made the change, and its answer was lost."""

    def renew(self) -> None:
        """Tell the coordinator that the job is alive. Call it every RENEWAL seconds: a coordinator may remove the
        records of dead jobs."""


RENEWAL = 600.0


def pack_view(view: View) -> bytes:
    return msgspec.json.encode(view)


def unpack_view(data: bytes, where: str) -> View:
    """The inverse of pack_view. Raises CoordinatorUnreachable, which names `where`, if `data` is not a view: other data
    in this place does not say which replica is primary."""
    try:
        return msgspec.json.decode(data, type=prepared(View))
    except (ValueError, RecursionError) as error:
        raise CoordinatorUnreachable(
            f"{where}: expected the record of a shard's primary, found {data[:80]!r} ({error})"
        ) from None
