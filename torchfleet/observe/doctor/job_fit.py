"""Whether a job of a given size fits this machine."""

from __future__ import annotations

from collections.abc import Iterator

from torchfleet.observe.doctor.finding import NOTE, SLOWS, STOPS, Finding
from torchfleet.observe.doctor.machine_facts import MachineFacts
from torchfleet.observe.watch.figures import size
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

_WORKER_BYTES = 600 * 10**6  # of a process with torch, before it has read data
_SERVER_BYTES = 250 * 10**6  # of a server without rows


def row_bytes(dim: int, rule: str) -> int:
    """Of one row in a server: values, the rule's state, the map, lists. As docs/online.md counts it.

    Raises TableError for a rule or a dim that there is not.
    """
    return 4 * (2 + dim * (1 + TableSpec("rows", dim=dim, rule=Rule(rule)).num_states)) + 18


def check_fit(
    facts: MachineFacts, num_servers: int, num_workers: int, num_rows: float, dim: int, rule: str
) -> Iterator[Finding]:
    """All servers and workers on this machine."""
    rows = num_rows * row_bytes(dim, rule)
    needed = rows + num_servers * _SERVER_BYTES + num_workers * _WORKER_BYTES
    table = f"{num_rows:,.0f} rows of dim {dim} with {rule} take {size(rows)}" if num_rows else "without rows"
    left = facts.memory_left
    parts = f"{table}; with {num_servers} servers and {num_workers} workers {size(needed)}"
    if left is None:
        yield Finding(NOTE, f"{parts}; how much memory is left is not known", "look at free -h")
    elif needed > left:
        machines = -(-needed // left)
        yield Finding(
            STOPS,
            f"{parts}, and {size(left)} are left",
            f"use {machines:.0f} machines like this one, a smaller dim, sgd in the place of adam, or admission and "
            "eviction of rows (docs/online.md)",
            85,
        )
    else:
        yield Finding(NOTE, f"{parts}; {size(left)} are left: it fits", "nothing")
    num = num_servers + num_workers
    if num > facts.num_cores:
        yield Finding(
            SLOWS,
            f"{num} processes share {facts.num_cores} cores",
            f"at most {facts.num_cores} together; --server_num auto chooses",
            45,
        )
