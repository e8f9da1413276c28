"""Which changes of which client have been applied: the memory that makes a repeated push harmless.

A client numbers its changes to one server 1, 2, 3, ... and says with each message below which number (the floor)
all is settled. The server keeps the outcome of every change above the floor, and answers a repeat with it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from torchfleet.errors import FleetError, WireError

MAX_CLIENTS = 1 << 16  # idle longest goes first; far more than a fleet has, far less than memory
MAX_AHEAD = 1 << 12  # a client's changes above its floor


class Outcome(Enum):
    RUNNING = "running"  # taken in, its reply comes later
    APPLIED = "applied"


@dataclass(slots=True)
class Session:
    floor: int = 1
    outcomes: dict[int, Outcome | FleetError] = field(default_factory=dict)


class Sessions:
    """Outcomes by client and sequence number; bounded."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, client: int, sequence: int, floor: int) -> Outcome | FleetError:
        """What became of this change so far; RUNNING if it is new, or has been taken in but not answered."""
        session = self._sessions.get(client)
        if session is None:
            session = self._sessions[client] = Session()
            if len(self._sessions) > MAX_CLIENTS:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(client)
        if floor > session.floor:
            session.floor = floor
            session.outcomes = {n: outcome for n, outcome in session.outcomes.items() if n >= floor}
        if sequence < session.floor:
            return Outcome.APPLIED  # settled long ago; whoever asked has stopped listening
        if sequence >= session.floor + MAX_AHEAD:
            raise WireError(f"change {sequence} is more than {MAX_AHEAD} ahead of the client's floor {session.floor}")
        return session.outcomes.setdefault(sequence, Outcome.RUNNING)

    def settle(self, client: int, sequence: int, outcome: Outcome | FleetError) -> None:
        """Remember the answer to a change that has begun."""
        session = self._sessions.get(client)
        if session is not None and sequence in session.outcomes:
            session.outcomes[sequence] = outcome
