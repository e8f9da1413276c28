"""Gathers arrays and tensors of all workers on every worker, in pieces small enough for the servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api import process_role
from torchfleet.api.util import as_array
from torchfleet.base.errors import FleetError

_PIECE = 1 << 22  # bytes that a worker sends at a time: servers accept up to four times as many


def gathered(name: str, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """The arrays of all workers, in worker order. Their first dimensions may differ. All workers must call it."""
    flat = np.ascontiguousarray(array).reshape(-1)
    num = _PIECE // flat.dtype.itemsize
    brought = process_role.gather(name, (-(-len(flat) // num)).to_bytes(8, "little"))
    num_pieces = max(int.from_bytes(part, "little") for part in brought)
    found: list[list[npt.NDArray[Any]]] = [[np.empty(0, flat.dtype)] for _ in brought]
    for at in range(num_pieces):
        parts = process_role.gather(name, flat[at * num : (at + 1) * num].tobytes())
        if len(parts) != len(found):
            raise FleetError(f"{name}: {len(found)} workers began to exchange arrays, {len(parts)} are left")
        for pieces, part in zip(found, parts, strict=True):
            pieces.append(np.frombuffer(part, flat.dtype))
    return [np.concatenate(pieces).reshape(-1, *array.shape[1:]) for pieces in found]


class _GatheredRows(torch.autograd.Function):
    """Rows of all workers. Backward: each worker gets the sum of all workers' gradients for its own rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, name: str, begin: int, total: int) -> torch.Tensor:
        found = np.concatenate(gathered(name, as_array(rows)))
        if len(found) != total:
            raise FleetError(f"{name}: expected {total:,} rows of all workers, found {len(found):,}")
        ctx.name, ctx.own = name, slice(begin, begin + len(rows))
        return torch.from_numpy(found).to(rows.device, rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        parts = gathered(ctx.name, as_array(gradient))
        own = np.sum([part[ctx.own] for part in parts], axis=0, dtype=parts[0].dtype)
        return torch.from_numpy(own).to(gradient.device, gradient.dtype), None, None, None


def gathered_rows(name: str, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(rows of all workers, where this worker's rows begin), differentiable: backward is an exchange, too.

    All workers must call it, and backward, equally often.
    """
    index = process_role.worker_index() if process_role.is_set_up() else 0
    places = np.concatenate(gathered(name, np.array([[index, len(rows)]], np.int64)))  # some workers may have left
    begin = int(places[places[:, 0] < index, 1].sum())
    found: torch.Tensor = _GatheredRows.apply(rows, name, begin, int(places[:, 1].sum()))  # type: ignore[no-untyped-call]
    return found, begin
