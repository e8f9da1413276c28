"""Patterns of module names: `encoder.layer.*.attention`.

`*` stands for one component of a module's name, or a fragment of one, `**` for zero or more components.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from torchfleet.base.errors import ModelError


def matching(pattern: str, names: Iterable[str], where: str) -> list[str]:
    """The names that the pattern matches, in order. Raises ModelError, beginning with `where`, if no name matches."""
    every, regex = list(names), _regex(pattern)
    found = [name for name in every if regex.fullmatch("." + name)]
    if not found:
        raise ModelError(f"{where}: {_nothing(pattern, every)}")
    return found


def _regex(pattern: str) -> re.Pattern[str]:
    """Matches a name with a leading dot, so that every component has one."""
    regexes = (r"(?:\.[^.]+)*" if name == "**" else r"\." + _component(name) for name in pattern.split("."))
    return re.compile("".join(regexes))


def _component(name: str) -> str:
    return "[^.]+" if name == "*" else re.escape(name).replace(r"\*", "[^.]*")


def _nothing(pattern: str, names: list[str]) -> str:
    """The error for a pattern without a match. Names that differ only in numbers are listed as one pattern."""
    patterns = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))
    near = difflib.get_close_matches(pattern, patterns, n=3, cutoff=0.5) or patterns[:5]
    return (
        f"no module of the model matches {pattern!r}. "
        f"Near names: {', '.join(map(repr, near)) or 'the model has no modules in it'}."
    )
