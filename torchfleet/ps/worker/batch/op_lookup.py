"""Functions of torch are looked up by one thread at a time.

torch makes the Python object of a function when it is first called under a dispatch mode, such as Recorder, and keeps
the object's address. If two threads make this first call at the same time, they make two objects: torch.ops keeps the
later one, and the address may be that of the other, which is freed. Every later call then uses freed memory.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverloadPacket, _OpNamespace

_lock = threading.RLock()  # a lookup may need another lookup


def look_up_one_at_a_time() -> None:
    """Let one thread at a time look up functions of torch, from now on in this process. Later calls do nothing."""
    for kind in (_OpNamespace, OpOverloadPacket):
        if not hasattr(kind.__getattr__, "__wrapped__"):
            kind.__getattr__ = _locked(kind.__getattr__)  # type: ignore[method-assign]


def _locked(look_up: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    @functools.wraps(look_up)
    def locked(self: Any, name: str) -> Any:
        with _lock:
            made = vars(self).get(name)  # by another thread, which had the lock
            return look_up(self, name) if made is None else made

    return locked
