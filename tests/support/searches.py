"""How far tests search that draw their cases: little in `make test`, FLEET_SEARCH_DEPTH times as far in `make fuzz`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_DEPTH = int(os.environ.get("FLEET_SEARCH_DEPTH", "1"))


def examples(num: int) -> int:
    """Cases that a search tries; `num` in `make test`."""
    return num * _DEPTH


def load_profile() -> None:
    """`make test` draws the same cases every time, and `make fuzz` others every time. Neither looks at a clock."""
    settings.register_profile(
        "torchfleet", derandomize=_DEPTH == 1, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("torchfleet")
