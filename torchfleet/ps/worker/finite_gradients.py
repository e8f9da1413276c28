"""Finds gradients that are not finite before anything is sent, and names them by parameter or id."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from torchfleet.base.errors import TableError
from torchfleet.ps.kernels.rows import all_finite
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.dense_group import DenseGroup
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.modes.communicator import Gradients

_MOST_NAMES = 3


def check_finite(plan: Plan, gradients: Gradients, step: int) -> None:
    """Raise TableError with the parameters, or the table and ids, whose gradients have NaN or infinity.

    Gradients that pass are marked, so that the client does not check them again.
    """
    found: list[str] = []
    for group in plan.dense:
        block = gradients.dense[group.spec.name]
        if not _all_finite(block):
            found += _parameters(group, block)
    finite = _finite_wholes(gradients.sparse.values()) if len(gradients.sparse) > 1 else ()
    for table, (keys, grads) in gradients.sparse.items():
        if id(grads.base) not in finite and not _all_finite(grads):
            found += _rows(table, plan.sparse[table].spec.dim, keys, grads)
    for update in gradients.cached:
        if not update.is_finite():
            found.append(f"table '{update.cache.spec.name}'")
    if not found:
        gradients.are_finite = True
        return
    more = f", and {len(found) - _MOST_NAMES:,} more" if len(found) > _MOST_NAMES else ""
    raise TableError(
        f"step {step}: NaN or infinity in the gradient of {', '.join(found[:_MOST_NAMES])}{more}. Nothing of this step "
        "was sent. Look for it in the loss (torch.autograd.set_detect_anomaly(True) says where it begins), lower the "
        "learning rate, or clip the gradients."
    )


def _finite_wholes(gradients: Collection[tuple[Keys, Floats]]) -> set[int]:
    """The id() of each finite array that consists of several of these gradients, so that one check covers all of them.
    Gradients of many small tables lie in one array (grouped_rows.py).
    """
    wholes: dict[int, list[int]] = {}  # by id() of an array: the number of gradients in it, and of their elements
    for _, part in gradients:
        if part.base is not None:
            known = wholes.setdefault(id(part.base), [0, 0])
            known[0] += 1
            known[1] += part.size
    found = set()
    for _, part in gradients:
        whole = part.base
        if whole is None or id(whole) in found or not isinstance(whole, np.ndarray):
            continue
        is_all = wholes[id(whole)][0] > 1 and wholes[id(whole)][1] == whole.size
        if is_all and whole.dtype == np.float32 and whole.flags.c_contiguous and _all_finite(whole):
            found.add(id(whole))
    return found


def _parameters(group: DenseGroup, block: Floats) -> Iterator[str]:
    for parameter in group.layout():
        size = int(np.prod(parameter.shape, dtype=np.int64))
        if not np.isfinite(block[parameter.start : parameter.start + size]).all():
            yield f"parameter '{parameter.name}'"


def _rows(table: str, dim: int, keys: Keys, grads: Floats) -> Iterator[str]:
    """Names of rows that are not finite. A row may have show, click and slot after its `dim` numbers."""
    for row in np.flatnonzero(~np.isfinite(grads).all(axis=1)):
        what = "" if not np.isfinite(grads[row, :dim]).all() else " (its show or click)"
        yield f"table '{table}' for id {int(keys[row : row + 1].view(np.int64)[0])}{what}"


def _all_finite(values: Floats) -> bool:
    return bool(all_finite(np.ascontiguousarray(values).reshape(-1).view(np.uint32)))
