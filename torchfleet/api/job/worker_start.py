"""The start of a worker, before its first step: wait for servers, create the tables, set initial values."""

from __future__ import annotations

import functools
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchfleet.base.errors import FleetError, ServerUnreachable
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.storage import Storage
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.server.job.given_tables import NO_TABLES
from torchfleet.ps.server.replicas.pace import NO_BACKUP
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.optimizer_state import GivenState
from torchfleet.ps.worker.row_state.table_rows import slices

RECOVERY_TIMEOUT = 600.0  # seconds that a server with a log may be away: after a restart it reads the whole log
RESEND_PAUSE = 5.0  # seconds between two attempts to reach such a server
PERIOD = 5.0  # seconds before the first message about a wait, and at least between two
_LONGEST = 60.0  # seconds between two messages of the same text
_GROWTH = 2  # growth of the time between two messages of the same text
_PAUSE = 0.1  # seconds between two requests to a loading server, or about workers
_MOST_NAMED = 20  # workers or servers in one message
_HOST = re.compile(r"tcp://(?:\[([^\]]*)\]|([^:|)]*)):")
_NO_VALUES = "worker 0 has not set the first values; look at its log"


def patience_with(strategy: DistributedStrategy, info: RoleInfo) -> Patience:
    """How long this process waits for a server. With a log, long enough for a restart of the server."""
    if info.durability == "none":
        return Patience(strategy.rpc_timeout, strategy.rpc_retry_times)
    return Patience(max(strategy.rpc_timeout, RECOVERY_TIMEOUT), strategy.rpc_retry_times, RESEND_PAUSE)


def wait_for_servers(
    client: Client, seconds: float, give_tables: Callable[[Collection[str]], None] | None = None
) -> None:
    """Wait until all servers serve. Prints the servers that are still starting or loading. `give_tables`, on worker 0:
    describes the tables to the servers of these names, which were started without a script.

    Raises ServerUnreachable, which names the servers, if servers did not respond for `seconds`. A loading server
    responds. Raises FleetError if a server has waited for its backup for as long.
    """
    started = time.monotonic()
    heard: dict[str, float] = {}  # by server, the time of its last response
    backups = BackupsMissing(seconds)
    lines = WaitingLines()
    while waiting := client.unready(min(PERIOD, seconds)):
        now = time.monotonic()
        heard |= {name: now for name, doing in waiting.items() if doing}
        silent = [name for name in waiting if now - heard.get(name, started) >= seconds]
        if silent:
            raise ServerUnreachable(_never_came(silent, seconds))
        lacking = [name for name, doing in waiting.items() if doing == NO_TABLES]
        if lacking and give_tables is not None:
            give_tables(lacking)
        backups.look([name for name, doing in waiting.items() if doing == NO_BACKUP], now)
        lines.look(functools.partial(_by_state, waiting))
        time.sleep(_PAUSE)


def wait_for_backups(client: Client, info: RoleInfo) -> None:
    """Wait, before the first step, until every server has its backup: a backup may have been lost since the servers let
    this worker in. A restarted worker and workers of an elastic job do not wait. Raises FleetError as wait_for_servers.
    """
    if not info.waits_for_backups or info.restart or info.is_elastic:
        return
    backups, lines = BackupsMissing(info.start_timeout), WaitingLines()
    while missing := [n for n, server in enumerate(client.stats()) if server.get("has_backup") is False]:
        names = [f"server {number}" for number in missing]
        backups.look(names, time.monotonic())
        lines.look(functools.partial(_by_state, dict.fromkeys(names, NO_BACKUP)))
        time.sleep(_PAUSE)


