"""FetchHandler: a background thread calls it every few seconds with values of the training."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from torchfleet.base.errors import FleetError


class FetchHandler:
    """Base class: override `handler(self, values)`. A background thread calls it every `period_secs` seconds.

    `var_dict` says what to watch. It maps names for the handler to keys of the dict that the step returns, tensors, or
    functions without arguments. `return_np`: the handler gets numbers and numpy arrays; False: tensors as they are.
    """

    def __init__(self, var_dict: Mapping[str, Any], period_secs: float = 60, return_np: bool = True) -> None:
        if not isinstance(var_dict, Mapping) or not var_dict:
            raise FleetError(
                f"FetchHandler: expected a dict of what to watch, such as {{'loss': 'loss'}}, found {var_dict!r}"
            )
        for name, what in var_dict.items():
            if not (isinstance(what, (str, torch.Tensor)) or callable(what)):
                raise FleetError(
                    f"FetchHandler: '{name}' must be the name of a value that the step returns, a tensor or a "
                    f"function, found {what!r}"
                )
        if not isinstance(period_secs, (int, float)) or not period_secs > 0:
            raise FleetError(f"FetchHandler: period_secs must be above 0, found {period_secs!r}")
        self.var_dict, self.period_secs, self.return_np = dict(var_dict), float(period_secs), return_np

    def handler(self, values: dict[str, Any]) -> None:
        """Process the values: numbers, and numpy arrays for tensors with several elements. Subclasses override it."""
        raise NotImplementedError(f"{type(self).__name__}.handler(values) is to be written by you")


class Watch:
    """Calls a handler in a background thread until it is closed. The training thread only stores its latest values."""

    def __init__(self, handler: FetchHandler) -> None:
        self._handler = handler
        self._latest: Mapping[str, Any] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def note(self, values: Mapping[str, Any]) -> None:
        """Store the last step's values. The thread reads them at the handler's next call."""
        self._latest = values

    def close(self) -> None:
        """Call the handler once more with the final values. Waits for a call in progress."""
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
        except BaseException:  # the user's code failed: print the error and continue training
            traceback.print_exc(file=sys.stderr)

    def _value(self, what: Any, latest: Mapping[str, Any]) -> Any:
        if isinstance(what, str):
            if what not in latest:
                raise FleetError(f"FetchHandler: the step returns {', '.join(latest)}, and no '{what}'")
            what = latest[what]
        elif callable(what) and not isinstance(what, torch.Tensor):
            what = what()
        return plain(what) if self._handler.return_np else what


def plain(value: Any) -> Any:
    """A number, or a numpy array for several elements; other values are returned unchanged."""
    if isinstance(value, torch.Tensor):
        detached = value.detach().cpu()
        if detached.numel() == 1:
            return detached.item()
        return (detached.float() if detached.dtype == torch.bfloat16 else detached).numpy().copy()
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return value.item()
    return value


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are single numbers, which fit in a line of output."""
    single = {n: v for n, v in values.items() if not isinstance(v, torch.Tensor) or v.numel() == 1}
    found = {name: plain(value) for name, value in single.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
