"""Commands by which workers meet: joining, barriers, gathers, parcels, shared lists of files, leaving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from torchfleet.base.errors import RoleError, WireError, WorkerMissing
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import MAX_ARRAYS, MAX_BODY, Array, Role, pack, unpack
from torchfleet.ps.server.arrays import MAX_WORKERS, check_worker, only
from torchfleet.ps.server.exchange import forget_rounds
from torchfleet.ps.server.kept_pushes import apply_gathered, apply_waiting
from torchfleet.ps.server.layers import Answer
from torchfleet.ps.server.meeting.file_lists import MAX_LIST, FilesBody
from torchfleet.ps.server.meeting.gathering import GatherBody
from torchfleet.ps.server.meeting.mail import SendBody, TakeBody
from torchfleet.ps.server.meeting.presence import MAX_NAME, JoinBody, StartingBody
from torchfleet.ps.server.state.claims import MAX_CLAIMS, Claims
from torchfleet.ps.server.state.handshake import agree, check_claims
from torchfleet.ps.server.state.state import State
from torchfleet.ps.server.waiting import open_meetings

MAX_BARRIER_SECONDS = 7 * 24 * 3600.0
_PER_FILE = 150  # bytes that a list needs per file, in addition to the file's name


class BarrierBody(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    num_workers: int
    timeout: float


def join(state: State, request: Request) -> Answer:
    """Register a worker, or renew its registration. The reply says how far the job has got.

    Raises RoleError if the worker's settings of the job differ from those of this server or of other workers. A worker
    that the others have gone on without is refused, too.
    """
    arrays, worker = _bodies(request, 1, 2), request.message.worker
    body = unpack(arrays[0], JoinBody, MAX_BODY)
    if not all(0 < seconds <= MAX_BARRIER_SECONDS for seconds in (body.timeout, body.sync_timeout)):
        raise WireError(f"time-outs of a worker are above 0, up to {MAX_BARRIER_SECONDS:g} s; found {body}")
    if state.num_workers and (body.num_workers != state.num_workers or worker >= state.num_workers):
        raise RoleError(
            f"worker {worker} of {body.num_workers} came to a server that was started for {state.num_workers}. Give "
            "all servers and workers the same FLEET_NUM_WORKERS / PADDLE_TRAINERS_NUM (in code: worker_num)."
        )
    _check_rules(state, body)
    check_worker(state, request)
    members, incarnation = state.meetings.members, request.message.incarnation
    members.check(worker, incarnation)
    if members.has_left(worker, incarnation):  # a late copy
        return _told(state, worker)
    claims = unpack(arrays[1], Claims, MAX_CLAIMS) if len(arrays) == 2 else None
    if claims is not None and not state.is_following:  # a follower applies entries that the primary has checked
        check_claims(state, worker, body.num_workers, claims, request.arrived)
    before = state.meetings.presence.incarnation(worker)
    is_given_up = before is not None and members.is_out(worker, before)
    replaces = state.meetings.presence.join(worker, incarnation, body, request.arrived, is_given_up)
    if body.again:
        if body.finished and not body.ended and before == incarnation:
            _finish(state, worker)
        elif before == incarnation and not body.ended and members.come(worker):
            state.say(f"worker {worker} is back, from {body.host}, pid {body.pid}")
        return _told(state, worker)
    members.begin(worker, before != incarnation)
    again = f", started again ({members.num_restarts(worker)})" if members.num_restarts(worker) else ""
    state.say(f"worker {worker} has joined from {body.host}, pid {body.pid}{again}")
    if claims is not None:
        agree(state, worker, body.num_workers, claims, request.arrived)
    if before != incarnation:  # a new process, which may replace one that was killed
        _begin_anew(state, worker)
    if replaces:
        _drop_step(state, worker)
    _forget(state, worker)
    return _told(state, worker)


def starting(state: State, request: Request) -> Answer:
    """The launcher is starting these workers: the server stays, and those who wait for them go on waiting."""
    body = unpack(only(request), StartingBody, MAX_BODY)
    num_workers = state.num_workers or MAX_WORKERS
    if not 0 < body.seconds <= MAX_BARRIER_SECONDS:
        raise WireError(f"servers wait up to {MAX_BARRIER_SECONDS:g} s for a worker that starts; found {body.seconds}")
    if not all(0 <= worker < num_workers for worker in body.workers):
        raise WireError(f"there are {num_workers} workers, numbered from 0; found numbers {body.workers[:10]}")
    for worker in body.workers:
        if state.meetings.presence.expect(worker, body.seconds, request.arrived):
            state.say(f"worker {worker} is being started; the server waits for it")
    return []


def _finish(state: State, worker: int) -> None:
    """The worker makes no more steps: no step and no meeting waits for it."""
    if state.meetings.members.finish(worker):
        _forget(state, worker)
        open_meetings(state, worker)
        state.say(f"worker {worker} has made its last step")


def _begin_anew(state: State, worker: int) -> None:
    """Discard the waits of the worker's previous process, and the keys that it pulled in the current step."""
    state.meetings.barriers.forget(worker)
    state.meetings.gatherings.forget(worker)
    forget_rounds(state, worker)
    for table in state.tables.values():
        table.forget_waiting(worker)


def _check_rules(state: State, body: JoinBody) -> None:
    members = state.meetings.members
    own, told = (members.min_workers, members.on_loss), (body.min_workers, body.on_worker_loss)
    if state.num_workers and own != told:
        raise RoleError(
            f"this server was started with FLEET_MIN_WORKERS={own[0]} and FLEET_ON_WORKER_LOSS={own[1]}, and the "
            f"worker with {told[0]} and {told[1]}: give all servers and workers the same"
        )


