"""The loss of a training loop that reports none: the number on which it calls backward()."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

_MARK = "_fleet_unscaled"  # on a tensor that a GradScaler has scaled: what it was before
_noted = threading.local()  # by thread: the last loss, as a tensor, which may still be computed on a GPU
_lock = threading.Lock()
_originals: dict[tuple[Any, str], Callable[..., Any]] = {}  # while there is a watch: what torch has in their place
_watches: set[int] = set()


class LossWatch:
    """Notes the losses of this process, from now until `close`. Threads have their own."""

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
    """torch.autograd.backward, which Tensor.backward calls."""

    def noting(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if grad_tensors is None and isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            _noted.loss = getattr(tensors, _MARK, tensors).detach()
        return backward(tensors, grad_tensors, *args, **kwargs)

    return noting


def _marking(scale: Callable[..., Any]) -> Callable[..., Any]:
    """GradScaler.scale: its result remembers the loss as it was."""

    def marking(scaler: GradScaler, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and scaled is not outputs:
            setattr(scaled, _MARK, outputs.detach())
        return scaled

    return marking
