"""Param groups whose tensors are all of one kind, for as long as an optimizer steps.

torch's foreach functions and fused optimizers take plain tensors or DTensors of one mesh, not both. If only some layers
of a model are sharded, a group has both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


class OneKindGroups:
    """`split` replaces mixed groups by groups of one kind; `join` puts the user's own groups back.

    In between, a group's options are copies: changes to them are lost.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        self._whole: list[dict[str, Any]] | None = None

    def split(self) -> None:
        self.join()
        self._whole = list(self._groups)
        self._groups[:] = [part for group in self._whole for part in _parts(group)]

    def join(self) -> None:
        if self._whole is not None:
            self._groups[:] = self._whole
            self._whole = None


def _parts(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group itself if it is of one kind, or if its optimizer has no foreach option."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        kind = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault(kind, []).append(parameter)
    if len(kinds) <= 1 or "foreach" not in group:
        return [group]
    return [{**group, "params": parameters} for parameters in kinds.values()]
