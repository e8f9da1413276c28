"""Remembers which changes of each client have been applied, so that a repeated push is applied once.

A client numbers its changes to one server 1, 2, 3, ... Each message has a floor: all changes below it are settled. The
server keeps the outcome of every change from the floor on, and answers a repeat with it. If the server needs room, it
forgets clients whose worker has left, or that were silent for LEASE seconds. Without such clients it refuses new ones.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import Any

from torchfleet.base.errors import FleetError, ServerBusy, WireError
from torchfleet.ps.net.packed import error_of

MAX_CLIENTS = 1 << 16  # far more than a fleet has, far less than memory
MAX_AHEAD = 1 << 12  # a client's changes above its floor
MAX_OUTCOMES = 1 << 20  # of all clients
FAIR_SHARE = MAX_OUTCOMES // MAX_CLIENTS  # outcomes that a client may always have, whatever the others use
MAX_REASONS = 16  # the latest error texts of refused changes, kept per client
LEASE = 3600.0  # seconds; a client repeats a request for minutes
_ALL_SETTLED = 1 << 64  # a floor above every number
_HIGHEST = _ALL_SETTLED - 1  # stands for _ALL_SETTLED in `export`, where a number has 64 bits


class Outcome(Enum):
    RUNNING = "running"  # accepted; the reply comes later
    APPLIED = "applied"


REFUSED = FleetError("this change was refused before; the reason is not kept any longer")


@dataclass(slots=True)
class Session:
    worker: int
    incarnation: int  # of the worker's process
    heard: float
    floor: int = 1
    outcomes: dict[int, Outcome | FleetError] = field(default_factory=dict)
    reasons: list[int] = field(default_factory=list)  # changes whose error still has its text, oldest first

    @property
    def is_waiting(self) -> bool:
        """Whether a reply is still owed."""
        return Outcome.RUNNING in self.outcomes.values()


class Sessions:
    """Outcomes by client and sequence number; bounded."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, Session] = OrderedDict()  # the longest idle first
        self.num_outcomes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(
        self, client: int, sequence: int, floor: int, now: float = 0.0, worker: int = 0, incarnation: int = 0
    ) -> Outcome | FleetError:
        """Begin a change, and return its outcome so far: RUNNING if it is new or not answered yet.

        Raises ServerBusy, and records nothing, if there is no room for another client or change.
        """
        session = self._sessions.get(client)
        if session is None:
            self._make_room(now)
            session = self._sessions[client] = Session(worker, incarnation, now)
        if session.floor < _ALL_SETTLED:
            session.heard = now
            self._sessions.move_to_end(client)
        if floor > session.floor:
            session.floor = floor
            self._keep(session, {n: outcome for n, outcome in session.outcomes.items() if n >= floor})
        if sequence < session.floor:
            return Outcome.APPLIED  # settled long ago; the client no longer waits for the reply
        if sequence >= session.floor + MAX_AHEAD:
            raise WireError(f"change {sequence} is more than {MAX_AHEAD} ahead of the client's floor {session.floor}")
        if sequence not in session.outcomes:
            self._check_room(session)
            session.outcomes[sequence] = Outcome.RUNNING
            self.num_outcomes += 1
        return session.outcomes[sequence]

    def settle(self, client: int, sequence: int, outcome: Outcome | FleetError) -> None:
        """Remember the answer to a change that has begun."""
        session = self._sessions.get(client)
        if session is None or sequence not in session.outcomes:
            return
        is_new = session.outcomes[sequence] is Outcome.RUNNING
        session.outcomes[sequence] = outcome
        if isinstance(outcome, FleetError) and is_new:
            session.reasons.append(sequence)
            if len(session.reasons) > MAX_REASONS:
                forgotten = session.reasons.pop(0)
                if forgotten in session.outcomes:
                    session.outcomes[forgotten] = REFUSED

    def is_running(self, client: int, sequence: int) -> bool:
        """Whether this change was accepted and is not answered yet."""
        session = self._sessions.get(client)
        return session is not None and session.outcomes.get(sequence) is Outcome.RUNNING

    def retract(self, client: int, sequence: int) -> None:
        """Forget a change that has begun but is refused for now. A repeat counts as new."""
        del self._sessions[client].outcomes[sequence]
        self.num_outcomes -= 1

    def leave(self, worker: int, incarnation: int) -> None:
        """The worker's process has left. Later requests of its clients are late copies, and these clients are the first
        to be forgotten."""
        gone = [
            (client, session)
            for client, session in self._sessions.items()
            if session.worker == worker and session.incarnation == incarnation and not session.is_waiting
        ]
        for client, session in gone:
            self._end(session)
            self._sessions.move_to_end(client, last=False)

    def end_all(self) -> None:
        """All clients have left, as in `leave`. Changes that waited will not be made."""
        for session in self._sessions.values():
            self._end(session)

    def is_settled(self, client: int, sequence: int) -> bool:
        """Whether this change has been answered, so that a repeat of it changes nothing."""
        session = self._sessions.get(client)
        if session is None:
            return False
        return sequence < session.floor or session.outcomes.get(sequence, Outcome.RUNNING) is not Outcome.RUNNING

    def export(self) -> list[Any]:
        """The state as plain values, the longest idle client first."""
        return [
            [
                client, s.worker, s.incarnation, s.heard, min(s.floor, _HIGHEST), s.reasons,
                [[number, _packed(outcome)] for number, outcome in s.outcomes.items()],
            ]
            for client, s in self._sessions.items()
        ]  # fmt: skip

    def restore(self, kept: list[Any]) -> None:
        """Restore the state from the result of `export`."""
        self._sessions, self.num_outcomes = OrderedDict(), 0
        for client, worker, incarnation, heard, floor, reasons, outcomes in kept:
            session = self._sessions[client] = Session(worker, incarnation, heard, floor, reasons=list(reasons))
            session.floor = _ALL_SETTLED if floor == _HIGHEST else floor
            session.outcomes = {number: _unpacked(outcome) for number, outcome in outcomes}
            self.num_outcomes += len(outcomes)

    def _make_room(self, now: float) -> None:
        while len(self._sessions) >= MAX_CLIENTS:
            idle = takewhile(lambda known: now - known[1].heard >= LEASE, self._sessions.items())
            client = next((client for client, session in idle if not session.is_waiting), None)
            if client is None:
                longest = next(iter(self._sessions.values()))
                raise ServerBusy(
                    f"{MAX_CLIENTS:,} clients are known here, which is the limit; the one idle longest was heard of "
                    f"{now - longest.heard:.0f} s ago, and is forgotten after {LEASE:g} s, unless it waits for an "
                    "answer. Does something connect anew for every request?"
                )
            self._drop(client)

    def _check_room(self, session: Session) -> None:
        if self.num_outcomes >= MAX_OUTCOMES and len(session.outcomes) >= FAIR_SHARE:
            raise ServerBusy(
                f"{self.num_outcomes:,} changes of all clients are not settled, of which {len(session.outcomes):,} are "
                "this one's. Wait for answers before you push on."
            )

    def _keep(self, session: Session, outcomes: dict[int, Outcome | FleetError]) -> None:
        self.num_outcomes -= len(session.outcomes) - len(outcomes)
        session.outcomes = outcomes
        session.reasons = [sequence for sequence in session.reasons if sequence in outcomes]

    def _end(self, session: Session) -> None:
        session.floor, session.heard = _ALL_SETTLED, -LEASE
        self._keep(session, {})

    def _drop(self, client: int) -> None:
        self.num_outcomes -= len(self._sessions.pop(client).outcomes)


def _packed(outcome: Outcome | FleetError) -> str | list[str]:
    return outcome.value if isinstance(outcome, Outcome) else [type(outcome).__name__, str(outcome)]


def _unpacked(kept: Any) -> Outcome | FleetError:
    return Outcome(kept) if isinstance(kept, str) else error_of(kept[0], kept[1])
