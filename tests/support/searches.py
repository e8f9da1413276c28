"""How far tests search that draw their cases: little in `make test`, FLEET_SEARCH_DEPTH times as far in `make fuzz`."""

from __future__ import annotations

import os

_DEPTH = int(os.environ.get("FLEET_SEARCH_DEPTH", "1"))


def examples(num: int) -> int:
    """Cases that a search tries; `num` in `make test`."""
    return num * _DEPTH
