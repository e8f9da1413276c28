"""For a copy of a table that is trained apart: what it has learned, and what others have (geo, docs/modes/geo.md).

values_VW is the copy, rows possibly wider than the table's; base_VD is what the servers are believed to have. Others
may be training on values_VW at the same time: a row's numbers are each read once, so that nothing is counted twice.
"""

from __future__ import annotations

import numpy as np

from torchfleet.kernels.jit import kernel


@kernel
def take_differences(
    values_VW: np.ndarray,
    base_VD: np.ndarray,
    rows_N: np.ndarray,
    share: np.float32,
    rest: np.float32,
    changes_V: np.ndarray,
    out_ND: np.ndarray,
) -> None:
    """out = (x - b) · share; b += out. A row that is left with more than `rest` of a difference counts as changed."""
    for i in range(len(rows_N)):
        row, largest = rows_N[i], np.float32(0)
        for d in range(out_ND.shape[1]):
            difference = values_VW[row, d] - base_VD[row, d]
            sent = difference * share
            out_ND[i, d] = sent
            base_VD[row, d] += sent
            largest = max(largest, abs(difference - sent))
        if largest > rest:
            changes_V[row] += 1


@kernel
def fold_in(values_VW: np.ndarray, base_VD: np.ndarray, rows_N: np.ndarray, new_ND: np.ndarray) -> None:
    """x += s - b; b = s, where s is what the servers have."""
    for i in range(len(rows_N)):
        row = rows_N[i]
        for d in range(new_ND.shape[1]):
            values_VW[row, d] += new_ND[i, d] - base_VD[row, d]
            base_VD[row, d] = new_ND[i, d]
