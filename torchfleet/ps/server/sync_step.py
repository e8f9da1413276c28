"""A step of synchronous training: pushes are kept until all workers' are here, then one update with their mean."""

from __future__ import annotations

from torchfleet.base.errors import FleetError, TableError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import DENSE_BACK, Array
from torchfleet.ps.server.arrays import check_worker, push_sections
from torchfleet.ps.server.sections import Section, mean_section
from torchfleet.ps.server.state.state import Answer, State


def keep_for_step(state: State, request: Request) -> None:
    """Keep a worker's gradients until all workers' are here; whoever waits is answered by `close_sync_step`."""
    check_worker(state, request)
    if not state.num_workers:
        raise TableError("this server was not told the number of workers, so it cannot wait for all: use num_workers")
    state.budgets.hold(request)
    repeated = state.sync_step.get(request.message.worker)
    if repeated is not None:
        request.arrived = repeated.arrived  # a repeat has waited as long as the first
    state.sync_step[request.message.worker] = request
    state.presence.hear(request.message.worker, request.arrived)
    state.members.come(request.message.worker)
    close_sync_step(state)


def close_sync_step(state: State) -> None:
    """If no worker is missing: one update with the mean gradient, summed in the order of the workers."""
    expected = state.members.expected(state.num_workers)
    if not state.sync_step or expected - set(state.sync_step):
        return
    requests = [state.sync_step[worker] for worker in sorted(state.sync_step)]
    _count_out(state)
    state.sync_step, state.num_steps = {}, state.num_steps + 1
    per_worker = [list(push_sections(state, request)) for request in requests]
    try:
        pushed = [sections for sections in per_worker if sections]  # who sends none has no part in the step
        merged = [mean_section(list(same_table)) for same_table in zip(*pushed, strict=True)]
        for table in state.tables.values():
            table.admit_waiting()
        for section in merged:
            section.check()
        for section in merged:
            section.apply()
    except (FleetError, ValueError) as error:
        text = f"the workers' gradients of this step cannot be put together: {error}"
        for request in requests:
            state.finish(request, TableError(text))
        return
    for request, sections in zip(requests, per_worker, strict=True):
        state.finish(request, new_dense_values(sections) if request.message.flags & DENSE_BACK else [])


def _count_out(state: State) -> None:
    """Workers that are lost, and have no part in this step, have none in later ones until they are started again."""
    for worker in sorted(set(state.members.lost) - set(state.sync_step)):
        incarnation = state.presence.incarnation(worker)
        if incarnation is not None:
            state.members.count_out(worker, incarnation, state.num_steps)


def new_dense_values(sections: list[Section]) -> Answer:
    """The values of all sections' dense tables, after the push."""
    wholes = [(section.table.spec.number, section.table.whole()) for section in sections]
    return [Array(number, values) for number, values in wholes if values is not None]
