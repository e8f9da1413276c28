"""Differences of a copy of a table that is trained separately (geo, docs/modes/geo.md).

values_VW is the copy, whose rows may be wider than the table's; base_VD is the assumed value on the servers. Other
threads may train on values_VW at the same time: each number is read once, so that nothing is counted twice.
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
    """out = (x - b) · share; b += out. A row whose remaining difference exceeds `rest` counts as changed."""
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

    In n changes a row covers 1 - r of its way. W copies one after the other would cover 1 - r^W of it; in parallel they
    cover W (1 - r) if all differences are added. For rarely changed rows the two agree: their differences count whole.
    Frequently changed rows arrive on each copy: for these the result is the mean.
    """
    for i in range(len(counts_N)):
        way = -max(1, counts_N[i]) / CHANGES_TO_ARRIVE
        out_N[i] = math.expm1(num_copies * way) / (num_copies * math.expm1(way))


@kernel
def fold_in(values_VW: np.ndarray, base_VD: np.ndarray, rows_N: np.ndarray, new_ND: np.ndarray) -> None:
    """x += s - b; b = s, where s is the servers' value."""
    for i in range(len(rows_N)):
        row = rows_N[i]
        for d in range(new_ND.shape[1]):
            values_VW[row, d] += new_ND[i, d] - base_VD[row, d]
            base_VD[row, d] = new_ND[i, d]
