"""DistributedStrategy: every setting of a job, checked the moment it is set."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from torchfleet.errors import StrategyError, UnknownFieldError
from torchfleet.strategy import prototxt
from torchfleet.strategy.checks import (
    A_SYNC_DEFAULTS,
    OBJECTS,
    checked_a_sync,
    checked_key,
    checked_keys,
    checked_object,
    defaults,
    flat,
    unknown,
)
from torchfleet.strategy.fields import CONFIGS, FIELDS, SWITCHES

_ASYNC_ONLY = (
    "max_merge_var_num",
    "send_queue_size",
    "independent_recv_thread",
    "min_send_grad_num_before_recv",
    "thread_pool_size",
    "send_wait_times",
)
_WEEK = 7 * 24 * 3600.0  # a server takes no longer wait (server/commands.py)
_AT_MOST = {"rpc_retry_times": 1000, "rpc_timeout": _WEEK, "sync_timeout": _WEEK}

_COLLECTIVE = (*FIELDS, *(f"{name}_configs" for name in CONFIGS), *OBJECTS)


class DistributedStrategy:
    """Settings of a job; fields by attribute or keyword. Nothing is accepted and ignored.

    Of a parameter-server job:
    a_sync            False: sync. True: async, or geo if a_sync_configs["k_steps"] > 0.
    a_sync_configs    a dictionary; keys that are not given keep their default. docs/modes/README.md explains each.
    rpc_retry_times   how often a request without an answer is sent again (3)
    rpc_timeout       seconds until a server without an answer is given up and named (30)
    sync_timeout      seconds that a worker waits for the others in sync mode and at barriers (1800)

    Of a collective job (fleet.init(is_collective=True)): a switch for each strategy (amp, recompute, gradient_merge,
    lars, lamb, dgc, localsgd, adaptive_localsgd, sharding, pipeline, tensor_parallel, fp16_allreduce,
    use_hierarchical_allreduce, sync_batch_norm), each with its dictionary `<name>_configs`. docs/collective/README.md
    tells which to choose.
    """

    def __init__(self, /, **fields: Any) -> None:
        self._values: dict[str, Any] = {
            "a_sync": False,
            "a_sync_configs": dict(A_SYNC_DEFAULTS),
            "rpc_retry_times": 3,
            "rpc_timeout": 30.0,
            "sync_timeout": 1800.0,
            **{name: key.default for name, key in FIELDS.items()},
            **{f"{name}_configs": defaults(keys) for name, keys in CONFIGS.items()},
            **{name: made() for name, made in OBJECTS.items()},
        }
        self._used_by = ""
        for name, value in sorted(fields.items()):  # a_sync comes before a_sync_configs
            if name not in self._values:
                raise StrategyError(unknown("DistributedStrategy", name, self._values))
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            raise UnknownFieldError(unknown("DistributedStrategy", name, self._values))
        value = self._values[name]
        return MappingProxyType(value) if isinstance(value, dict) else value  # set whole, so that it is checked

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if name not in self._values:
            raise StrategyError(unknown("DistributedStrategy", name, self._values))
        if self._used_by:
            raise StrategyError(
                f"{name}: this strategy was used by {self._used_by} and can no longer change. Set it before."
            )
        self._values[name] = self._checked(name, value)

    def __copy__(self) -> DistributedStrategy:
        return copy.deepcopy(self)  # a copy that shared its values would change the original

    def __repr__(self) -> str:
        """A table of what is in force: every collective strategy that is on; without any, the parameter-server mode."""
        changed = {name: value for name, value in self.differences().items() if name in _COLLECTIVE}
        rows: dict[str, Any] = {}
        for name in SWITCHES:
            if self._values[name]:
                rows[name] = True
                rows.update(flat(f"{name}_configs", self._values.get(f"{name}_configs", {})))
        for name, value in changed.items():
            rows.update(flat(name, value) if isinstance(value, dict) else {name: value})
        if not rows:
            rows["mode"] = self.mode
            rows.update({name: value for name, value in self._values.items() if name not in _COLLECTIVE})
            rows.update(flat("a_sync_configs", rows.pop("a_sync_configs")))
        width = max(len(name) for name in rows)
        return "\n".join(["DistributedStrategy", *(f"  {name:<{width}}  {value}" for name, value in rows.items())])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistributedStrategy) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    @property
    def mode(self) -> str:
        """sync, half_async, async or geo."""
        configs = self._values["a_sync_configs"]
        if not self._values["a_sync"]:
            return "sync"
        if configs["k_steps"]:
            return "geo"
        return "half_async" if configs["half_async"] else "async"

    def is_default(self, name: str) -> bool:
        return bool(self._values[name] == DistributedStrategy()._values[name])

    def differences(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as plain values."""
        default = DistributedStrategy()._values
        differing = {name: value for name, value in self._values.items() if value != default[name]}
        return {name: vars(value) if name in OBJECTS else value for name, value in differing.items()}

    def lock(self, user: str) -> None:
        """From now on a change is an error."""
        self._used_by = self._used_by or user

    def freeze(self, user: str) -> None:
        """For a parameter-server job. Contradictions that depend on two fields are found here."""
        for name in _COLLECTIVE:
            if not self.is_default(name):
                raise StrategyError(
                    f"{name} is a setting of collective training, and this job has parameter servers: use "
                    f"fleet.init(is_collective=True), or leave {name} out."
                )
        configs = self._values["a_sync_configs"]
        if not self._values["a_sync"]:
            for name in ("k_steps", "half_async"):
                if configs[name]:
                    raise StrategyError(
                        f"a_sync_configs['{name}']={configs[name]} needs a_sync=True: it is a form of asynchronous "
                        f"training. Set a_sync=True, or leave '{name}' out for synchronous training."
                    )
        if self.mode != "async":
            for name in _ASYNC_ONLY:
                if configs[name] != A_SYNC_DEFAULTS[name]:
                    raise StrategyError(
                        f"a_sync_configs['{name}']={configs[name]} acts in async mode only, and this strategy is "
                        f"{self.mode}. Leave '{name}' out, or use a_sync=True without k_steps and half_async."
                    )
        self.lock(user)

    def save_to_yaml(self, path: str | Path) -> None:
        """Write the settings that differ from the defaults."""
        Path(path).write_bytes(msgspec.yaml.encode(self.differences()))

    @classmethod
    def load_from_yaml(cls, path: str | Path) -> DistributedStrategy:
        """Read settings back; an unknown or wrong one is an error that names it. A `.prototxt` is one of Paddle's."""
        if Path(path).suffix == ".prototxt":
            return cls.load_from_prototxt(path)
        try:
            fields = msgspec.yaml.decode(Path(path).read_bytes())
        except (OSError, ValueError, msgspec.MsgspecError) as error:  # ValueError: dates and numbers of YAML
            raise StrategyError(f"cannot read a strategy from {path}: {error}") from None
        if not isinstance(fields, dict):
            raise StrategyError(f"{path} should hold `field: value` lines, found {type(fields).__name__}")
        return cls(**{str(name): value for name, value in fields.items()})

    @classmethod
    def load_from_prototxt(cls, path: str | Path) -> DistributedStrategy:
        """The strategy in a file of Paddle's save_to_prototxt; torchfleet/prototxt.py tells how it is understood."""
        return cls(**prototxt.load(path))

    def _checked(self, name: str, value: Any) -> Any:
        if name == "a_sync_configs":
            return checked_a_sync(value)
        if name in OBJECTS:
            return checked_object(name, value)
        if name in FIELDS:
            return checked_key(name, FIELDS[name], value)
        if name in _COLLECTIVE:
            return checked_keys(name.removesuffix("_configs"), value)
        default = self._values[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = (
            number
            if isinstance(default, float)
            else isinstance(value, type(default)) and (number or isinstance(default, bool))
        )
        if not fits:
            raise StrategyError(f"{name} expects a {type(default).__name__}, found {value!r}")
        if number and (value < 0 or (isinstance(default, float) and value <= 0)):
            raise StrategyError(f"{name} cannot be {value!r}: it must be positive")
        if number and not (math.isfinite(value) and value <= _AT_MOST[name]):
            raise StrategyError(f"{name} must be at most {_AT_MOST[name]:g}, found {value!r}")
        return type(default)(value)
