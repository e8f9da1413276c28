"""Read a DistributedStrategy from a file of Paddle's save_to_prototxt, which is in protobuf's text format.

    amp: true
    amp_configs {
      init_loss_scaling: 32768
      custom_white_list: "softmax"
      custom_white_list: "gelu"
    }

textformat.py parses the text and paddle_fields.py lists the fields that only Paddle has. `load` returns the fields for
torchfleet.DistributedStrategy(**fields).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.collective_fields import ALIASES, CONFIGS, FIELDS, OBJECTS
from torchfleet.base.strategy.fields import DictKey, Key, ListKey, fields_of
from torchfleet.base.strategy.paddle_fields import ABSENT, DIFFERENT, LEFT, RENAMED, WITHOUT_SWITCH
from torchfleet.base.strategy.server_fields import AsyncConfigs
from torchfleet.base.strategy.textformat import Message, Word, parse

_OWN_KEYS = (
    *("half_async", "hybrid", "hybrid_keep_seconds", "exchange", "balance", "quorum", "quorum_max_age"),
    *("max_staleness", "gather", "gather_max_age"),
)
_KNOWN: dict[str, Mapping[str, Key[Any]]] = {
    "": FIELDS,
    **{f"{name}_configs": keys for name, keys in CONFIGS.items()},
    **OBJECTS,
    # Without the keys that Paddle does not have.
    "a_sync_configs": {name: key for name, key in fields_of(AsyncConfigs).items() if name not in _OWN_KEYS},
}
_MESSAGES = {name for name in (*_KNOWN, *ABSENT, *WITHOUT_SWITCH) if name}
_DEGREES = {"tensor_parallel": "mp_degree", "pipeline": "pp_degree", "sharding": "sharding_degree"}
_BOOLEANS = {"true": True, "false": False, "True": True, "False": False, "t": True, "f": False, "1": True, "0": False}
_LARGEST = float(np.finfo(np.float64).max)
_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def load(path: str | Path) -> dict[str, Any]:
    """Read the fields of Paddle's file, for torchfleet.DistributedStrategy(**fields).

    - A `<name>_configs` whose switch is off is skipped: Paddle writes it out, but it has no effect.
    - A field that only Paddle has is accepted at Paddle's default; another value is an error that gives the reason.
      A field that neither has is an error.
    - Degrees above 1 in hybrid_configs switch tensor_parallel, pipeline and sharding on, as they do in Paddle.
    - `a_sync: true` is Paddle's default. It counts only if a_sync_configs has a k_steps of 0 or more, which Paddle
      writes when the user sets a_sync. Otherwise torchfleet's default holds.
    - amp_configs without decr_ratio has Paddle's 0.8, not torchfleet's 0.5.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StrategyError(f"cannot read a strategy from {path}: {error}") from None
    try:
        return _fields(parse(text))
    except StrategyError as error:
        raise StrategyError(f"{path}: {error}") from None


def _fields(message: Message) -> dict[str, Any]:
    fields = _translated("", {name: values for name, values in message.items() if name not in _MESSAGES})
    nested = {name: _message(name, values) for name, values in message.items() if name in _MESSAGES}
    hybrid = _translated("hybrid_configs", nested.pop("hybrid_configs", {}))
    unused = {f"{name}_configs" for name in CONFIGS if not fields.get(name)}.union(WITHOUT_SWITCH)
    for switch, degree in _DEGREES.items():
        fields.update({switch: True} if hybrid.get(degree, 1) > 1 else {})
    if fields.get("pipeline"):  # the other dictionaries hold a degree, which hybrid_configs replaces
        unused.discard("pipeline_configs")
    fields.update({"hybrid_configs": hybrid} if hybrid else {})
    fields.update(_a_sync(message.get("a_sync", [Word("true")]), nested.pop("a_sync_configs", {})))
    for name, configs in nested.items():
        if name not in unused:
            fields.update({name: given} if (given := _translated(name, configs)) else {})
    for name, defaults in DIFFERENT.items():
        if name not in unused:
            fields[name] = {**defaults, **fields.get(name, {})}
    return fields


