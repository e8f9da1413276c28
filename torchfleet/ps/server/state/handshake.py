"""Compares the settings of a joining worker with the server's and other workers'. A refusal names the difference."""

from __future__ import annotations

from torchfleet import __version__
from torchfleet.base.errors import RoleError, ServerBusy, WireError
from torchfleet.base.printable import escaped
from torchfleet.ps.server.state.claims import Agreement, Claims, Value
from torchfleet.ps.server.state.state import State
from torchfleet.ps.tables.settings.spec import TableSpec, differences

_SHOWN = 500  # characters of what differs in a table


def check_claims(state: State, worker: int, num_workers: int, claims: Claims, now: float) -> None:
    """Raise RoleError for the first difference from this server, or from the present workers.

    Raises ServerBusy instead if all present workers have missed a sign of life: they may belong to an earlier run.
    """
    if not 0 <= claims.server < claims.num_servers:
        raise WireError(f"a server's number is below that of servers, found {claims.server} of {claims.num_servers}")
    _check_server(state, worker, claims)
    others = state.meetings.presence.others(worker, now)
    if state.meetings.agreement is None or others == "gone":
        return
    found = _difference(worker, num_workers, claims, state.meetings.agreement)
    if found and others == "quiet":
        raise ServerBusy(f"{found} No other worker has given a sign of life lately: asking again until they are lost.")
    if found:
        raise RoleError(found)


def agree(state: State, worker: int, num_workers: int, claims: Claims, now: float) -> None:
    """Keep the claims of the first worker. If all workers that agreed to them are gone, keep the next worker's."""
    if state.meetings.agreement is None or state.meetings.presence.others(worker, now) == "gone":
        state.meetings.agreement = Agreement(worker, num_workers, claims)


def _check_server(state: State, worker: int, claims: Claims) -> None:
    if claims.release != __version__:
        raise RoleError(
            f"worker {worker} has torchfleet {escaped(claims.release)}, and this server {__version__}: install the "
            "same release everywhere."
        )
    if state.meetings.place is not None:
        server, num_servers = state.meetings.place
        if claims.num_servers != num_servers:
            raise RoleError(
                f"worker {worker} has a list of {claims.num_servers} servers, and this server one of {num_servers}: "
                "give all processes the same FLEET_SERVER_ENDPOINTS / PADDLE_PSERVERS_IP_PORT_LIST."
            )
        if claims.server != server:
            raise RoleError(
                f"worker {worker} takes this server for server {claims.server}, and it is server {server}: give all "
                "processes the same FLEET_SERVER_ENDPOINTS / PADDLE_PSERVERS_IP_PORT_LIST, in the same order."
            )
    tables = {table.spec.name: table.spec for table in state.tables.values()}
    # A stand-alone server has the tables that its workers made; one that runs a script has those of its model.
    own = _unlike(claims.tables, tables, both=state.meetings.place is not None, has_moved=state.has_moved)
    if own:
        raise RoleError(_of_tables(worker, own, "this server has"))


def _difference(worker: int, num_workers: int, claims: Claims, agreed: Agreement) -> str:
    """The message for a worker whose claims differ from the agreement; "" if they do not."""
    first, other = agreed.claims, f"worker {agreed.worker} joined with"
    if num_workers != agreed.num_workers:
        return (
            f"worker {worker} has num_workers = {num_workers}, {other} {agreed.num_workers}: give all processes the "
            "same FLEET_NUM_WORKERS / PADDLE_TRAINERS_NUM."
        )
    for what, mine, theirs in (
        ("num_servers", claims.num_servers, first.num_servers),
        ("this server as number", claims.server, first.server),
    ):
        if mine != theirs:
            return (
                f"worker {worker} has {what} = {mine}, {other} {theirs}: give all processes the same "
                "FLEET_SERVER_ENDPOINTS / PADDLE_PSERVERS_IP_PORT_LIST, in the same order."
            )
    for field in (*claims.strategy, *(name for name in first.strategy if name not in claims.strategy)):
        own, agreed_on = claims.strategy.get(field), first.strategy.get(field)
        if own != agreed_on or type(own) is not type(agreed_on):
            return (
                f"worker {worker} has strategy.{escaped(field)} = {_text(own)}, {other} {_text(agreed_on)}: give all "
                "workers the same strategy."
            )
    found = _unlike(claims.tables, {spec.name: spec for spec in first.tables}, both=True)
    return _of_tables(worker, found, other) if found else ""


def _text(value: Value | None) -> str:
    if value is None:
        return "no value"
    return f"'{escaped(value)}'" if isinstance(value, str) else f"{value}"


def _unlike(
    specs: list[TableSpec], known: dict[str, TableSpec], both: bool, has_moved: bool = False
) -> tuple[str, str, str] | None:
    """The first table that differs: its name, the worker's description, the known one. `both`: also report a table that
    only one side has. `has_moved`: rows may lie elsewhere, or in more or less memory."""
    for spec in specs:
        there = known.get(spec.name)
        if there is None and both:
            return spec.name, "it", "none"
        if there is not None and not (there == spec or (has_moved and there.has_rows_of(spec))):
            old, new = differences(there, spec)
            return spec.name, escaped(new, _SHOWN), escaped(old, _SHOWN)
    missing = set(known) - {spec.name for spec in specs} if both else set()
    return (min(missing), "none", "it") if missing else None


def _of_tables(worker: int, found: tuple[str, str, str], other: str) -> str:
    name, mine, theirs = found
    return (
        f"table '{escaped(name)}': worker {worker} has {mine}, {other} {theirs}. All processes of a job must build the "
        "same model and optimizer; for others start the servers anew, or give the table another name."
    )
