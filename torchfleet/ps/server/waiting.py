"""Ends waits of workers for each other that cannot succeed. The waiting workers get an error with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from torchfleet.base.errors import FleetError, WorkerMissing
from torchfleet.ps.net.request import Request
from torchfleet.ps.server.exchange import close_rounds, end_rounds, missing_in_rounds, waiting_in_rounds
from torchfleet.ps.server.kept_pushes import apply_waiting
from torchfleet.ps.server.meeting.barrier import NONE_LOST
from torchfleet.ps.server.state.state import State
from torchfleet.ps.server.sync_step import close_sync_step

_STEP = "optimizer.step()"
_BOUNDED_STEP = f"{_STEP}, which max_staleness holds up"
_ROUND = "loss.backward(), for the others' gradients"
_ENTRANCE = "model(...), for the others' network"


def end_hopeless_waits(state: State, now: float) -> bool:
    """Answer the requests that have timed out, that wait for a lost worker, or that wait in a deadlock. Returns whether
    anything changed."""
    meetings, num_finished = state.meetings, len(state.finished)
    lost, is_any_released = meetings.presence.lost(now), False
    for worker in lost:
        is_any_released |= state.pushes.bound.release(worker)
    apply_waiting(state)
    if meetings.members.go_on:
        is_any_released |= _go_on_without(state, lost)
    hopeless = NONE_LOST if meetings.members.go_on or meetings.members.wait else meetings.presence.given_up(now)
    ended = (
        *meetings.barriers.expired(now, hopeless),
        *meetings.gatherings.expired(now, hopeless),
        *_expired_step(state, now, lost),
        *_expired_bound(state, now),
        *_expired_rounds(state, now, lost),
    )
    for request, error in ended or _circle(state):
        state.finish(request, error)
    return is_any_released or len(state.finished) > num_finished


def open_meetings(state: State, worker: int) -> None:
    """Stop waiting for the worker. Barriers, gathers and steps that lacked only this worker finish, and its files go to
    other workers."""
    for going in state.meetings.barriers.leave(worker):
        state.finish(going, [])
    for going, reply in state.meetings.gatherings.leave(worker):
        state.finish(going, reply)
    state.meetings.files.leave(worker)
    close_sync_step(state)
    close_rounds(state)


def _go_on_without(state: State, lost: Mapping[int, str]) -> bool:
    """Stop waiting for lost workers. Returns whether there are any.

    If all workers are silent, the server decides nothing: it may itself be cut off from the network.
    """
    members = state.meetings.members
    fresh = [worker for worker in sorted(lost) if worker not in members.absent]
    if not fresh or state.meetings.presence.is_all(lost):
        return False
    for worker in fresh:
        members.lose(worker, lost[worker])
        state.say(f"{lost[worker]}; the others go on without it")
    for worker in fresh:
        open_meetings(state, worker)
    return True


def _expired_step(state: State, now: float, lost: Mapping[int, str]) -> list[tuple[Request, FleetError]]:
    waiting = state.pushes.step
    if not waiting:
        return []
    missing = state.meetings.members.expected(state.num_workers) - set(waiting)
    what = f"{_STEP} waits for it, and sync training"
    text = _why_hopeless(state, now, list(waiting.values()), missing, lost, what, _STEP)
    if not text:
        return []
    state.pushes.step = {}
    return [(request, WorkerMissing(text)) for request in waiting.values()]


def _expired_rounds(state: State, now: float, lost: Mapping[int, str]) -> list[tuple[Request, FleetError]]:
    in_rounds, at_entrance = waiting_in_rounds(state), list(state.meetings.entrance.waiting.values())
    waiting = [*in_rounds, *at_entrance]
    if not waiting:
        return []
    missing = missing_in_rounds(state)
    if not missing:  # those at the entrance wait for the end of a round
        return []
    places = "; ".join([_ROUND] * bool(in_rounds) + [_ENTRANCE] * bool(at_entrance))
    text = _why_hopeless(state, now, waiting, missing, lost, "the exchange of gradients waits for it, and", places)
    return [(request, WorkerMissing(text)) for request in end_rounds(state)] if text else []


def _why_hopeless(
    state: State, now: float, waiting: list[Request], missing: set[int], lost: Mapping[int, str], what: str, place: str
) -> str:
    """Why these requests wait for the workers `missing` in vain; "" if they do not. `what`: what waits and cannot go on
    without them. `place`: where in the script the others wait."""
    timeout, members = state.meetings.presence.sync_timeout(), state.meetings.members
    gone = [text for worker, text in lost.items() if worker in missing]
    if gone and not members.go_on and not members.wait:
        return f"{'; '.join(gone)}: {what} cannot go on without it. Look at its log."
    if timeout is None or now < min(request.arrived for request in waiting) + timeout:
        return ""
    names = ", ".join(map(str, sorted(missing)))
    return (
        f"after {timeout:g} s worker {names} of {state.num_workers} is still missing where others wait: {place}"
        f"{''.join(f'; {text}' for text in gone)}. Look at their logs; if they are only slow, give a longer "
        "sync_timeout."
    )


def _expired_bound(state: State, now: float) -> list[tuple[Request, FleetError]]:
    waiting = state.pushes.bound.waiting()
    if not waiting:
        return []
    timeout = state.meetings.presence.sync_timeout()
    if timeout is None or now < min(request.arrived for request in waiting) + timeout:
        return []
    names = ", ".join(map(str, state.pushes.bound.slow()))
    error = WorkerMissing(
        f"after {timeout:g} s {_STEP} still waits for worker {names}, which no other worker may leave further behind "
        f"(max_staleness={state.pushes.bound.limit}). Look at its log; if it is only slow, give a longer sync_timeout."
    )
    return [(request, error) for request in state.pushes.bound.end_waits()]


def _circle(state: State) -> list[tuple[Request, FleetError]]:
    """The requests to end because of a deadlock: every worker waits, and not all in the same place."""
    if not state.num_workers:
        return []
    places = _places(state)
    if len(set(places.values())) < 2:
        return []
    if state.meetings.members.expected(state.num_workers) - set(places):
        return []
    where = "; ".join(f"worker {worker} waits in {place}" for worker, place in sorted(places.items()))
    error = WorkerMissing(
        f"the workers wait for each other: {where}. In sync and hybrid training all workers make the same number of "
        "steps: give them equally many batches or (hybrid) loop over fleet.prefetch(loader), and call barriers and "
        "gathers at the same point of the loop on all of them."
    )
    waiting, state.pushes.step = state.pushes.step, {}
    return [
        *((request, error) for request in waiting.values()),
        *((request, error) for request in state.pushes.bound.end_waits()),
        *state.meetings.barriers.end_all(error),
        *state.meetings.gatherings.end_all(error),
        *((request, error) for request in end_rounds(state)),
    ]


def _places(state: State) -> dict[int, str]:
    """The place where each waiting worker waits."""
    places = dict.fromkeys(state.pushes.step, _STEP)
    places |= {request.message.worker: _BOUNDED_STEP for request in state.pushes.bound.waiting()}
    for name, worker in state.meetings.barriers.waiting():
        places[worker] = f"barrier '{name}'"
    for name, worker in state.meetings.gatherings.waiting():
        places[worker] = f"gather '{name}'"
    for request in waiting_in_rounds(state):
        places[request.message.worker] = _ROUND
    for worker in state.meetings.entrance.waiting:
        places[worker] = _ENTRANCE
    return places
