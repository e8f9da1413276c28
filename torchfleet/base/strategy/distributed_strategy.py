"""DistributedStrategy: every setting of a job, checked on assignment."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from torchfleet.base.errors import StrategyError
from torchfleet.base.pages import page
from torchfleet.base.strategy import prototxt
from torchfleet.base.strategy.collective_fields import (
    CONFIGS,
    DEGREES,
    FIELDS,
    OBJECTS,
    SWITCHES,
    CollectiveFields,
    check_hybrid,
)
from torchfleet.base.strategy.configs import Configs, aliases_of
from torchfleet.base.strategy.execution import ObjectFields
from torchfleet.base.strategy.fields import fields_of
from torchfleet.base.strategy.paddle_fields import OLD_FIELDS, reasons
from torchfleet.base.strategy.server_fields import ACTS_IN, SHARED_KEYS, AsyncConfigs, ServerFields

_COLLECTIVE = (*FIELDS, *(f"{name}_configs" for name in CONFIGS), *OBJECTS)
_KEYS = fields_of(AsyncConfigs)
_ORDER = (*fields_of(ServerFields), *_COLLECTIVE)  # in files and in print: dictionaries follow switches

_MOST_VALUES = 10_000  # in a file


def _from_yaml(path: str | Path) -> dict[str, Any]:
    """The fields in a file. Unknown or wrong fields are found when they are set."""
    if Path(path).suffix == ".prototxt":
        return prototxt.load(path)
    try:
        fields = msgspec.yaml.decode(Path(path).read_bytes())
    except (OSError, ValueError, msgspec.MsgspecError) as error:  # ValueError: dates and numbers of YAML
        raise StrategyError(f"cannot read a strategy from {path}: {error}") from None
    if _is_endless(fields):
        raise StrategyError(
            f"{path} stands for more than {_MOST_VALUES:,} values, and no strategy has as many: write it without "
            "aliases (*)"
        )
    if not isinstance(fields, dict):
        raise StrategyError(f"{path} should hold `field: value` lines, found {type(fields).__name__}")
    return {str(name): value for name, value in fields.items()}


def _replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: others that read or write it now see all of the old or all of a new one."""
    if path.exists() and not path.is_file():  # a pipe or a terminal
        path.write_bytes(data)
        return
    target = path.resolve()  # a link stays
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


class Loader:
    """A method that, called on the class, makes a strategy from a file; called on a strategy, changes that strategy."""

    def __init__(self, read: Callable[[str | Path], dict[str, Any]]) -> None:
        self._read = read

    def __get__(
        self, instance: DistributedStrategy | None, owner: type[DistributedStrategy]
    ) -> Callable[[str | Path], DistributedStrategy]:
        if instance is None:
            return lambda path: owner(**self._read(path))
        return lambda path: instance.take(self._read(path))


