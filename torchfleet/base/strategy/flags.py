"""Every collective field of DistributedStrategy as a flag of a script's command line.

parser = argparse.ArgumentParser()
torchfleet.options.add_arguments(parser)
strategy = torchfleet.options.strategy_of(parser.parse_args())

train.py --amp --amp_configs init_loss_scaling=1024,dtype=bfloat16 --recompute --recompute_configs checkpoints=layer*
train.py --strategy strategy.yaml --no-amp
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.collective_fields import ALIASES, CONFIGS, FIELDS, OBJECTS, SWITCHES, CollectiveFields
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.strategy.fields import DictKey, Key, ListKey, fields_of, unknown

_DICTIONARIES: dict[str, Mapping[str, Key[Any]]] = {
    **{f"{name}_configs": keys for name, keys in CONFIGS.items()},
    **OBJECTS,
}
_WIDTH = 30  # characters of choices; longer ones get blanks between them, where lines can break
HELP = {name: field.help for name, field in fields_of(CollectiveFields).items() if field.help}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows a script's description unchanged, and the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_told = "default" in text or action.default in (None, False, "", argparse.SUPPRESS)
        return text if is_told or not action.option_strings else f"{text} (default: %(default)s)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for all collective fields. A wrong value ends the script with a message that says what was expected."""
    group = parser.add_argument_group(
        "strategy",
        "How ranks work together. KEY=VALUE,... may also be a JSON object; in a list, the elements after the first "
        "stand without KEY=: checkpoints=layer1,layer2,enable_offload=true",
    )
    text = "read fields from YAML (save_to_yaml) or Paddle's .prototxt; flags override it, dictionaries key by key"
    group.add_argument("--strategy", metavar="FILE", type=Path, help=text)
    for name, key in FIELDS.items():
        if isinstance(key.default, bool):
            text = f"{_text(name, key)} (default: {'on' if key.default else 'off'})"
            group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            text = f"{_text(name, key)} (default: {key.default})"
            group.add_argument(f"--{name}", type=_field(name), metavar=type(key.default).__name__.upper(), help=text)
        if name in CONFIGS:
            _add_dictionary(group, f"{name}_configs")
    for name in ("hybrid_configs", *OBJECTS):
        _add_dictionary(group, name)


def _add_dictionary(group: argparse._ArgumentGroup, name: str) -> None:
    keys = {key: value for key, value in _DICTIONARIES[name].items() if not value.only}
    listed = ", ".join(f"{key}={_shown(value)}" for key, value in keys.items())
    metavar = "NAME,..." if name == "build_strategy" else "KEY=VALUE,..."
    text = f"{HELP[name]} ({listed})" if name in HELP else f"defaults: {listed}"
    group.add_argument(f"--{name}", type=_dictionary(name), metavar=metavar, help=text.replace("%", "%%"))


def strategy_of(options: argparse.Namespace) -> DistributedStrategy:
    """The strategy that the flags describe. A dictionary for a disabled strategy is an error that names both flags."""
    strategy = DistributedStrategy.load_from_yaml(options.strategy) if options.strategy else DistributedStrategy()
    for name in FIELDS:
        value = getattr(options, name)
        if value is not None:
            setattr(strategy, name, value)
        if value is False and name in CONFIGS:
            setattr(strategy, f"{name}_configs", {})  # drop the file's settings of a strategy that the flag disables
    for name in _DICTIONARIES:
        given = getattr(options, name)
        if given is None:
            continue
        switch = name.removesuffix("_configs")
        if switch in SWITCHES and not getattr(strategy, switch):
            raise StrategyError(f"--{name} was given without --{switch}: add --{switch}, or leave --{name} out")
        now = getattr(strategy, name)
        setattr(strategy, name, {**(vars(now) if name in OBJECTS else now), **given})
    return strategy


def _text(name: str, key: Key[Any]) -> str:
    return HELP.get(name, f"cannot be changed: {key.only}").replace("%", "%%")


def _shown(key: Key[Any]) -> str:
    if isinstance(key, ListKey):
        return f"[{','.join(map(str, key.default))}]"
    if isinstance(key.default, bool):
        return str(key.default).lower()
    text = "|".join(map(str, key.choices)) if key.choices else str(key.default)
    return text if len(text) <= _WIDTH else text.replace("|", " | ")


def _field(name: str) -> Any:
    def number(text: str) -> Any:
        return _checked(name, _converted(name, type(FIELDS[name].default), text))

    return number


def _dictionary(name: str) -> Any:
    def dictionary(text: str) -> dict[str, Any]:
        given = _json(name, text) if text.lstrip().startswith("{") else _pairs(name, text)
        aliases = ALIASES.get(name.removesuffix("_configs"), {})
        return {aliases.get(key, key): value for key, value in _checked(name, given).items()}

    return dictionary


def _checked(name: str, value: Any) -> Any:
    """The value, if DistributedStrategy accepts it; otherwise raises an error that argparse prints."""
    try:
        DistributedStrategy(**{name: value})
    except StrategyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def _json(name: str, text: str) -> dict[str, Any]:
    try:
        given: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{name} begins like a JSON object, but is not JSON ({error}): write '{{\"key\": value}}', or key=value,..."
        ) from None
    return given


def _pairs(name: str, text: str) -> dict[str, Any]:
    """Parse `key=value,...`. A word without `=` extends the preceding list, or enables a flag."""
    given: dict[str, Any] = {}
    last = ""
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        word, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals and last and isinstance(key := _key(name, last), ListKey):
            given[last].append(_converted(f"{name}['{last}']", key.element, word))
            continue
        key, last = _key(name, word), word
        if word in given or not (equals or isinstance(key.default, bool)):
            raise argparse.ArgumentTypeError(f"{name} expects every key once, as key=value, found '{item}' in '{text}'")
        if isinstance(key, DictKey):
            raise argparse.ArgumentTypeError(
                f"{name}['{word}'] is a dictionary: write all of {name} as a JSON object, "
                f'\'{{"{word}": {{"key": "value"}}}}\''
            )
        if isinstance(key, ListKey):
            given[word] = [_converted(f"{name}['{word}']", key.element, value)] if value else []
        else:
            given[word] = _converted(f"{name}['{word}']", type(key.default), value if equals else "true")
    return given


def _key(name: str, given: str) -> Key[Any]:
    keys, aliases = _DICTIONARIES[name], ALIASES.get(name.removesuffix("_configs"), {})
    own = aliases.get(given, given)
    if own not in keys:
        raise argparse.ArgumentTypeError(unknown(name, given, sorted({*keys, *aliases}), {}))
    return keys[own]


def _converted(name: str, kind: type, text: str) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise argparse.ArgumentTypeError(f"{name} expects true or false, found '{text}'")
        return text.lower() in ("true", "1")
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{name} expects {expected}, found '{text}'") from None
