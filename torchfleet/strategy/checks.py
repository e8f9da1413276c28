"""Checks of single settings of a strategy: the right kind of value, within its limits, under a known name."""

from __future__ import annotations

import copy
import math
from types import MappingProxyType
from typing import Any

from torchfleet.errors import StrategyError
from torchfleet.strategy.fields import ALIASES, CONFIGS, BuildStrategy, ExecutionStrategy, Key

A_SYNC_DEFAULTS: dict[str, Any] = {
    "k_steps": 0,
    "half_async": False,
    "max_merge_var_num": 1,
    "send_queue_size": 16,
    "independent_recv_thread": False,
    "min_send_grad_num_before_recv": 1,
    "thread_pool_size": 1,
    "send_wait_times": 1,
    "launch_barrier": True,
    "heter_worker_device_guard": "cpu",
}
_AT_LEAST = {
    "k_steps": 0,
    "max_merge_var_num": 1,
    "send_queue_size": 1,
    "min_send_grad_num_before_recv": 1,
    "thread_pool_size": 1,
    "send_wait_times": 0,
}
OBJECTS = {"build_strategy": BuildStrategy, "execution_strategy": ExecutionStrategy}


def checked_a_sync(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise StrategyError(f"a_sync_configs expects a dictionary, found {given!r}")
    for key, value in given.items():
        if key not in A_SYNC_DEFAULTS:
            raise StrategyError(unknown("a_sync_configs", key, A_SYNC_DEFAULTS))
        expected = type(A_SYNC_DEFAULTS[key])
        if type(value) is not expected:
            raise StrategyError(f"a_sync_configs['{key}'] expects a {expected.__name__}, found {value!r}")
        if key in _AT_LEAST and value < _AT_LEAST[key]:
            raise StrategyError(f"a_sync_configs['{key}'] must be at least {_AT_LEAST[key]}, found {value}")
    if given.get("k_steps", 0) and given.get("half_async", False):
        raise StrategyError(
            "a_sync_configs: k_steps > 0 is geo training and half_async is another mode. Choose one of them."
        )
    guard = given.get("heter_worker_device_guard", "cpu")
    if guard != "cpu":
        raise StrategyError(
            f"a_sync_configs['heter_worker_device_guard']={guard!r}: heter workers are not available yet; use 'cpu'"
        )
    return {**A_SYNC_DEFAULTS, **given}


def defaults(keys: dict[str, Key]) -> dict[str, Any]:
    return {name: _plain(key.default) for name, key in keys.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def flat(name: str, values: Any) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in values.items()}


def checked_keys(name: str, given: Any) -> dict[str, Any]:
    """A `<name>_configs` dictionary; keys that are not given keep their default."""
    where, known = f"{name}_configs", CONFIGS[name]
    if not isinstance(given, (dict, MappingProxyType)):
        raise StrategyError(f"{where} expects a dictionary, found {given!r}")
    checked: dict[str, Any] = {}
    for key, value in given.items():
        own = ALIASES.get(name, {}).get(key, key)
        if own not in known:
            raise StrategyError(unknown(where, key, {**known, **ALIASES.get(name, {})}))
        if own in checked:
            raise StrategyError(f"{where}: '{key}' and '{own}' are two names of one key; give one of them")
        checked[own] = checked_key(f"{where}['{key}']", known[own], value)
    return {**defaults(known), **checked}


def checked_key(name: str, key: Key, value: Any) -> Any:
    expected = type(key.default)
    if expected is tuple:
        if not isinstance(value, (list, tuple)):
            raise StrategyError(f"{name} expects a list, found {value!r}")
        value = list(value)
    elif expected is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = float(value)
    elif type(value) is not expected:
        raise StrategyError(f"{name} expects a {expected.__name__}, found {value!r}")
    if key.only and value != _plain(key.default):
        raise StrategyError(f"{name}={value!r} cannot be had: {key.only}. Leave it at {_plain(key.default)!r}.")
    if key.choices and value not in key.choices:
        raise StrategyError(f"{name} must be one of {', '.join(map(repr, key.choices))}, found {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise StrategyError(f"{name} must be a finite number, found {value!r}")
    if key.at_least is not None and value < key.at_least:
        raise StrategyError(f"{name} must be at least {key.at_least:g}, found {value!r}")
    if key.at_most is not None and value > key.at_most:
        raise StrategyError(f"{name} must be at most {key.at_most:g}, found {value!r}")
    return value


def checked_object(name: str, value: Any) -> Any:
    """A BuildStrategy or ExecutionStrategy, or a dictionary of its fields, as a file has it."""
    expected = OBJECTS[name]
    if isinstance(value, dict):
        value = expected(**{str(key): item for key, item in value.items()})
    if not isinstance(value, expected):
        raise StrategyError(f"{name} expects a fleet.{expected.__name__}, found {value!r}")
    return copy.deepcopy(value)  # not the caller's own


def unknown(where: str, name: str, known: dict[str, Any]) -> str:
    return f"{where} has no field '{name}'; it has {', '.join(sorted(known))}"
