"""Commands by which workers exchange the network's gradients through the servers: ENTER and EXCHANGE (hybrid mode)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from torchfleet.base.errors import TableError, WireError
from torchfleet.base.role.role_info import LOSS_END
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import MAX_BODY, pack, unpack
from torchfleet.ps.server.arrays import check_worker, floats
from torchfleet.ps.server.layers import Answer
from torchfleet.ps.server.meeting.rounds import MAX_BUCKETS, MAX_RATES, MAX_ROUND, MAX_SAMPLES, ExchangeBody
from torchfleet.ps.server.quorum_exchange import check_quorum, close_with_quorum, give_or_ask, missing_in_quorum
from torchfleet.ps.server.state.state import State

_SKIPPED = 2  # from the newest round to that of a new beginning: a lost worker may have used the number in between


class EnterBody(msgspec.Struct, forbid_unknown_fields=True):
    number: int  # counts the requests of the worker's process: a repeat gets the same answer; 0: it does not enter
    made: int = 0  # > 0: the request brings the network as it is after this round, for workers that enter later


def exchange(state: State, request: Request) -> Answer | None:
    """Keep a worker's part of a round. The mean of all parts is the reply to every worker, once all have come."""
    arrays = request.message.arrays
    check_worker(state, request)
    if len(arrays) not in (1, 2):
        raise WireError(f"expected a body and gradients, found {len(arrays)} arrays")
    body = unpack(arrays[0], ExchangeBody, MAX_BODY)
    _check(body, request)
    rounds = state.meetings.rounds
    if not body.again:
        floats(arrays[1])
    if body.quorum:
        answer = give_or_ask(state, body, request)
        close_rounds(state)
        return answer
    if body.again:
        return rounds.again(body)
    state.budgets.hold(request, waits=False)  # kept beyond its answer, until the next round is made
    answer = rounds.arrive(body, request)
    if answer is not None:
        return answer
    state.meetings.presence.hear(request.message.worker, request.arrived)
    state.meetings.members.come(request.message.worker)
    _make_if_complete(state, body.bucket)
    return None


def enter(state: State, request: Request) -> Answer | None:
    """Take part in rounds from the next one on. The reply says which that is, and which workers have the network.

    With number 0: leave a copy of the network here, if the request brings one, and else take the one that was left.
    """
    check_worker(state, request)
    arrays, entrance = request.message.arrays, state.meetings.entrance
    if not arrays:
        raise WireError("expected a body, found no array")
    body = unpack(arrays[0], EnterBody, MAX_BODY)
    if body.number < 0 or body.made < 0 or bool(body.made) != (len(arrays) > 1) or (body.made and body.number):
        raise WireError(
            f"expected a body, and a copy of the network with `made`; found {body} and {len(arrays)} arrays"
        )
    if body.made:
        hold = state.budgets.take(request.peer, request.num_bytes)
        entrance.leave_copy(body.made, list(arrays[1:]), hold)
        close_rounds(state)
        return []
    if not body.number:
        return [pack({"round": entrance.left_after if entrance.left else 0}), *entrance.left]
    if not state.num_workers:
        raise TableError("this server was not told the number of workers, so it cannot begin rounds: use num_workers")
    state.budgets.hold(request)
    answer = entrance.arrive(body.number, request)
    if answer is not None:
        return answer
    state.meetings.members.come(request.message.worker)
    close_rounds(state)
    return None


def close_rounds(state: State) -> None:
    """Make the rounds that wait for no worker anymore. If all workers that took part are gone, start those at the
    entrance."""
    for bucket in sorted(state.meetings.rounds.open):
        _make_if_complete(state, bucket)
    close_with_quorum(state)
    _begin_if_complete(state)


def forget_rounds(state: State, worker: int) -> None:
    """The worker's process was replaced: its parts of open rounds no longer count."""
    state.meetings.rounds.forget(worker)
    state.meetings.quorum.forget(worker)
    state.meetings.entrance.forget(worker)
    close_rounds(state)


def missing_in_rounds(state: State) -> set[int]:
    """The workers that other workers wait for in rounds, or before the first one."""
    meetings = state.meetings
    found = {worker for b in meetings.rounds.open for worker in meetings.rounds.missing(b, meetings.members.absent)}
    found |= missing_in_quorum(state)
    return found | (_missing_at_entrance(state) if meetings.entrance.waiting else set())


def end_rounds(state: State) -> list[Request]:
    """Drop all open rounds. Returns the requests that wait in them and at the entrance."""
    meetings = state.meetings
    return [*meetings.rounds.end_all(), *meetings.quorum.end_all(), *meetings.entrance.end_all()]


