"""CUDA graphs that capture the steps of a table: what such a graph can hold, and what it cannot.

A graph replays kernels with the addresses and numbers of the capture, and nothing on the host runs in a replay.
"""

from __future__ import annotations

from typing import Protocol

from torchfleet.base.errors import TableError
from torchfleet.ps.gpu.row_layout import RowLayout

_TIMES = ("seen", "born")  # statistics that the host's clock gives


class CapturedTable(Protocol):
    """What decides whether a table can be captured (implemented by DeviceTable)."""

    layout: RowLayout
    max_rows: int | None
    has_capacity: bool

    @property
    def name(self) -> str: ...

    @property
    def has_entry(self) -> bool: ...


def check_capture(table: CapturedTable) -> None:
    """Raise TableError if the table needs the host in a step."""
    if table.has_entry:
        raise TableError(
            f"table '{table.name}' has entry=: the host decides in every step which ids get rows, which a CUDA graph "
            "cannot replay. Train it without a graph, or without entry="
        )
    if table.max_rows is not None:
        raise TableError(
            f"table '{table.name}' has a limit (shrink=) and evicts rows, which a CUDA graph cannot: train it "
            "without a graph, or give capacity= for all rows that are to come instead of the limit"
        )
    if any(name in table.layout.columns for name in _TIMES):
        raise TableError(
            f"table '{table.name}' keeps when rows were used (shrink= by days), and the clock stands still in a CUDA "
            "graph: train it without a graph, or without such a limit; capacity= makes room for all rows"
        )
    if not table.has_capacity:
        raise TableError(
            f"table '{table.name}' grows, and a CUDA graph holds the addresses of its memory: give its "
            "SparseEmbedding capacity=, for all rows that are to come"
        )