class DistributedStrategy(ServerFields, CollectiveFields):
    """Settings of a job, set by attribute or keyword. No setting is silently ignored.

    A dictionary is assigned as a whole, `strategy.amp_configs = {"incr_ratio": 4.0}`; missing keys have their
    default. It is read by `strategy.amp_configs.incr_ratio` or `strategy.amp_configs["incr_ratio"]`.

    For a parameter-server job:

    - `a_sync`: False: sync. True: async; geo, half_async and hybrid by a_sync_configs.
    - `a_sync_configs`: a dictionary; docs/modes/README.md explains each key.
    - `rpc_retry_times`: how often a request without a reply is retried (3)
    - `rpc_timeout`: seconds without a reply after which a request fails and names the server (30)
    - `sync_timeout`: seconds that a worker waits for the others in sync mode and at barriers (1800)
    - `sync_mean`: where an update is a mean (sync and hybrid mode, gather), gradients are weighted by the "samples" of
      each worker, or equally for all "workers" ("samples")

    For a collective job (fleet.init(is_collective=True)) and the network in hybrid mode: a switch for each strategy
    (amp, recompute, gradient_merge, lars, lamb, dgc, localsgd, adaptive_localsgd, sharding, pipeline, tensor_parallel,
    context_parallel, fp16_allreduce, use_hierarchical_allreduce, sync_batch_norm), each with its dictionary
    `<name>_configs`. docs/collective/README.md explains which to choose.
    """

    _OWN = ("_used_by",)
    _PADDLE_NAMES: ClassVar[Mapping[str, str]] = {**reasons(""), **OLD_FIELDS}

    def __init__(self, /, **fields: Any) -> None:
        self._used_by = ""
        super().__init__(**dict(sorted(fields.items())))

    def __copy__(self) -> DistributedStrategy:
        return copy.deepcopy(self)  # a shallow copy would share its values with the original

    def __repr__(self) -> str:
        """A table of the active settings: collective ones, or else those of the servers' mode; in hybrid mode both."""
        changed = {name: value for name, value in self.differences().items() if name in _COLLECTIVE}
        rows: dict[str, Any] = {}
        for name in SWITCHES:
            if getattr(self, name):
                rows[name] = True
                rows.update(_flat(f"{name}_configs", self._in_force(name)))
        for name, value in changed.items():
            shown = self._in_force(name.removesuffix("_configs")) if name.endswith("_configs") else value
            rows.update(_flat(name, shown) if isinstance(shown, Mapping) else {name: shown})
        if not rows or self.mode == "hybrid":
            rows = {"mode": self.mode, **rows}
            has_mean = self.mode in ("sync", "hybrid") or self.a_sync_configs.gather > 1
            hidden = {"a_sync_configs", *([] if has_mean else ["sync_mean"])}
            rows.update({name: getattr(self, name) for name in fields_of(ServerFields) if name not in hidden})
            rows.update(_flat("a_sync_configs", self.a_sync_configs))
        width = max(len(name) for name in rows)
        return "\n".join(["DistributedStrategy", *(f"  {name:<{width}}  {value}" for name, value in rows.items())])

    def _in_force(self, name: str) -> Mapping[str, Any]:
        """The dictionary of a strategy, with its degree from hybrid_configs."""
        configs: Mapping[str, Any] = getattr(self, f"{name}_configs", {})
        own, other = DEGREES.get(name, ("", ""))
        degree = self.hybrid_configs[other] if own else 0
        return {**configs, own: degree} if degree > 1 else configs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistributedStrategy) and all(
            getattr(self, name) == getattr(other, name) for name in _ORDER
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def mode(self) -> str:
        """sync, half_async, async, geo or hybrid."""
        if not self.a_sync:
            return "sync"
        if self.a_sync_configs.k_steps:
            return "geo"
        if self.a_sync_configs.hybrid:
            return "hybrid"
        return "half_async" if self.a_sync_configs.half_async else "async"

    def is_default(self, name: str) -> bool:
        """Whether a field has its default value."""
        return bool(getattr(self, name) == self._FIELDS[name].default)

    def differences(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as plain values."""
        return {name: _plain(getattr(self, name)) for name in _ORDER if not self.is_default(name)}

    def changed_values(self) -> dict[str, Any]:
        """Like `differences`, with the changed keys of dictionaries listed separately: `a_sync_configs.k_steps`."""
        default, found = type(self)(), {}
        for name, value in self.differences().items():
            if isinstance(value, Mapping):
                usual = _plain(getattr(default, name))
                found.update(_flat(name, {key: each for key, each in value.items() if usual.get(key) != each}))
            else:
                found[name] = value
        return found

    def shared_fields(self) -> dict[str, Any]:
        """The settings that must be equal on all workers of a job with servers, by name: the mode, and the settings
        that decide how pushes become updates. Timeouts and queues may differ between workers.
        """
        shared: dict[str, Any] = {"a_sync": self.a_sync, "sync_mean": self.sync_mean}
        shared |= {f"a_sync_configs.{name}": self.a_sync_configs[name] for name in SHARED_KEYS}
        for name in _COLLECTIVE if self.mode == "hybrid" else ():  # the network is trained like a collective job
            value = _plain(getattr(self, name))
            shared |= _flat(name, value) if isinstance(value, Mapping) else {name: value}
        return shared

    def lock(self, user: str) -> None:
        """Make the strategy read-only. `user` is named in the error that a change raises."""
        self._used_by = self._used_by or user

    def unlock(self) -> None:
        """Allow changes again, after the job that used the strategy has ended."""
        self._used_by = ""

    def freeze(self, user: str) -> None:
        """Check the strategy for a parameter-server job, including contradictions between fields, then `lock` it."""
        if self.mode == "hybrid":
            check_hybrid(self)
        for name in _COLLECTIVE if self.mode != "hybrid" else ():
            if not self.is_default(name):
                raise StrategyError(
                    f"{name} is a setting of collective training, and this job has parameter servers: use "
                    f"fleet.init(is_collective=True), or hybrid mode (a_sync=True, a_sync_configs={{'hybrid': True}}), "
                    f"or leave {name} out."
                )
        self._check_mode()
        self.lock(user)

    def _check_mode(self) -> None:
        """Raise StrategyError for settings of another mode."""
        configs = self.a_sync_configs
        for name in ("k_steps", "half_async", "hybrid"):
            if configs[name] and not self.a_sync:
                raise StrategyError(
                    f"a_sync_configs['{name}']={configs[name]} needs a_sync=True: it is a form of asynchronous "
                    f"training. Set a_sync=True, or leave '{name}' out for synchronous training."
                )
        if self.mode not in ("sync", "hybrid") and configs.gather < 2 and not self.is_default("sync_mean"):
            raise StrategyError(
                f"sync_mean={self.sync_mean!r} acts where one update is made of several pushes, in sync and hybrid "
                f"mode and with a_sync_configs['gather'], and this strategy is {self.mode}. Leave sync_mean out, or "
                "set a_sync=False."
            )
        for name, modes in ACTS_IN.items():
            if self.mode not in modes and configs[name] != _KEYS[name].default:
                raise StrategyError(
                    f"a_sync_configs['{name}']={configs[name]} acts in {' and '.join(modes)} mode only, and this "
                    f"strategy is {self.mode}. Leave '{name}' out, or choose another mode ({page('modes')})."
                )

    def save_to_yaml(self, path: str | Path) -> None:
        """Write the settings that differ from the defaults. All ranks of a job may write the same file and read it."""
        _replace(Path(path), msgspec.yaml.encode(self.differences()))

    # On the class: returns a new strategy. On a strategy: sets the fields of the file on it.
    load_from_yaml = Loader(_from_yaml)  # a `.prototxt` is read as Paddle's
    load_from_prototxt = Loader(prototxt.load)  # a file of Paddle's save_to_prototxt; see prototxt.py

    def take(self, fields: Mapping[str, Any]) -> DistributedStrategy:
        """Set all of these fields, or none if one is wrong. Dictionaries are merged by key, lists are replaced."""
        changed = copy.copy(self)
        for name, value in fields.items():
            setattr(changed, name, _merged(getattr(changed, name), value))
        vars(self).update(vars(changed))
        return self

    def _assign(self, name: str, value: Any) -> None:
        if self._used_by:
            raise StrategyError(
                f"{name}: this strategy was used by {self._used_by} and can no longer change. Set it before."
            )
        super()._assign(name, value)


def _plain(value: Any) -> Any:
    """A value as it is stored in a file."""
    if isinstance(value, Configs):
        return dict(value)
    return dict(vars(value)) if isinstance(value, ObjectFields) else value


def _is_endless(value: Any) -> bool:
    """Whether a value has too many elements, counted once per reference: with YAML aliases, a few lines can expand
    beyond all memory, for instance in the text of an error.
    """
    waiting, num = [value], 0
    while waiting and num <= _MOST_VALUES:
        found = waiting.pop()
        num += 1
        if isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, list):
            waiting += found
    return num > _MOST_VALUES


def _merged(present: Any, given: Any) -> Any:
    """Merge the given settings into a dictionary; any other value is replaced."""
    if not isinstance(present, (Configs, ObjectFields)) or not isinstance(given, Mapping):
        return given
    aliases = aliases_of(type(present)) if isinstance(present, Configs) else {}
    return {**vars(present), **{aliases.get(key, key): value for key, value in given.items()}}


def _flat(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in values.items()}
