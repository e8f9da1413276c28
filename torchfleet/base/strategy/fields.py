"""Declares settings: a field has a type, a default and limits, and checks each value that is assigned.

    class LarsConfigs(Configs, field="lars_configs"):
        lars_coeff = Key(0.001, at_least=0.0)

    class CollectiveFields(Fields):
        lars = Switch("layer-wise learning rates for large batches")
        lars_configs = ConfigsField(LarsConfigs)

Keys and fields are descriptors, so editors and type checkers know that `strategy.lars` is a bool and that
`strategy.lars_configs.lars_coeff` is a float.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, overload

from torchfleet.base.errors import StrategyError, UnknownFieldError

Value = TypeVar("Value")
Element = TypeVar("Element")
OwnKey = TypeVar("OwnKey", bound="Key[Any]")

_NUMBERS: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float)}


class Key(Generic[Value]):
    """A key of a dictionary of settings. It is read as an attribute and cannot be set, since Configs is read-only.

    default    also determines the type of the values; an integer is accepted for a float
    choices    the allowed values; (): all
    only       the reason why only the default is available, if so
    help       the help text on a command line
    """

    def __init__(
        self,
        default: Value,
        help: str = "",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        choices: tuple[Value, ...] = (),
        only: str = "",
    ) -> None:
        self.name, self.default, self.help = "", default, help
        self.at_least, self.at_most, self.choices, self.only = at_least, at_most, choices, only

    def __set_name__(self, owner: type[Fields], name: str) -> None:
        self.name = name

    @overload
    def __get__(self: OwnKey, instance: None, owner: type[Fields]) -> OwnKey: ...

    @overload
    def __get__(self, instance: Fields, owner: type[Fields]) -> Value: ...

    def __get__(self, instance: Fields | None, owner: type[Fields]) -> Any:
        return self if instance is None else vars(instance)[self.name]

    def __set__(self, instance: Fields, value: NoReturn) -> None:
        instance._assign(self.name, value)

    def initial(self) -> Value:
        """The default, as a value that the caller may own."""
        return self.default

    def checked(self, where: str, value: Any) -> Value:
        """The value as it is stored. Raises StrategyError for a wrong value; its message begins with `where`."""
        kept = self._of_type(where, value)
        if self.only and kept != self.default:
            raise StrategyError(f"{where}={kept!r} is not supported: {self.only}. Leave it at {self.default!r}.")
        if self.choices and kept not in self.choices:
            raise StrategyError(f"{where} must be one of {', '.join(map(repr, self.choices))}, found {kept!r}")
        if isinstance(kept, float) and not math.isfinite(kept):
            raise StrategyError(f"{where} must be a finite number, found {kept!r}")
        if self.at_least is not None and kept < self.at_least:
            raise StrategyError(f"{where} must be at least {self.at_least:g}, found {kept!r}")
        if self.at_most is not None and kept > self.at_most:
            raise StrategyError(f"{where} must be at most {self.at_most:g}, found {kept!r}")
        return kept  # type: ignore[no-any-return]

    def _of_type(self, where: str, value: Any) -> Any:
        expected = type(self.default)
        if isinstance(value, _NUMBERS.get(expected, ())) and not isinstance(value, bool):
            return expected(value)  # type: ignore[call-arg]
        if type(value) is not expected:
            raise StrategyError(f"{where} expects a {expected.__name__}, found {value!r}")
        return value


class ListKey(Key[list[Element]]):
    """A key whose value is a list. The strategy that uses it checks its elements."""

    def __init__(self, element: type[Element], default: Sequence[Element] = (), *, only: str = "") -> None:
        super().__init__(list(default), only=only)
        self.element = element

    def initial(self) -> list[Element]:
        return list(self.default)

    def _of_type(self, where: str, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise StrategyError(f"{where} expects a list, found {value!r}")
        return list(value)


class NamesKey(ListKey[str]):
    """A list of names or patterns. A class (of modules) stands for its name, as `class_name` gives it."""

    def __init__(self) -> None:
        super().__init__(str)

    def _of_type(self, where: str, value: Any) -> Any:
        names = [class_name(entry) if isinstance(entry, type) else entry for entry in super()._of_type(where, value)]
        wrong = [entry for entry in names if not isinstance(entry, str) or not entry]
        if wrong:
            raise StrategyError(f"{where} expects names or classes of modules, found {wrong[0]!r} among {names!r}")
        return names


class DictKey(Key[dict[str, Any]]):
    """A key whose value is a dictionary with text as keys. The strategy that uses it checks its values."""

    def __init__(self) -> None:
        super().__init__({})

    def initial(self) -> dict[str, Any]:
        return {}

    def _of_type(self, where: str, value: Any) -> Any:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise StrategyError(f"{where} expects a dictionary with text as keys, found {value!r}")
        return dict(value)


class Field(Key[Value]):
    """A field that can be set. Values are checked on assignment."""

    def __set__(self, instance: Fields, value: Value) -> None:
        instance._assign(self.name, value)


class Switch(Field[bool]):
    """A field that turns something on; `help` says what."""

    def __init__(self, help: str) -> None:
        super().__init__(False, help)


class Fields:
    """An object whose public attributes are the fields that its class declares, in `_FIELDS`.

    The object's `__dict__` holds the values under the names of the fields. An unknown name raises an error that
    gives the nearest known name, or all of them.
    """

    _FIELDS: ClassVar[Mapping[str, Key[Any]]] = {}
    _OWN: ClassVar[tuple[str, ...]] = ()  # attributes that are not fields
    _PADDLE_NAMES: ClassVar[Mapping[str, str]] = {}  # names of Paddle that are not fields here → what to use instead

    def __init_subclass__(cls) -> None:
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, Key)}
        inherited = [base._FIELDS for base in cls.__bases__ if issubclass(base, Fields)]
        cls._FIELDS = {name: key for keys in (*inherited, declared) for name, key in keys.items()}

    def __init__(self, /, **fields: Any) -> None:
        vars(self).update({name: key.initial() for name, key in self._FIELDS.items()})
        for name, value in fields.items():
            if name not in self._FIELDS:
                raise StrategyError(self._unknown(name))
            setattr(self, name, value)

    if not TYPE_CHECKING:  # with these methods, type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise UnknownFieldError(self._unknown(name))

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self._FIELDS and name not in self._OWN:
                raise StrategyError(self._unknown(name))
            object.__setattr__(self, name, value)

    def _assign(self, name: str, value: Any) -> None:
        """Set a field, or raise StrategyError."""
        vars(self)[name] = self._FIELDS[name].checked(self._where(name), value)

    def _where(self, name: str) -> str:
        """How errors name a field of this object."""
        return name

    def _unknown(self, name: str) -> str:
        """The text of an error about a name that is not a field."""
        return unknown(type(self).__name__, name, sorted(self._FIELDS), self._PADDLE_NAMES)


def fields_of(owner: type[Fields]) -> Mapping[str, Key[Any]]:
    """The keys or fields that a class declares, by name, in declaration order."""
    return owner._FIELDS


def class_name(kind: type) -> str:
    """A class as a setting names it: `torch.nn.BatchNorm2d`, as one imports it, and with its module otherwise."""
    module = "torch.nn" if kind.__module__.startswith("torch.nn.modules.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def unknown(where: str, name: object, known: Iterable[str], instead: Mapping[str, str]) -> str:
    """The text of an error about an unknown name. `instead`: names of Paddle → what to use here. For other names,
    the text gives the nearest known name, or all of them if none is near.
    """
    names, text = list(known), str(name)
    near = get_close_matches(text, names, n=1)
    advice = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(names)}"
    return f"{where} has no field '{name}'; {instead.get(text.lstrip('_'), advice)}"
