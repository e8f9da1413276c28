"""A step of synchronous training: the server keeps pushes until all workers have pushed, then applies their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchfleet.base.errors import FleetError, TableError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import DENSE_BACK, Array
from torchfleet.ps.server.arrays import check_worker, push_sections
from torchfleet.ps.server.grouped_tables import AnySection
from torchfleet.ps.server.sections import Section, mean_section
from torchfleet.ps.server.state.state import State


def keep_for_step(state: State, request: Request, sections: Sequence[AnySection]) -> None:
    """Keep a worker's checked gradients until all workers have pushed. The last push makes the step, and all requests
    of the step are answered then."""
    check_worker(state, request)
    if not state.num_workers:
        raise TableError("this server was not told the number of workers, so it cannot wait for all: use num_workers")
    worker, step, meetings = request.message.worker, state.pushes.step, state.meetings
    missing = meetings.members.expected(state.num_workers).difference(step, (worker,))
    if missing:
        state.budgets.hold(request)
    if worker in step:
        request.arrived = step[worker].arrived  # the time-out of a repeat counts from the first copy
    step[worker] = request
    meetings.presence.hear(worker, request.arrived)
    meetings.members.come(worker)
    if not missing:
        _make_step(state, {worker: sections})


def close_sync_step(state: State) -> None:
    """Make the step if no worker is missing anymore."""
    step = state.pushes.step
    if step and not state.meetings.members.expected(state.num_workers).difference(step):
        _make_step(state, {})


def _make_step(state: State, checked: Mapping[int, Sequence[AnySection]]) -> None:
    """Update the tables once with the mean gradient, summed in the order of the workers, and answer all requests.

    `checked`: sections that were just checked, by worker.
    """
    step = state.pushes.step
    _count_out(state)
    state.pushes.step, state.pushes.num_steps = {}, state.pushes.num_steps + 1
    per_worker = [checked[w] if w in checked else push_sections(state, step[w]) for w in sorted(step)]
    try:
        merged: Sequence[AnySection] = (
            per_worker[0] if state.num_workers == 1 and checked else _merged(state, per_worker)
        )
        for section in merged:
            section.apply()
    except (FleetError, ValueError) as error:
        text = f"the workers' gradients of this step cannot be put together: {error}"
        for worker in sorted(step):
            state.finish(step[worker], TableError(text))
        return
    for worker, sections in zip(sorted(step), per_worker, strict=True):
        is_asked = step[worker].message.flags & DENSE_BACK
        state.finish(step[worker], new_dense_values(sections) if is_asked else [])


def _merged(state: State, per_worker: Sequence[Sequence[AnySection]]) -> list[Section]:
    """One checked section per table, with the mean of all workers' gradients."""
    apart = [[section for section in sections if isinstance(section, Section)] for sections in per_worker]
    pushed = [sections for sections in apart if sections]  # a worker without sections does not count in the mean
    merged = [mean_section(list(same_table)) for same_table in zip(*pushed, strict=True)]
    for table in state.tables.values():
        table.admit_waiting()
    for section in merged:
        section.check()
    return merged


def _count_out(state: State) -> None:
    """Exclude lost workers that did not push in this step from later steps, until they are started again."""
    for worker in sorted(set(state.meetings.members.lost) - set(state.pushes.step)):
        incarnation = state.meetings.presence.incarnation(worker)
        if incarnation is not None:
            state.meetings.members.count_out(worker, incarnation, state.pushes.num_steps)


def new_dense_values(sections: Sequence[AnySection]) -> list[Array]:
    """The values of the sections' dense tables after the push."""
    reply = []
    for section in sections:
        values = section.table.whole()
        if values is not None:
            reply.append(Array(section.table.spec.number, values))
    return reply
