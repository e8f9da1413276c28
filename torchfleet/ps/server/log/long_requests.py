"""Requests over whole tables that another server had begun: made anew here."""

from __future__ import annotations

from torchfleet.ps.net.wire import MAX_BODY, Command, unpack
from torchfleet.ps.server.arrays import only
from torchfleet.ps.server.long_work import ShrinkBody, chosen_tables, guarded, shrink_due, shrink_in_slices
from torchfleet.ps.server.state.state import LongRequest, State
from torchfleet.ps.server.table_saving import SaveBody, save_in_slices


def resume_long(state: State, token: int, long: LongRequest) -> None:
    """Remember it, and unless it is done put its work where the server does it. Raises FleetError if it is none."""
    state.long_requests[token] = long
    if long.result is not None:
        return
    request = long.request
    if request.message.command == Command.SAVE:
        work = save_in_slices(state, long, unpack(only(request), SaveBody, MAX_BODY))
    elif request.message.command == Command.SHRINK:
        chosen = chosen_tables(state, unpack(only(request), ShrinkBody, MAX_BODY))
        work = shrink_in_slices(state, long, chosen)
    else:
        work = shrink_due(state, long, long.due)
    long.work = guarded(state, long, work)
    state.long_work.append(long.work)
