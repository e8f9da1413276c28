"""Finds the loss of a training loop that reports none: the scalar on which the loop calls backward()."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

_MARK = "_fleet_unscaled"  # attribute of a tensor that a GradScaler has scaled: the unscaled tensor
_noted = threading.local()  # by thread: the last loss, as a tensor, which may still be computed on a GPU
_lock = threading.Lock()
_originals: dict[tuple[Any, str], Callable[..., Any]] = {}  # while a watch is open: torch's own functions
_watches: set[int] = set()


class LossWatch:
    """Notes the losses of this process, for each thread separately, from now until `close`."""

    def __init__(self) -> None:
        with _lock:
            if not _watches:
                _replace(torch.autograd, "backward", _noting)
                _replace(GradScaler, "scale", _marking)
            _watches.add(id(self))

    def take(self) -> torch.Tensor | None:
        """The last loss of the calling thread since the last call; None if there was none."""
        loss: torch.Tensor | None = getattr(_noted, "loss", None)
        _noted.loss = None
        return loss

    def close(self) -> None:
        with _lock:
            _watches.discard(id(self))
            while not _watches and _originals:
                (owner, name), original = _originals.popitem()
                setattr(owner, name, original)


def _replace(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    _originals[owner, name] = original
    setattr(owner, name, wraps(original)(around(original)))


def _noting(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch.autograd.backward, which Tensor.backward calls: note the loss if there is a single scalar."""

    def noting(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if grad_tensors is None and isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            _noted.loss = getattr(tensors, _MARK, tensors).detach()
        return backward(tensors, grad_tensors, *args, **kwargs)

    return noting


def _marking(scale: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap GradScaler.scale: the scaled tensor keeps the unscaled loss."""

    def marking(scaler: GradScaler, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and scaled is not outputs:
            setattr(scaled, _MARK, outputs.detach())
        return scaled

    return marking
