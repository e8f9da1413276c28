"""For a copy of a table that is trained apart: what it has learned, and what others have (geo, docs/modes/geo.md).

values_VW is the copy, rows possibly wider than the table's; base_VD is what the servers are believed to have. Others
may be training on values_VW at the same time: a row's numbers are each read once, so that nothing is counted twice.
"""

from __future__ import annotations

import math

import numpy as np

from torchfleet.ps.kernels.jit import kernel

CHANGES_TO_ARRIVE = 10.0  # measured on word vectors: benchmarks/log.md


@kernel
def take_differences(
    values_VW: np.ndarray,
    base_VD: np.ndarray,
    rows_N: np.ndarray,
    share_N: np.ndarray,
    rest: np.float32,
    changes_V: np.ndarray,
    out_ND: np.ndarray,
) -> None:
    """out = (x - b) · share; b += out. A row that is left with more than `rest` of a difference counts as changed."""
    for i in range(len(rows_N)):
        row, largest = rows_N[i], np.float32(0)
        for d in range(out_ND.shape[1]):
            difference = values_VW[row, d] - base_VD[row, d]
            sent = difference * share_N[i]
            out_ND[i, d] = sent
            base_VD[row, d] += sent
            largest = max(largest, abs(difference - sent))
        if largest > rest:
            changes_V[row] += 1


@kernel
def share_by_count(counts_N: np.ndarray, num_copies: int, out_N: np.ndarray) -> None:
    """out = (1 - r^W) / (W (1 - r)) with r = exp(-n / 10), for a row that each of W copies has changed n times.

    In n changes a row goes 1 - r of its way. W copies one after the other would go 1 - r^W of it; side by side they go
    W (1 - r) if all is added up. For rows that are rarely changed that is the same: their differences count whole. Rows
    that are often changed arrive on each copy: of these the mean is taken.
    """
    for i in range(len(counts_N)):
        way = -max(1, counts_N[i]) / CHANGES_TO_ARRIVE
        out_N[i] = math.expm1(num_copies * way) / (num_copies * math.expm1(way))


@kernel
def fold_in(values_VW: np.ndarray, base_VD: np.ndarray, rows_N: np.ndarray, new_ND: np.ndarray) -> None:
    """x += s - b; b = s, where s is what the servers have."""
    for i in range(len(rows_N)):
        row = rows_N[i]
        for d in range(new_ND.shape[1]):
            values_VW[row, d] += new_ND[i, d] - base_VD[row, d]
            base_VD[row, d] = new_ND[i, d]