def _told(state: State, worker: int) -> Answer:
    """The reply to JOIN. worker/client/requests.py defines its fields."""
    members = state.meetings.members
    restarts, present = members.num_restarts(worker), members.num_present(state.num_workers)
    return [pack({"step": state.pushes.num_steps, "restarts": restarts, "num_members": present})]


def barrier(state: State, request: Request) -> None:
    """Wait until all workers that have not left have arrived. The reply comes then, or with the time-out."""
    body = unpack(only(request), BarrierBody, MAX_BODY)
    if not 0 < body.timeout <= MAX_BARRIER_SECONDS or body.num_workers < 1:
        raise WireError(f"a barrier needs a timeout of up to {MAX_BARRIER_SECONDS:g} s and workers, found {body}")
    state.budgets.hold(request)
    for going in state.meetings.barriers.arrive(body.name, request, body.num_workers, body.timeout, request.arrived):
        state.finish(going, [])


def gather(state: State, request: Request) -> None:
    """Send the arrays of every worker to every worker. The reply comes when all workers have arrived."""
    body = unpack(_bodies(request, 2, 2)[0], GatherBody, MAX_BODY)
    if not 0 < body.timeout <= MAX_BARRIER_SECONDS or body.num_workers < 1 or body.first < 0:
        raise WireError(f"a gathering needs a timeout of up to {MAX_BARRIER_SECONDS:g} s and workers, found {body}")
    state.budgets.hold(request)
    for going, reply in state.meetings.gatherings.arrive(body, request):
        state.finish(going, reply)


def send(state: State, request: Request) -> Answer:
    """Keep a parcel for another worker. The reply is 1, or 0 if there was no room: the client must send it again."""
    check_worker(state, request)
    body = unpack(_bodies(request, 2)[0], SendBody, MAX_BODY)
    if not 0 <= body.to < (state.num_workers or MAX_WORKERS):
        raise WireError(f"no worker has number {body.to}")
    accepted = state.meetings.mail.send(request.message.worker, body, list(request.message.arrays[1:]))
    return [Array(0, np.array([accepted], np.uint64))]


def take(state: State, request: Request) -> Answer:
    """Return the parcels for this worker. Each is one array (its number, the count of its arrays), then its arrays."""
    check_worker(state, request)
    reply = []
    for number, parcel in state.meetings.mail.take(request.message.worker, unpack(only(request), TakeBody, MAX_BODY)):
        reply += [Array(0, np.array([number, len(parcel)], np.uint64)), *parcel]
    return reply


def files(state: State, request: Request) -> Answer:
    """Lease the next file of a list to this worker, and note which files the worker has finished."""
    check_worker(state, request)
    body = unpack(only(request), FilesBody, MAX_LIST)
    if not 0 < body.lease <= MAX_BARRIER_SECONDS:
        raise WireError(f"a lease is up to {MAX_BARRIER_SECONDS:g} seconds, found {body.lease}")
    message = request.message
    hold = state.budgets.take(request.peer, _PER_FILE * len(body.files) + request.num_bytes) if body.files else None
    return [pack(state.meetings.files.ask(message.client, message.worker, body, request.arrived, hold))]


def leave(state: State, request: Request) -> Answer:
    """The worker has finished. Other workers no longer wait for it. The server stops after the last worker left."""
    check_worker(state, request)
    worker = request.message.worker
    _check_leave(state, request)
    apply_gathered(state)
    is_news = worker not in state.meetings.members.left
    _forget(state, worker)
    joined = state.meetings.presence.incarnation(worker)
    if joined is not None:
        state.sessions.leave(worker, joined)
    state.meetings.presence.leave(worker)
    if is_news:
        state.meetings.members.leave(worker, joined or 0)
    open_meetings(state, worker)
    if is_news:
        of = f" of {state.num_workers}" if state.num_workers else ""
        state.say(f"worker {worker} has left ({len(state.meetings.members.left)}{of})")
    if state.meetings.members.is_over(state.num_workers):
        state.is_stopping = True
    return []


def _check_leave(state: State, request: Request) -> None:
    """Raise RoleError unless the sender is the process that joined, or a launcher. Leaving twice is allowed."""
    message = request.message
    joined = state.meetings.presence.incarnation(message.worker)
    if request.role == Role.LAUNCHER or message.worker in state.meetings.members.left or joined == message.incarnation:
        return
    where = "has not joined" if joined is None else "is another process"
    raise RoleError(
        f"LEAVE for worker {message.worker}, which {where}: only the process that has joined may leave, or a launcher "
        "in its name"
    )


def _drop_step(state: State, worker: int) -> None:
    """Remove the previous process's push from the current step. The step waits for a push of the new process."""
    old = state.pushes.step.pop(worker, None)
    if old is not None:
        state.finish(old, WorkerMissing(f"worker {worker} was started again while the push of this process waited"))


def _forget(state: State, worker: int) -> None:
    """The worker's pending push will not arrive. Apply the pushes that were held because of it."""
    held = state.pushes.bound.leave(worker)
    if held is not None:
        state.finish(held, WorkerMissing(f"worker {worker} has left, or was started again, while its push waited"))
    apply_waiting(state)


def _bodies(request: Request, at_least: int, at_most: int = MAX_ARRAYS) -> Sequence[Array]:
    if not at_least <= len(request.message.arrays) <= at_most:
        raise WireError(f"expected {at_least} to {at_most} arrays, found {len(request.message.arrays)}")
    return request.message.arrays
