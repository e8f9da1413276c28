"""Types for msgspec, described before threads share them.

msgspec describes a Struct when it is first decoded, and shows the description to other threads while it is being made:
a second thread that decodes the same type then reads pointers that are not set, and the process ends with a
segmentation fault. Every decoder of the package therefore gets its type from `prepared`.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")

_prepared: set[Any] = set()
_lock = threading.Lock()


def prepared(kind: type[Kind]) -> type[Kind]:
    """The same type, described with all types in it. Threads may call it at the same time."""
    if kind not in _prepared:
        with _lock:
            msgspec.msgpack.Decoder(kind)  # describes types of all formats
            _prepared.add(kind)
    return kind
