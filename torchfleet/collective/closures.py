"""The closure that torch's optimizers take in `step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """The loss that the closure returns, computed with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
