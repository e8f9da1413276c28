"""Public modules whose names are imported when they are first used, so that a bare server never imports torch.

A public module has a stub file (.pyi) beside it, which lists its names and the modules that define them. Type checkers,
editors and this module read that one list. Unlike lazy_loader, it takes names that are defined outside of the module's
own folder: `fleet.nn` has layers of ps/ and collective/, `fleet.data` functions of api/.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from torchfleet.base.pages import page


def attach(
    module: str, file: str, instead: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the module `module` in `file`, from the stub beside it.

    Other names raise AttributeError, see `missing`. A name is resolved once and then stored in the module.
    """
    places = names_of(Path(file).with_suffix(".pyi"))
    public = sorted(places)

    def get(name: str) -> Any:
        if name not in places:
            raise missing(module, name, public, instead or {})
        found = import_module(places[name])
        if places[name] == f"{module}.{name}":
            value: Any = found
        else:  # a submodule is not an attribute of its package until it is imported
            value = getattr(found, name) if hasattr(found, name) else import_module(f"{places[name]}.{name}")
        setattr(sys.modules[module], name, value)
        return value

    def names() -> list[str]:
        """For completion: only the public names, without the module's imports and loaded submodules."""
        return sorted([*public, *(name for name in vars(sys.modules[module]) if name.startswith("__"))])

    return get, names, public


def nearest(module: str, public: Sequence[str], instead: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return a `__getattr__` for the module `module`, whose names are imported at once: it raises AttributeError with
    what to use instead, or the nearest of the names `public`.
    """

    def get(name: str) -> Any:
        raise missing(module, name, public, instead or {})

    return get


def missing(module: str, name: str, public: Sequence[str], instead: Mapping[str, str]) -> AttributeError:
    """An error about a name that a module does not have: with what to use instead, or else the nearest public name."""
    near = get_close_matches(name, [*public, *instead], n=1)
    if name in instead:
        advice = f": {instead[name]}"
    elif near:
        advice = f"; did you mean '{near[0]}'?{f' That is: {instead[near[0]]}' if near[0] in instead else ''}"
    else:
        advice = f"; {page('reference')} lists its names"
    return AttributeError(f"{module} has no '{name}'{advice}")


def names_of(stub: Path) -> dict[str, str]:
    """Map each name that `stub` imports to the module that defines it, and a submodule of torchfleet to itself.

    A stub has only absolute imports: `from torchfleet.api.saves import save as save`, and for submodules
    `from torchfleet import data as data`.
    """
    statements = [node for node in ast.parse(stub.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: f"torchfleet.{alias.name}" if node.module == "torchfleet" else str(node.module)
        for node in statements
        for alias in node.names
    }
