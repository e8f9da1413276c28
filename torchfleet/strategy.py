"""DistributedStrategy: every setting of a job, checked the moment it is set."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from torchfleet.errors import StrategyError, UnknownFieldError

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

# Fields of the specification whose feature is still to be built, with the value at which they do nothing.
_NOT_YET: dict[str, Any] = {
    "amp": False,
    "recompute": False,
    "gradient_merge": False,
    "lars": False,
    "lamb": False,
    "dgc": False,
    "localsgd": False,
    "adaptive_localsgd": False,
    "sharding": False,
    "pipeline": False,
    "tensor_parallel": False,
    "fp16_allreduce": False,
    "use_hierarchical_allreduce": False,
    "sync_batch_norm": False,
    "find_unused_parameters": False,
    "cudnn_exhaustive_search": False,
    "cudnn_batchnorm_spatial_persistent": False,
    **{name: {} for name in (
        "amp_configs", "recompute_configs", "gradient_merge_configs", "lars_configs", "lamb_configs", "dgc_configs",
        "localsgd_configs", "adaptive_localsgd_configs", "sharding_configs", "pipeline_configs",
        "tensor_parallel_configs", "hybrid_configs",
    )},
    "fuse_all_reduce_ops": True,
    "fuse_grad_size_in_MB": 32,
    "fuse_grad_size_in_num": 8,
    "last_comm_group_size_MB": 1,
    "nccl_comm_num": 1,
    "sync_nccl_allreduce": True,
    "hierarchical_allreduce_inter_nranks": 1,
    "conv_workspace_size_limit": 512,
    "build_strategy": None,
    "execution_strategy": None,
}  # fmt: skip


class DistributedStrategy:
    """Settings of a parameter-server job; fields by attribute or keyword. Nothing is accepted and ignored.

    a_sync            False: sync. True: async, or geo if a_sync_configs["k_steps"] > 0.
    a_sync_configs    a dictionary; keys that are not given keep their default. docs/modes.md explains each.
    rpc_retry_times   how often a request without an answer is sent again (3)
    rpc_timeout       seconds until a server without an answer is given up and named (30)
    sync_timeout      seconds that a worker waits for the others in sync mode and at barriers (1800)
    """

    def __init__(self, /, **fields: Any) -> None:
        self._values: dict[str, Any] = {
            "a_sync": False,
            "a_sync_configs": dict(A_SYNC_DEFAULTS),
            "rpc_retry_times": 3,
            "rpc_timeout": 30.0,
            "sync_timeout": 1800.0,
            **_NOT_YET,
        }
        self._used_by = ""
        for name, value in sorted(fields.items()):  # a_sync comes before a_sync_configs
            if name not in self._values:
                raise StrategyError(_unknown("DistributedStrategy", name, self._values))
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            raise UnknownFieldError(_unknown("DistributedStrategy", name, self._values))
        value = self._values[name]
        return MappingProxyType(value) if isinstance(value, dict) else value  # set whole, so that it is checked

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if name not in self._values:
            raise StrategyError(_unknown("DistributedStrategy", name, self._values))
        if self._used_by:
            raise StrategyError(
                f"{name}: this strategy was used by {self._used_by} and can no longer change. Set it before."
            )
        if name in _NOT_YET and value != _NOT_YET[name]:
            raise StrategyError(
                f"{name}={value!r} is not available yet: collective strategies are still to come. Leave {name} at "
                f"{_NOT_YET[name]!r}."
            )
        self._values[name] = self._checked(name, value)

    def __copy__(self) -> DistributedStrategy:
        return copy.deepcopy(self)  # a copy that shared its values would change the original

    def __repr__(self) -> str:
        """A table of what is in force."""
        rows = {"mode": self.mode, **{name: value for name, value in self._values.items() if name not in _NOT_YET}}
        configs = rows.pop("a_sync_configs")
        rows.update({f"a_sync_configs.{name}": value for name, value in configs.items()})
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

    def freeze(self, user: str) -> None:
        """From now on a change is an error; contradictions that depend on two fields are found here."""
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
        self._used_by = self._used_by or user

    def save_to_yaml(self, path: str | Path) -> None:
        """Write the settings that differ from the defaults."""
        default = DistributedStrategy()._values
        differing = {name: value for name, value in self._values.items() if value != default[name]}
        Path(path).write_bytes(msgspec.yaml.encode(differing))

    @classmethod
    def load_from_yaml(cls, path: str | Path) -> DistributedStrategy:
        """Read settings back; an unknown or wrong one is an error that names it."""
        try:
            fields = msgspec.yaml.decode(Path(path).read_bytes())
        except (OSError, ValueError, msgspec.MsgspecError) as error:  # ValueError: dates and numbers of YAML
            raise StrategyError(f"cannot read a strategy from {path}: {error}") from None
        if not isinstance(fields, dict):
            raise StrategyError(f"{path} should hold `field: value` lines, found {type(fields).__name__}")
        return cls(**{str(name): value for name, value in fields.items()})

    def _checked(self, name: str, value: Any) -> Any:
        if name == "a_sync_configs":
            return _checked_configs(value)
        default = self._values[name]
        if name in _NOT_YET:
            return copy.deepcopy(_NOT_YET[name])  # not the caller's own dictionary
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


def _checked_configs(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise StrategyError(f"a_sync_configs expects a dictionary, found {given!r}")
    for key, value in given.items():
        if key not in A_SYNC_DEFAULTS:
            raise StrategyError(_unknown("a_sync_configs", key, A_SYNC_DEFAULTS))
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


def _unknown(where: str, name: str, known: dict[str, Any]) -> str:
    return f"{where} has no field '{name}'; it has {', '.join(sorted(known))}"
