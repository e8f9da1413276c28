"""A handler that is called with values of the training, from a thread beside it, every few seconds."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from torchfleet.base.errors import FleetError


class FetchHandler:
    """Derive from it and write `handler(self, values)`; it is called every `period_secs` from a thread of its own.

    `var_dict` says what to watch: names for the handler → names in the dict that the step returns, tensors, or
    functions without arguments.
    """

    def __init__(self, var_dict: Mapping[str, Any], period_secs: float = 60) -> None:
        if not isinstance(var_dict, Mapping) or not var_dict:
            raise FleetError(f"FetchHandler: expected a dict of what to watch, found {var_dict!r}")
        for name, what in var_dict.items():
            if not (isinstance(what, (str, torch.Tensor)) or callable(what)):
                raise FleetError(
                    f"FetchHandler: '{name}' must be the name of a value that the step returns, a tensor or a "
                    f"function, found {what!r}"
                )
        if not isinstance(period_secs, (int, float)) or not period_secs > 0:
            raise FleetError(f"FetchHandler: period_secs must be above 0, found {period_secs!r}")
        self.var_dict, self.period_secs = dict(var_dict), float(period_secs)

    def handler(self, values: dict[str, Any]) -> None:
        """What to do with the values: numbers, and numpy arrays for tensors of several. To be written by the user."""
        raise NotImplementedError(f"{type(self).__name__}.handler(values) is to be written by you")


class Watch:
    """Runs a handler beside training until it is closed; training only puts its latest values here."""

    def __init__(self, handler: FetchHandler) -> None:
        self._handler = handler
        self._latest: Mapping[str, Any] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def note(self, values: Mapping[str, Any]) -> None:
        """The last step's values; they are looked at when the handler's time has come."""
        self._latest = values

    def close(self) -> None:
        """One last call, with the values at the end; one that is under way is waited for."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(min(self._handler.period_secs, threading.TIMEOUT_MAX)):
            self._call()
        self._call()

    def _call(self) -> None:
        latest = self._latest
        if latest is None:
            return
        try:
            self._handler.handler({name: self._value(what, latest) for name, what in self._handler.var_dict.items()})
        except BaseException:  # the user's code: it is shown, and training goes on
            traceback.print_exc(file=sys.stderr)

    def _value(self, what: Any, latest: Mapping[str, Any]) -> Any:
        if isinstance(what, str):
            if what not in latest:
                raise FleetError(f"FetchHandler: the step returns {', '.join(latest)}, and no '{what}'")
            what = latest[what]
        elif callable(what) and not isinstance(what, torch.Tensor):
            what = what()
        return plain(what)


def plain(value: Any) -> Any:
    """A number, or a numpy array of several; what is neither stays as it is."""
    if isinstance(value, torch.Tensor):
        detached = value.detach().cpu()
        if detached.numel() == 1:
            return detached.item()
        return (detached.float() if detached.dtype == torch.bfloat16 else detached).numpy().copy()
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return value.item()
    return value


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """What can be shown in a line: single numbers."""
    single = {n: v for n, v in values.items() if not isinstance(v, torch.Tensor) or v.numel() == 1}
    found = {name: plain(value) for name, value in single.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