def waiting_in_rounds(state: State) -> list[Request]:
    """The requests that wait for a round to be made."""
    return [*state.meetings.rounds.waiting(), *state.meetings.quorum.requests()]


def _make_if_complete(state: State, bucket: int) -> None:
    meetings = state.meetings
    present = meetings.rounds.open[bucket]
    if not present.workers or meetings.rounds.missing(bucket, meetings.members.absent):
        return
    for worker in sorted(present.counted.difference(present.given).intersection(meetings.members.lost)):
        incarnation = meetings.presence.incarnation(worker)
        if incarnation is not None:
            meetings.members.count_out(worker, incarnation, present.number)
    told: dict[str, Any] = {}
    if bucket == 0:
        bodies = {worker: present.bodies[worker] for worker in present.workers}
        told["told"] = {w: [body.samples, body.seconds, body.is_last, body.rates] for w, body in bodies.items()}
        leaving = _leaving(state, bodies)
        if leaving:
            told["leaving"] = sorted(leaving)
        with_samples = [worker for worker, body in bodies.items() if body.samples != 0]
        told["entering"] = meetings.entrance.admit(present.workers, leaving, holders=with_samples or None)
    for request, answer in meetings.rounds.make(bucket, told):
        state.finish(request, answer)
    if bucket == 0:
        holders = sorted(set(present.workers) - leaving)
        following = {"round": present.number + 1, "workers": sorted(meetings.entrance.members), "holders": holders}
        for request, answer in meetings.entrance.answer(told["entering"], following):
            state.finish(request, answer)


def _leaving(state: State, bodies: Mapping[int, ExchangeBody]) -> set[int]:
    """The workers that take no part in the next round: those without a further batch.

    If the last batches of all workers of the job are in one round, none leaves: they begin their next loop together.
    """
    ended = {worker for worker, body in bodies.items() if body.is_last}
    members = state.meetings.members
    is_together = members.on_loss == LOSS_END and ended >= members.expected(state.num_workers)
    return set() if is_together and all(body.samples != 0 for body in bodies.values()) else ended


def _begin_if_complete(state: State) -> None:
    """Let the workers at the entrance begin together, if no other worker takes part and no expected one is missing."""
    meetings, entrance = state.meetings, state.meetings.entrance
    if not entrance.waiting or entrance.members - meetings.members.absent or _missing_at_entrance(state):
        return
    number = meetings.rounds.newest + _SKIPPED
    founders, holders = entrance.begin()
    told = {"round": number, "workers": founders, "holders": holders}
    for request, answer in entrance.answer(founders, told):
        state.finish(request, answer)


def _missing_at_entrance(state: State) -> set[int]:
    """The workers that those at the entrance wait for before they begin."""
    members, entrance, presence = state.meetings.members, state.meetings.entrance, state.meetings.presence
    if entrance.members - members.absent:  # workers that take part now will admit them
        return set()
    expected = members.expected(state.num_workers)
    is_together = members.on_loss == LOSS_END and not state.meetings.quorum.is_on
    if is_together or (not state.meetings.rounds.newest and not members.is_elastic):
        return expected - set(entrance.waiting)
    if not state.meetings.rounds.newest:
        lacks = len(entrance.waiting) < min(members.min_workers, len(expected))
        return expected - set(entrance.waiting) if lacks else set()
    if entrance.left or entrance.holders.intersection(entrance.waiting):
        return set()
    return {worker for worker in entrance.holders - members.absent if presence.incarnation(worker) is not None}


def _check(body: ExchangeBody, request: Request) -> None:
    """Raise WireError if a number is out of its range, or the arrays do not fit."""
    check_quorum(body)
    is_known = 1 <= body.round <= MAX_ROUND and 0 <= body.bucket < MAX_BUCKETS
    are_numbers = all(math.isfinite(rate) for rate in body.rates) and len(body.rates) <= MAX_RATES
    samples = 0.0 if body.samples is None else body.samples
    if not (is_known and are_numbers and 0 <= samples <= MAX_SAMPLES and 0 <= body.seconds < math.inf):
        raise WireError(
            f"a part of a round has a number from 1 to {MAX_ROUND}, a bucket below {MAX_BUCKETS}, samples up to "
            f"{MAX_SAMPLES:g}, seconds and at most {MAX_RATES} finite rates; found {body!r:.300}"
        )
    if len(request.message.arrays) != (1 if body.again else 2):
        raise WireError(
            "EXCHANGE has a body and gradients (2 arrays), or with `again` only a body (1 array); found "
            f"{len(request.message.arrays)} arrays"
        )
    if not body.again and request.message.worker not in body.workers:
        raise WireError(f"worker {request.message.worker} counts only {body.workers} in its round, and not itself")
