"""Blocks in a job without heter workers: on the worker's own GPU, with the rest of its model where it was."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchfleet.base.job_hook import pickled_as
from torchfleet.ps.worker.heter.blocks import Block


def place(blocks: Sequence[Block], device: torch.device) -> None:
    """Put the blocks on a device. Their inputs follow, and their outputs go where the first input was."""
    for block in blocks:
        block.module.to(device)
        if not isinstance(block.module.__dict__.get("forward"), PlacedForward):
            block.module.forward = PlacedForward(device, block.module.forward)


class PlacedForward:
    """The forward of a block on another device than its inputs. A copy of the block has one, too."""

    def __init__(self, device: torch.device, own: Callable[..., Any]) -> None:
        self._device, self._own = device, own
        functools.update_wrapper(self, own)  # callers look at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        there, moved = tree_map(self._moved(self._device), (args, kwargs))
        found = self._own(*there, **moved)
        return found if first is None else tree_map(self._moved(first.device), found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return PlacedForward(self._device, copy.deepcopy(self._own, memo))

    def __reduce__(self) -> Any:
        return pickled_as(self._own)

    @staticmethod
    def _moved(device: torch.device) -> Callable[[Any], Any]:
        return lambda value: value.to(device) if isinstance(value, torch.Tensor) else value
