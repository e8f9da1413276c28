"""What a server holds after the work that was recorded in its log, as plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.logged_work import NUM_KEYS

from torchfleet.ps.server.server import Server


def rows_of(server: Server) -> dict[str, Any]:
    """By table: rows, steps, and the sum of each row's values; of a dense table, its values."""
    found = {}
    for table in server.state.tables.values():
        spec = table.spec
        values = table.pull(np.arange(NUM_KEYS, dtype=np.uint64), False, None).sum(axis=1) if not spec.is_dense else []
        found[spec.name] = {"rows": table.num_rows, "step": table.step, "sums": [float(value) for value in values]}
    return found
