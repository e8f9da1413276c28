"""Whether two servers are the same, in all that is promised."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.faults.history import expect
from support.faults.setting import contents

from torchfleet.ps.server.log.state_copy import StateBody, _body
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.rows.row_statistics import is_counted
from torchfleet.ps.tables.rowstore import RowStore

MAX_GAP = 1 << 16  # of floors: beyond it lies that of a worker that has left
# Not observable, or compared below.
_LEFT_OUT = ("tables", "sessions", "long_requests", "presence")


def check_same(name: str, found: Server, right: Server) -> None:
    """Raises Violation. What reads have changed is no promise: rows with their first values, floors of repeats."""
    ours, theirs = _body(found), _body(right)
    wrong = [
        field
        for field in ours.__struct_fields__
        if field not in _LEFT_OUT and repr(getattr(ours, field)) != repr(getattr(theirs, field))
    ]
    if not _have_same_sessions(ours, theirs):
        wrong.append("sessions")
    if _answers(ours) != _answers(theirs):
        wrong.append("long_requests")
    make_first_values(found, right)
    make_first_values(right, found)
    there, here = contents(right), contents(found)
    wrong += [table for table in there if here.get(table) != there[table]]
    expect(not wrong, lambda: f"{name}: a server that applied the same entries differs in {wrong}")


def _have_same_sessions(ours: StateBody, theirs: StateBody) -> bool:
    """Above the higher floor of both: a repeat of what is settled raises it without an entry."""
    left, right = ({session[0]: session for session in body.sessions} for body in (ours, theirs))
    if set(left) != set(right):
        return False
    for client, session in left.items():
        floor = max(session[4], right[client][4])
        outcomes = [{n: o for n, o in one[6] if n >= floor} for one in (session, right[client])]
        if outcomes[0] != outcomes[1]:
            return False
        if not all(_settles(one, floor) for one in (session, right[client])):
            return False
    return True


def _settles(session: Any, floor: int) -> bool:
    """Whether it knows of everything below the floor that it is not to be done again."""
    known = {number for number, outcome in session[6] if outcome != "running"}
    return floor - session[4] > MAX_GAP or all(number in known for number in range(session[4], floor))


def _answers(body: StateBody) -> dict[int, Any]:
    """The last one to ask is answered: which of a client's connections that is may differ."""
    return {token: repr(known[1] or known[1:]) for token, known in body.long_requests.items()}


def make_first_values(here: Server, there: Server) -> None:
    """A row's first value is a function of its key, so a pull of a plain table is no entry."""
    for number, table in there.state.tables.items():
        other = here.state.tables.get(number)
        if not isinstance(table, RowStore) or other is None or is_counted(table.spec):
            continue
        keys = [keys for keys, _, _ in table.chunks()]
        if keys:
            other.pull(np.concatenate(keys), True, None)
