"""While somebody in the process is about to record a call, torch.compile lets calls run as they are."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import torch

_lock = threading.RLock()  # a garbage collection inside may end an owner
_holders: set[int] = set()
_stance: Any = None  # torch's, which is one for the process; leaving it brings back the one before


def hold(owner: object) -> None:
    """Calls are not compiled until every owner has let go, or is gone. Nothing happens where the compiler is not
    imported."""
    global _stance
    with _lock:
        if "torch._dynamo" in sys.modules and not _holders:
            _stance = torch.compiler.set_stance("force_eager")
        if id(owner) not in _holders:
            _holders.add(id(owner))
            weakref.finalize(owner, _remove, id(owner))


def let_go(owner: object) -> None:
    """Compile again, if nobody else holds; without effect for one that does not."""
    _remove(id(owner))


def _remove(number: int) -> None:
    global _stance
    with _lock:
        _holders.discard(number)
        if not _holders and _stance is not None:
            stance, _stance = _stance, None
            stance.__exit__(None, None, None)