def _a_sync(given: list[Any], configs: Message) -> dict[str, Any]:
    chosen = _translated("a_sync_configs", configs)
    if chosen.get("k_steps", -1) < 0:
        return {}
    a_sync = _value("a_sync", Key(True), given)
    return {"a_sync": a_sync, "a_sync_configs": chosen} if a_sync or chosen["k_steps"] == 0 else {"a_sync": a_sync}


def _translated(where: str, message: Message) -> dict[str, Any]:
    """The fields of a message that torchfleet has, in its types. Other fields must have Paddle's default."""
    known, absent, left = _KNOWN.get(where, {}), ABSENT.get(where, {}), LEFT.get(where, {})
    renamed = {**RENAMED.get(where, {}), **ALIASES.get(where.removesuffix("_configs"), {})}
    found: dict[str, Any] = {}
    for given, values in message.items():
        own, name = renamed.get(given, given), f"{where}.{given}".lstrip(".")
        if name in ABSENT:
            _translated(name, _message(name, values))
        elif own in known and own in found:
            raise StrategyError(f"{name} and {own} are two names of one field; keep one of them")
        elif own in known:
            value = _value(name, known[own], values)
            found.update({} if value in left.get(own, ()) else {own: value})
        elif given in absent:
            _refuse_unless_default(name, absent[given].defaults, absent[given].reason, values)
        elif (where, given) != ("", "a_sync"):
            raise StrategyError(f"Paddle has no field '{name}' that is known here (2.0 to 2.6): check its spelling")
    return found


def _refuse_unless_default(name: str, defaults: tuple[Any, ...], reason: str, values: list[Any]) -> None:
    if defaults == ((),):
        if any(value != {} for value in values):
            raise StrategyError(f"{name} is not supported: {reason}. Leave it out.")
    elif values[0] not in defaults and (value := _value(name, Key(defaults[0]), values)) not in defaults:
        raise StrategyError(f"{name}={value!r} is not supported: {reason}. Leave it out, or at {defaults[0]!r}.")


def _single(name: str, values: list[Any]) -> Any:
    if len(values) > 1:
        raise StrategyError(f"{name} stands {len(values)} times; it has one value")
    return values[0]


def _message(name: str, values: list[Any]) -> Message:
    value = _single(name, values)
    if not isinstance(value, dict):
        raise StrategyError(f"{name} expects fields in braces, `{name} {{ ... }}`, found {value!r}")
    return value


def _value(name: str, key: Key[Any], values: list[Any]) -> Any:
    """Convert the value to the type of the key. The text alone does not distinguish 1 from true, or a list of one."""
    if isinstance(key, ListKey):
        return [_scalar(name, key.element, value) for value in values]
    if isinstance(key, DictKey):
        raise StrategyError(f"{name} is no field of Paddle's: give it in Python, or in a YAML file")
    return _scalar(name, type(key.default), _single(name, values))


def _scalar(name: str, kind: type, value: Any) -> Any:
    if kind is bool and (isinstance(value, Word) or type(value) is int) and str(value) in _BOOLEANS:
        return _BOOLEANS[str(value)]
    if kind is float and isinstance(value, (int, float)):
        with np.errstate(over="ignore"):  # a number beyond the range of protobuf's float is infinite there
            single = np.float32(min(max(value, -_LARGEST), _LARGEST))  # an integer may exceed the range of any float
        return float(str(single))  # older protobuf wrote a float of 0.001 as 0.0010000000474974513
    if (kind is int and type(value) is int) or (kind is str and isinstance(value, str)):
        return str(value) if kind is str else value
    raise StrategyError(f"{name} expects a {_KINDS[kind]}, found {value!r}")
