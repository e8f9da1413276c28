"""Exchanges values between workers of a Trainer, through the servers or among ranks, like fleet.util."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

import torchfleet as fleet
from torchfleet.api import process_role
from torchfleet.base.errors import FleetError
from torchfleet.base.plain_values import pack, unpack

_REDUCTIONS = {
    "mean": lambda stacked: stacked.mean(0),
    "avg": lambda stacked: stacked.mean(0),
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
}


class WorkerExchange:
    """The exchanges that Lightning requires of a strategy. All workers call each of them, in the same order.

    Before the job begins, and in a job of one process, each call returns the worker's own value.
    """

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    def _all(self, value: Any, what: str) -> list[Any]:
        if self.world_size == 1 or not process_role.is_under_way():
            return [value]
        return [unpack(data) for data in process_role.gather(f"lightning {what}", pack(value, f"{what} of Lightning"))]

    def barrier(self, name: str | None = None) -> None:
        if self.world_size > 1 and process_role.is_under_way():
            fleet.barrier_worker()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The value of worker `src`. Plain values only, so that no code is executed."""
        found = self._all(obj, "broadcast")
        return obj if len(found) == 1 else found[src]

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all workers, stacked."""
        if sync_grads:
            raise FleetError(
                "all_gather(sync_grads=True): gradients flow within a worker only; gather without, and give every "
                "worker its own loss"
            )
        found = self._all(tensor, "all_gather")
        return tensor if len(found) == 1 else torch.stack([one.to(tensor.device) for one in found])

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all workers: mean, sum, max, min or product. Other values are returned unchanged."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = _name_of(reduce_op)
        found = self._all(tensor, "reduce")
        if len(found) == 1:
            return tensor
        stacked = torch.stack([one.to(tensor.device) for one in found])
        if name in ("mean", "avg") and not stacked.is_floating_point():
            stacked = stacked.float()
        return _REDUCTIONS[name](stacked)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        found = self._all(bool(decision), "decision")
        return bool(min(found) if all else max(found))


def _name_of(reduce_op: Any) -> str:
    """The name of a reduction, from a string or torch.distributed's ReduceOp."""
    name = str(reduce_op or "mean").rpartition(".")[2].lower()
    if name not in _REDUCTIONS:
        raise FleetError(f"reduce(reduce_op={reduce_op}): expected one of {', '.join(_REDUCTIONS)}")
    return name
