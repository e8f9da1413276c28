"""A hook on a module of the user's model, for as long as a job runs in this process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any


class JobHook(functools.partial[Any]):  # called without a Python frame of its own
    """Calls a function. Its place in a pickled module is taken by a function that does nothing, and that every process
    has: a part of the model can be saved, and loaded without torchfleet. A copy of the module has the same hook.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> JobHook:
        return self

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments, and returns None


def pickled_as(own: Callable[..., Any]) -> Any:
    """What `__reduce__` returns for an object that stands before `own`, a module's method or a function of a module."""
    if hasattr(own, "__self__"):
        return getattr, (own.__self__, own.__name__)
    return own.__reduce__()
