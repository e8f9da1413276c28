"""What a server holds after the work that was recorded in its log, as plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.logged_work import NUM_KEYS

from torchfleet.ps.server.server import Server


def rows_of(server: Server) -> dict[str, Any]:
    """By table: steps, and the sum of each row's values. Rows that only have their first values, which are zeros here,
    are not in a log: a row that is missing is no difference.
    """
    found = {}
    for table in server.state.tables.values():
        spec = table.spec
        values = table.pull(np.arange(NUM_KEYS, dtype=np.uint64), False, None).sum(axis=1) if not spec.is_dense else []
        found[spec.name] = {"step": table.step, "sums": [float(value) for value in values]}
    return found