class BackupsMissing:
    """Ends a wait for backups that takes too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[str, float] = {}

    def look(self, names: Sequence[str], now: float) -> None:
        """Raise FleetError if one of the servers `names`, which have no backup, was among them for too long."""
        self._since = {name: self._since.get(name, now) for name in names}
        late = [name for name, since in self._since.items() if now - since >= self._seconds]
        if late:
            raise FleetError(
                f"{_named_in_short(late)}: no backup for {self._seconds:g} s (FLEET_START_TIMEOUT). Expected a second "
                "process of each server, replica 1, which follows the first: look at its log (serverlog.N.replica1). "
                "To begin without backups: --no_wait_for_backups (FLEET_WAIT_FOR_BACKUPS=0)."
            )


def _by_state(waiting: Mapping[str, str]) -> list[str]:
    """One text for all servers in the same state. Addresses are given for servers that do not respond."""
    found: dict[str, list[str]] = {}
    for name, doing in waiting.items():
        found.setdefault(doing or _why_silent(name), []).append(name.partition(" (")[0] if doing else name)
    return [f"{_named_in_short(names)}: {state}" for state, names in found.items()]


def _named_in_short(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _why_silent(name: str) -> str:
    """Why a server may not respond: a scheduler may publish a machine's name after the processes there have started."""
    found = _HOST.search(name)
    try:
        socket.getaddrinfo(found[1] or found[2] if found else "localhost", None)
    except OSError as error:
        return f"its name is not known yet ({error})"
    return "no answer yet"


def _never_came(names: Sequence[str], seconds: float) -> str:
    has = "has" if len(names) == 1 else "have"
    return (
        f"{', '.join(names)} {has} given no answer for {seconds:g} s (FLEET_START_TIMEOUT). Is it running, is this its "
        "address (FLEET_SERVER_ENDPOINTS / PADDLE_PSERVERS_IP_PORT_LIST), and do both sides use the same keys, or none?"
    )


def check_loaded(client: Client, dirname: str) -> None:
    """Raise an error if the servers have not loaded the model that the worker expects: they load when they start."""
    wanted = Storage(dirname).path
    for number, server in enumerate(client.stats()):
        if server["model"] != wanted:
            raise FleetError(
                f"init_worker('{dirname}'): server {number} has loaded {server['model'] or 'no model'}. Give "
                f"fleet.init_server('{dirname}') the same folder."
            )


def with_known_restart(client: Client, info: RoleInfo) -> RoleInfo:
    """The role with its number of restarts. If it must ask the servers: one more than that of an earlier process with
    this index that has not left, else 0.
    """
    if not info.asks_restart:
        return info
    members = (member for server in client.stats() for member in server["workers"])
    before = [member["restart"] for member in members if member["worker"] == info.worker_index]
    return replace(info, restart=max(before) + 1 if before else 0)


def make_tables(
    client: Client, plan: Plan, info: RoleInfo, strategy: DistributedStrategy, given: Sequence[GivenState]
) -> None:
    """Worker 0 creates the tables and sets values that were not loaded, and the optimizers' state that was given before
    the start. All workers then get the servers' dense values.

    A restarted worker 0 does so if the previous process did not get that far.
    """
    if info.worker_index == 0 and not (info.restart and _has_first_values(client, plan)):
        for spec in plan.specs:
            client.create_table(spec)
        tables = [server["tables"] for server in client.stats()]
        _set_sparse(client, plan, tables, given)
        _set_dense(client, plan, tables, given)
    if info.is_elastic:
        _wait_for(lambda: _has_first_values(client, plan), info, lambda: _NO_VALUES)
        least = f"{info.min_workers} workers (FLEET_MIN_WORKERS)"
        _wait_for(
            lambda: client.stats()[0]["members"]["joined"] >= info.min_workers,
            info,
            lambda: f"fewer than {least} have come",
            lambda: least,
        )
    elif info.num_workers > 1:
        _wait_for_first_values(client, plan, info, strategy)
    for dense in (*plan.dense, *plan.fixed):
        dense.write(client.pull_dense(dense.spec.name).result())


def _set_sparse(client: Client, plan: Plan, tables: list[dict[str, Any]], given: Sequence[GivenState]) -> None:
    """Set the initial values of torch's embeddings or of load_state_dict in tables of which no server loaded rows."""
    for name, group in plan.sparse.items():
        if not any(server[name]["loaded"] for server in tables):
            rows = group.modules[0].table_rows
            for keys, values in slices(rows.first_keys, rows.first_values):
                client.assign(name, keys, values)
            for state in given:
                if name in state.rows:
                    state.put_rows(client, group)


