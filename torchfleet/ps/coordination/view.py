"""The record of who is primary, and what a coordinator is: the one place where it is decided.

It keeps a View per shard. Every change of a view raises its term by one, and is made by whoever still sees the view of
before: of two replicas that want different things, one gets its way. The changes:

(t, P, B)  → (t+1, P, "")   the primary goes on without its backup
(t, P, B)  → (t+1, B, "")   the backup takes over
(t, P, "") → (t+1, P, B)    a backup is in step: from now on nothing is acknowledged that it does not have
(t, P, ..) → (t+1, ENDED)   the job is over

Going on alone and taking over are changes of one record, so that never both happen. Only a backup that the view names
may take over: others lack something that was acknowledged.
"""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec

from torchfleet.base.errors import FleetError

MAX_NAME = 64
ENDED = "ended"  # in the place of a primary


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who answers for a shard. A replica is named by its number and its process: "1.0.5f0c"."""

    term: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    primary: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    backup: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""

    def alone(self) -> View:
        """The primary goes on without its backup."""
        return View(self.term + 1, self.primary)

    def taken_over(self) -> View:
        """The backup is primary now."""
        return View(self.term + 1, self.backup)

    def over(self) -> View:
        """The job is over, and nobody is to take anything over."""
        return View(self.term + 1, ENDED)

    def joined_by(self, backup: str) -> View:
        """A backup is in step."""
        return View(self.term + 1, self.primary, backup)


class Coordinator(Protocol):
    """Raises CoordinatorUnreachable if it cannot be asked within about a second: then nothing is known."""

    def read(self, shard: int) -> View | None:
        """The view as it is now; None if nobody has been primary yet."""

    def replace(self, shard: int, before: View | None, after: View) -> bool:
        """Put `after` in the place of `before`. False: something else is there, and stays."""

    def renew(self) -> None:
        """The job lives: to be called every RENEWAL seconds, for coordinators that remove records of dead jobs."""


RENEWAL = 600.0


def pack_view(view: View) -> bytes:
    return msgspec.json.encode(view)


def unpack_view(data: bytes, where: str) -> View:
    """Raises FleetError, which names `where`, if this is no view."""
    try:
        return msgspec.json.decode(data, type=View)
    except msgspec.DecodeError as error:
        raise FleetError(f"{where}: expected the record of a shard's primary, found {data[:80]!r} ({error})") from None
