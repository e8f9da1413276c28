"""Names that a user gave and that nothing has: what an error says of those that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 5


def near_names(name: str, names: Iterable[str]) -> str:
    """The names that are most like `name`, in whole or in one of their components; without such names, the first ones.
    "" without names.
    """
    known = list(dict.fromkeys(names))
    owners = {part: each for each in reversed(known) for part in (*each.split("."), each)}
    found = [owners[near] for near in difflib.get_close_matches(name, owners, n=3, cutoff=0.5)] or known[:_SHOWN]
    return ", ".join(map(repr, dict.fromkeys(found)))