def _set_dense(client: Client, plan: Plan, tables: list[dict[str, Any]], given: Sequence[GivenState]) -> None:
    """Set this worker's dense values, except for those that the servers have loaded."""
    for dense in (*plan.dense, *plan.fixed):
        values = dense.values()
        loaded = [bounds for server in tables for bounds in server[dense.spec.name]["loaded"]]
        if loaded:
            saved = client.pull_dense(dense.spec.name).result()
            for start, stop in loaded:
                values[start:stop] = saved[start:stop]
        for state in given:
            if dense.spec.name in state.blocks and not loaded:
                client.set_block_state(dense.spec.name, *state.blocks[dense.spec.name])
        client.set_dense(dense.spec.name, values)


def _wait_for_first_values(client: Client, plan: Plan, info: RoleInfo, strategy: DistributedStrategy) -> None:
    is_met = strategy.a_sync_configs.launch_barrier or not _named(plan)
    if is_met and not info.restart:  # the other workers have passed the barrier without a restarted worker
        _wait_for_workers(client, info)
        client.barrier("start", info.num_workers, max(info.start_timeout, strategy.sync_timeout))
        return
    _wait_for(lambda: _has_first_values(client, plan), info, lambda: _NO_VALUES)


def _wait_for_workers(client: Client, info: RoleInfo) -> None:
    """Wait until all workers of the job have joined. Prints the missing ones, and names them if the wait fails."""
    missing = list(range(info.num_workers))

    def are_here() -> bool:
        nonlocal missing
        found = client.stats()[0]
        known = {*(member["worker"] for member in found["workers"]), *found["members"]["lost"]}
        missing = [worker for worker in range(info.num_workers) if worker not in known]
        return bool(found["members"]["joined"] >= info.num_workers)

    def absent() -> str:
        return f"{_named_in_short([f'worker {worker}' for worker in missing])} of {info.num_workers}"

    _wait_for(are_here, info, lambda: f"these have not joined: {absent()}. Look at their logs.", absent)


def _wait_for(
    is_so: Callable[[], bool],
    info: RoleInfo,
    otherwise: Callable[[], str],
    waits_for: Callable[[], str] = lambda: "worker 0 to set the first values",
) -> None:
    """Wait until `is_so` returns True. Prints now and then what this worker waits for."""
    started, lines = time.monotonic(), WaitingLines()
    while not is_so():
        if time.monotonic() - started >= info.start_timeout:
            raise FleetError(f"after {info.start_timeout:g} s (FLEET_START_TIMEOUT) {otherwise()}")
        lines.look(lambda: [waits_for()])
        time.sleep(_PAUSE)


def _has_first_values(client: Client, plan: Plan) -> bool:
    """Whether worker 0 has set all dense values. It sets rows before them, so rows are not checked."""
    tables = [server["tables"] for server in client.stats()]
    return all(name in found and found[name]["is_set"] for found in tables for name in _named(plan))


def _named(plan: Plan) -> set[str]:
    return {dense.spec.name for dense in (*plan.dense, *plan.fixed)}


class WaitingLines:
    """Messages about what this process waits for: early at first, then on changes, otherwise at growing intervals."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._next, self._again = self._started + PERIOD, 0.0
        self._pause, self._last = PERIOD, list[str]()

    def look(self, waits_for: Callable[[], list[str]]) -> None:
        """If a message is due, call `waits_for` and print its result, one item per line."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next, found = now + PERIOD, waits_for()
        if found != self._last:
            self._pause = PERIOD
        elif now < self._again:
            return
        self._last, self._pause = found, min(_LONGEST, self._pause * _GROWTH)
        self._again = now + self._pause - PERIOD / 2  # the call nearest to that time
        for text in found:
            print(f"waiting for {text}, {now - self._started:.0f} s", flush=True)
