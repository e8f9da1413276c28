"""How a replica's process shows that it lives, and checks the other one, beside the messages of its server's loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _unknown(replica: int) -> bool:
    return False


@dataclass(frozen=True)
class Liveness:
    """The defaults are those of replicas in virtual time, which have no processes."""

    is_refused: Callable[[int], bool] = _unknown  # whether that replica's process has certainly ended
    has_thread: bool = False  # whether a primary sends signs of life from a thread, too
