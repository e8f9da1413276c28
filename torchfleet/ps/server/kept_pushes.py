"""Pushes that are not applied on arrival: they are gathered into one update, or held to bound the staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from torchfleet.base.errors import FleetError, TableError, WireError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import DENSE_BACK, VERSIONS, Array
from torchfleet.ps.server.arrays import check_worker, checked_sections, column, push_sections
from torchfleet.ps.server.grouped_tables import AnySection, push_grouped
from torchfleet.ps.server.layers import Answer
from torchfleet.ps.server.sections import Section, mean_section
from torchfleet.ps.server.state.state import State
from torchfleet.ps.server.sync_step import new_dense_values

MAX_GATHERED = 1024
Checked = TypeVar("Checked", bound=AnySection)


def gather_push(state: State, request: Request, sections: Sequence[AnySection]) -> Answer | TableError:
    """Keep a checked push. Once the requested number of pushes is here, update the tables once with their mean. Returns
    the error if that fails: the pushes are gone then, so it is the outcome of a change, not a refusal.

    A push without sections triggers the update with the pushes received so far.
    """
    if not sections:
        return apply_gathered(state) or []
    num, _ = _settings(request, 2)
    if not 1 <= num <= MAX_GATHERED:
        raise WireError(f"a gathered update is the mean of 1 to {MAX_GATHERED} pushes, found {num}")
    if state.pushes.gathered:
        _check_alike(state.pushes.gathered[0], request)
    state.budgets.hold(request, waits=False)
    state.pushes.gathered.append(_own(request))
    error = apply_gathered(state) if len(state.pushes.gathered) >= num else None
    return error or answer(request, sections)


def apply_gathered(state: State) -> TableError | None:
    """Update the tables once with the mean of the gathered pushes, summed in the order of the workers. Returns the
    error if their mean cannot be applied, and drops them. Never raises, because the pushes are taken out in any case.

    Dense gradients beyond the maximum staleness are dropped. Sparse gradients are always used.
    """
    requests, state.pushes.gathered = sorted(state.pushes.gathered, key=lambda request: request.message.worker), []
    if not requests:
        return None
    _, max_staleness = _settings(requests[0], 2)
    by_table: dict[int, list[Section]] = {}
    for request in requests:
        kept = push_sections(state, request)
        fresh = _without_old(kept, max_staleness)
        state.pushes.num_dropped += len(fresh) < len(kept)
        for section in fresh:
            by_table.setdefault(section.table.spec.number, []).append(section)
    means = [mean_section(sections) for sections in by_table.values()]
    try:
        for mean in means:
            mean.check()
    except FleetError as error:
        state.say(f"{len(requests)} gathered pushes are dropped: {error}")
        return TableError(f"the gradients of {len(requests)} pushes cannot be applied together: {error}")
    for mean, sections in zip(means, by_table.values(), strict=True):
        for section in sections:
            section.note_staleness()
        replace(mean, pulled_at=None).apply()
    return None


def bounded_push(state: State, request: Request, sections: Sequence[AnySection]) -> Answer | None:
    """Hold a checked push while applying it would raise another worker's staleness above the limit.

    The reply comes when the push is applied. A push without sections says that this worker computes nothing now, so
    that no other push waits for it; its reply comes at once.
    """
    check_worker(state, request)
    if not sections:
        state.pushes.bound.release(request.message.worker)
        apply_waiting(state)
        return []
    (limit,) = _settings(request, 1)
    if limit < max(1, state.num_workers - 1):
        raise TableError(
            f"max_staleness={limit} is too small for {state.num_workers} workers: the last worker to push is already "
            f"{state.num_workers - 1} updates behind. Use at least {max(1, state.num_workers - 1)}."
        )
    state.budgets.hold(request)
    state.pushes.bound.arrive(request, limit)
    apply_waiting(state)
    return None


def apply_waiting(state: State) -> None:
    """Apply the held pushes that the bound now allows, and answer them."""
    for request in state.pushes.bound.ready():
        sections: Sequence[AnySection] = ()
        try:
            grouped = push_grouped(state.grouped, state.tables, request)
            sections = checked_sections(state, request, grouped)
            fresh = _without_old(sections, state.pushes.bound.limit)  # a worker that was given up may exceed the limit
        except FleetError as error:
            state.pushes.bound.release(request.message.worker)
            state.finish(request, error)
            continue
        state.pushes.num_dropped += len(fresh) < len(sections)
        for section in fresh:
            section.apply()
        state.pushes.bound.applied(request.message.worker)
        state.finish(request, answer(request, sections))


def answer(request: Request, sections: Sequence[AnySection]) -> Answer:
    """The reply to a push. Flag DENSE_BACK adds the new values of its dense tables, flag VERSIONS their steps."""
    flags = request.message.flags
    if not flags & DENSE_BACK:
        return []
    reply = new_dense_values(sections)
    if flags & VERSIONS:
        steps = [[section.table.step] for section in sections if section.table.spec.is_dense]
        reply.append(Array(0, np.array(steps, np.uint64).reshape(-1, 1)))
    return reply


def _without_old(sections: Sequence[Checked], max_staleness: int) -> list[Checked]:
    """The sections without dense gradients of a larger staleness. Late sparse gradients do no harm."""
    return [section for section in sections if not section.table.spec.is_dense or section.staleness() <= max_staleness]


def _settings(request: Request, num: int) -> list[int]:
    """The `num` settings in the last array of the push."""
    numbers = column(request.message.arrays[-1], np.uint64)
    if len(numbers) != num:
        raise WireError(f"expected {num} numbers behind the gradients, found {len(numbers)}")
    return [int(number) for number in numbers]


def _check_alike(first: Request, request: Request) -> None:
    if _settings(first, 2) != _settings(request, 2):
        raise WireError(
            f"gather and gather_max_age are {_settings(first, 2)} for other workers, and {_settings(request, 2)} for "
            "this one: use one strategy"
        )
    tables = [[array.number for array in message.arrays] for message in (first.message, request.message)]
    if tables[0] != tables[1]:
        raise TableError("the workers pushed different tables into one update: they must run the same model")


def _own(request: Request) -> Request:
    """A copy of the request with its own arrays. The sender gets its reply now and may reuse its memory."""
    arrays = [Array(array.number, array.data.copy()) for array in request.message.arrays]
    return replace(request, message=replace(request.message, arrays=arrays))
