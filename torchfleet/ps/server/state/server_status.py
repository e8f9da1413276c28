"""The status of a server for its launcher and Prometheus. docs/watching.md lists the fields."""

from __future__ import annotations

from typing import Any, Protocol

from torchfleet.base.monitor.freshness import ages_by_kind
from torchfleet.base.monitor.prometheus.metrics_port import open_metrics_port
from torchfleet.base.monitor.status import StatusFile
from torchfleet.base.monitor.training_pace import RecentRates
from torchfleet.ps.net.wire import Command
from torchfleet.ps.server.state.state import State

_FEW = 64  # tables that are reported; if there are more, only the largest


class Standing(Protocol):
    """What the status says of a server with replicas."""

    @property
    def is_primary(self) -> bool: ...

    @property
    def is_in_step(self) -> bool: ...

    @property
    def deposed(self) -> str: ...

    @property
    def term(self) -> int: ...


class ServerStatus:
    """Collects a server's status, writes it to the status file, and serves it at FLEET_METRICS_PORT."""

    def __init__(
        self,
        state: State,
        index: int = 0,
        status_file: str | None = None,
        replica: int = 0,
        standing: Standing | None = None,
        address: str | None = None,
        has_compiled: bool = False,
    ) -> None:
        """`status_file`: None for a server without a launcher. `address`: where clients reach the server.
        `has_compiled`: this process has compiled kernels, so that its memory has the compiler. Raises FleetError if the
        port is not available."""
        self._state, self._standing, self._address = state, standing, address
        self._has_compiled = has_compiled
        self._file = StatusFile(status_file, self._make, open_metrics_port("server", index, replica))
        self._rates = RecentRates()
        state.counters.hot_keys.is_on = status_file is not None

    def write(self, now: bool = False) -> None:
        """Write the status file if it is due, or at once if `now`."""
        self._file.write(now)

    def close(self) -> None:
        self._file.close()

    def _make(self) -> dict[str, Any]:
        state, standing = self._state, self._standing
        stats = {table.spec.name: table.described() for table in state.tables.values()}
        rates = self._rates.look({"requests_per_s": state.counters.num_requests})
        maybe: dict[str, Any] = {"busy": state.counters.load.busy, "hot_keys": state.counters.hot_keys.top() or None}
        maybe |= {"address": self._address, "compiled": self._has_compiled or None}
        if state.saves.made.num:
            maybe["saves"] = dict(vars(state.saves.made))
        if standing is not None:
            maybe |= {"backup": not standing.is_primary, "deposed": bool(standing.deposed)}
            maybe |= {"in_step": standing.is_in_step, "term": standing.term, "has_backup": state.has_backup}
        return {
            "role": "server",
            "requests": state.counters.num_requests,
            **rates,
            "commands": {name_of(command): num for command, num in state.counters.num_by_command.items()},
            "errors": state.counters.num_errors,
            "dropped": state.pushes.num_dropped,
            "bytes_in": state.counters.bytes_in,
            "bytes_out": state.counters.bytes_out,
            "workers_joined": state.meetings.members.num_joined,
            "workers_lost": state.meetings.presence.num_lost,
            **{name: value for name, value in maybe.items() if value is not None},
            "rows": {name: table["rows"] for name, table in stats.items() if not table["is_dense"]},
            "tables": dict(sorted(((n, _table(t)) for n, t in stats.items()), key=lambda it: -it[1]["bytes"])[:_FEW]),
            **ages_by_kind(stats.values()),
        }


def name_of(command: int) -> str:
    """The name of a command in labels."""
    return Command(command).name.lower() if command else "unknown"


def _table(stats: dict[str, Any]) -> dict[str, Any]:
    found = {name: stats[name] for name in ("kind", "is_dense", "rows", "bytes")}
    if "evicted" in stats:
        found |= {"evicted": stats["evicted"], "created": max(0, stats["rows"] + stats["evicted"] - stats["loaded"])}
    return found
