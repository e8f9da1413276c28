"""EXCHANGE in jobs with a quorum: gradients are kept, server 0 decides on rounds, and workers ask for means."""

from __future__ import annotations

from typing import Any

from torchfleet.base.errors import WireError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import MAX_BODY, unpack
from torchfleet.ps.server.arrays import MAX_WORKERS
from torchfleet.ps.server.layers import Answer
from torchfleet.ps.server.meeting.rounds import ExchangeBody
from torchfleet.ps.server.state.state import State

MAX_AGE = 1 << 20  # rounds
MAX_PARTS = 2 * MAX_WORKERS


def check_quorum(body: ExchangeBody) -> None:
    """Raise WireError if a number is out of its range."""
    is_in_range = 0 <= body.quorum <= MAX_WORKERS and 0 <= body.max_age <= MAX_AGE and len(body.parts) <= MAX_PARTS
    if not is_in_range or (body.decides and body.bucket):
        raise WireError(
            f"expected quorum 0 to {MAX_WORKERS:,}, max_age 0 to {MAX_AGE:,}, at most {MAX_PARTS:,} parts, and "
            f"`decides` with bucket 0 only; found {body!r:.300}"
        )


def give_or_ask(state: State, body: ExchangeBody, request: Request) -> Answer | None:
    """Keep a worker's gradients, or answer with a mean. None: the answer follows when a round is made."""
    quorum, entrance = state.meetings.quorum, state.meetings.entrance
    if body.again:
        kept = quorum.buckets.get(body.bucket)
        if kept is None:
            raise WireError(f"a worker asks for a mean of bucket {body.bucket}, of which no gradients were given")
        if body.bucket == 0 and 0 < quorum.number <= body.round:
            raise WireError(f"a worker asks for the mean of round {body.round}, which is not made yet")
        if body.decides:
            quorum.take_out(body.round, body.parts)
        return kept.ask(body, request)
    quorum.check(body, request)
    state.budgets.hold(request, waits=False)  # gradients are kept until a round uses them, or they are too old
    state.meetings.presence.hear(request.message.worker, request.arrived)
    state.meetings.members.come(request.message.worker)
    state.meetings.rounds.newest = max(state.meetings.rounds.newest, body.round)
    if body.decides:
        return quorum.arrive(body, request, entrance.members)
    quorum.keep(body, request)
    return []


def close_with_quorum(state: State) -> None:
    """Make the rounds and the means that wait for no worker anymore."""
    meetings = state.meetings
    if meetings.quorum.is_due(meetings.entrance.members - meetings.members.absent):
        _make(state)
    for bucket in sorted(meetings.quorum.buckets):
        kept = meetings.quorum.buckets[bucket]
        if kept.asked is not None and not kept.missing(meetings.presence.incarnation, meetings.members.absent):
            for request, answer in kept.make_asked(meetings.quorum.max_age):
                state.finish(request, answer)


def missing_in_quorum(state: State) -> set[int]:
    """The workers that others wait for in rounds with a quorum."""
    meetings, found = state.meetings, set()
    for kept in meetings.quorum.buckets.values():
        found |= kept.missing(meetings.presence.incarnation, meetings.members.absent)
    if meetings.quorum.waiting:
        found |= meetings.entrance.members - meetings.members.absent - set(meetings.quorum.waiting)
    return found


def _make(state: State) -> None:
    """Make the open round, answer its workers, and admit the workers at the entrance."""
    members, quorum, entrance = state.meetings.members, state.meetings.quorum, state.meetings.entrance
    number, on_time = quorum.number, sorted(quorum.waiting)
    for worker in sorted(entrance.members.intersection(members.lost).difference(on_time)):
        incarnation = state.meetings.presence.incarnation(worker)
        if incarnation is not None:
            members.count_out(worker, incarnation, number)
    bodies = {w: unpack(quorum.waiting[w].message.arrays[0], ExchangeBody, MAX_BODY) for w in on_time}
    leaving = {worker for worker, body in bodies.items() if body.is_last}
    staying = [worker for worker in on_time if worker not in leaving]
    holders = [worker for worker in on_time if bodies[worker].samples != 0] or on_time
    entering = entrance.admit(on_time, leaving, quorum.behind(entrance.members - members.absent), holders)
    told: dict[str, Any] = {
        "round": number,
        "told": {w: [body.samples, body.seconds, body.is_last, body.rates] for w, body in bodies.items()},
        "entering": entering,
        "members": sorted(entrance.members),
    }
    if staying:  # in turn, so that no worker sends the network more often than others
        told["sender"] = staying[number % len(staying)]
    if not entrance.members:
        told["leaver"] = holders[0]
    for request, answer in quorum.make(told, entering):
        state.finish(request, answer)
    following = {"round": number + 1, "workers": sorted(entrance.members), "holders": staying}
    for request, answer in entrance.answer(entering, following):
        state.finish(request, answer)
