"""Optional packages (extras), which are imported where they are used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torchfleet.base.errors import MissingPackage


def required(module: str, user: str, extra: str, more: str = "") -> Any:
    """Import and return a module. Raises MissingPackage; its text says that `user` needs it, and ends with `more`."""
    try:
        return import_module(module)
    except ImportError as error:
        raise missing(module, user, extra, f" ({error})", more) from None


def check_installed(module: str, user: str, extra: str) -> None:
    """Raise MissingPackage if the module is not installed. Does not import it."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not installed either
        is_there = False
    if not is_there:
        raise missing(module, user, extra)


def missing(module: str, user: str, extra: str, why: str = "", more: str = "") -> MissingPackage:
    package = module.partition(".")[0]
    text = f"{user} needs the package {package}{why}: pip install 'torchfleet[{extra}]'{more}"
    return MissingPackage(text, name=package)
