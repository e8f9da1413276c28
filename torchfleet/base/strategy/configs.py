"""Dictionaries of settings with typed attributes: lars_configs["epsilon"] and lars_configs.epsilon are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torchfleet.base.errors import StrategyError, UnknownKeyError
from torchfleet.base.strategy.fields import Field, Fields, unknown
from torchfleet.base.strategy.paddle_fields import reasons

OwnConfigs = TypeVar("OwnConfigs", bound="Configs")


class Configs(Fields, Mapping[str, Any]):
    """A read-only dictionary with a fixed set of keys, all of them present. It can only be assigned as a whole.

    The constructor takes a dictionary with some of the keys and checks them; the others have their defaults. A subclass
    declares `field`, its name in DistributedStrategy, and `aliases`, other names of keys that Paddle's documentation
    uses.
    """

    _NAME: ClassVar[str] = ""
    _ALIASES: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, field: str, aliases: Mapping[str, str] | None = None) -> None:
        """`field`: the name of the dictionary in the strategy. (In Python 3.10, ABCMeta takes the keyword `name`.)"""
        super().__init_subclass__()
        cls._NAME, cls._ALIASES = field, aliases or {}
        cls._PADDLE_NAMES = reasons(field)

    def __init__(self, given: Mapping[str, Any] | None = None, /) -> None:
        super().__init__()
        vars(self).update(self._checked(given or {}))
        self._check_together()

    def __getitem__(self, key: str) -> Any:
        if key not in self._FIELDS:
            raise UnknownKeyError(self._unknown(key))
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"

    def copy(self) -> dict[str, Any]:
        """A plain dictionary, which can be changed and assigned."""
        return dict(self)

    if not TYPE_CHECKING:  # with these methods, type checkers would consider the class mutable

        def __setitem__(self, key: str, value: Any) -> None:
            self._assign(key, value)

        def __delitem__(self, key: str) -> None:
            self._assign(key, None)

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        checked: dict[str, Any] = {}
        for key, value in given.items():
            own = self._ALIASES.get(key, key)
            if own not in self._FIELDS:
                raise StrategyError(self._unknown(key))
            if own in checked:
                raise StrategyError(f"{self._NAME}: '{key}' and '{own}' are two names of one key; give one of them")
            checked[own] = self._FIELDS[own].checked(self._where(key), value)
        return checked

    def _check_together(self) -> None:
        """Raise StrategyError for values that contradict each other."""

    def _where(self, name: str) -> str:
        return f"{self._NAME}['{name}']"

    def _unknown(self, name: str) -> str:
        return unknown(self._NAME, name, sorted({**self._FIELDS, **self._ALIASES}), self._PADDLE_NAMES)

    def _assign(self, name: str, value: Any) -> None:
        raise StrategyError(
            f"{self._where(name)} cannot be changed in place, because the dictionary is checked as a whole. Assign all "
            f"of it: strategy.{self._NAME} = {{**strategy.{self._NAME}, '{name}': value}}"
        )


class ConfigsField(Field[OwnConfigs]):
    """A field that holds a dictionary of settings. Any dictionary can be assigned, and is checked on assignment."""

    def __init__(self, configs: type[OwnConfigs], help: str = "") -> None:
        super().__init__(configs(), help)
        self.configs = configs

    def __set__(self, instance: Fields, value: Mapping[str, Any]) -> None:
        instance._assign(self.name, value)

    def initial(self) -> OwnConfigs:
        return self.configs()

    def checked(self, where: str, value: Any) -> OwnConfigs:
        if not isinstance(value, Mapping):
            raise StrategyError(f"{where} expects a dictionary, found {value!r}")
        return self.configs(value)


def aliases_of(configs: type[Configs]) -> Mapping[str, str]:
    """The aliases of keys: alias → key."""
    return configs._ALIASES
