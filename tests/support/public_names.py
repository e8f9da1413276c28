"""The public names with their arguments, and the flags of both commands, as plain values: what a release promises to
keep. `PYTHONPATH=.:tests python -m support.public_names` prints them for the record in support/recorded.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator
from typing import Any

import torchfleet as fleet
from torchfleet import metrics, util
from torchfleet.launch import cli
from torchfleet.observe.commands import command

MODULES = {"fleet": fleet, "fleet.nn": fleet.nn, "fleet.data": fleet.data, "fleet.optim": fleet.optim}
PLAIN = {"fleet.metrics": metrics, "fleet.util": util}


def arguments(value: Any) -> list[str]:
    """Names of its parameters; one that may be left out ends with an equals sign."""
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        f"{one.name}{'=' * (one.default is not one.empty)}"
        for one in found
        if one.kind not in stars and one.name != "self"
    ]


def names() -> dict[str, list[str]]:
    """Functions, classes and their methods by name."""
    made = {}
    places = [
        (f"{place}.{name}", getattr(module, name)) for place, module in MODULES.items() for name in module.__all__
    ]
    places += [
        (f"{place}.{name}", value)
        for place, module in PLAIN.items()
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and value.__module__.startswith("torchfleet")
    ]
    for place, value in places:
        if callable(value):
            made[place] = arguments(value)
        if inspect.isclass(value) and value.__module__.startswith("torchfleet"):
            own = ((name, method) for name, method in vars(value).items() if inspect.isfunction(method))
            made |= {f"{place}.{name}": arguments(method) for name, method in own if not name.startswith("_")}
    return made


def flags() -> dict[str, list[str]]:
    """Of `fleet COMMAND` and of `fleetrun`."""
    made = {f"fleet {name}": sorted(_options(parser)) for name, parser in _commands(command._parser())}
    return {**made, "fleetrun": sorted(_options(cli.parser()))}


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}


if __name__ == "__main__":
    print(json.dumps({"names": names(), "flags": flags()}, indent=0, sort_keys=True))
