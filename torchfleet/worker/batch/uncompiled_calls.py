"""While somebody in the process is about to record a call, torch.compile lets calls run as they are."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

_lock = threading.Lock()
_holders: set[int] = set()
_stance: Any = None  # torch's, which is one for the process; leaving it brings back the one before


def hold(owner: object) -> None:
    """Calls are not compiled until every owner has let go. Nothing happens where the compiler is not imported."""
    global _stance
    with _lock:
        if "torch._dynamo" in sys.modules and not _holders:
            _stance = torch.compiler.set_stance("force_eager")
        _holders.add(id(owner))


def let_go(owner: object) -> None:
    """Compile again, if nobody else holds; without effect for one that does not."""
    global _stance
    with _lock:
        _holders.discard(id(owner))
        if not _holders and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None
