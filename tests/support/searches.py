"""How far tests search that draw their cases: half as far as they name in `make test`, which draws the same cases every
time, and FLEET_SEARCH_DEPTH times as far in `make fuzz`."""

from __future__ import annotations

import contextlib
import importlib
import os

from hypothesis import HealthCheck, settings

_DEPTH = float(os.environ.get("FLEET_SEARCH_DEPTH", "0.5"))


def examples(num: int) -> int:
    """Cases that a search tries; `num` with a depth of one."""
    return max(1, round(num * _DEPTH))


def load_profile() -> None:
    """`make test` draws the same cases every time, and `make fuzz` others every time. Neither looks at a clock."""
    is_fixed = "FLEET_SEARCH_DEPTH" not in os.environ
    settings.register_profile(
        "torchfleet",
        max_examples=examples(100),  # of searches that name no number
        derandomize=is_fixed,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("torchfleet")
    # Hypothesis also draws constants that it finds in the source of imported modules, and which modules are imported
    # depends on the tests that ran before in the process. It has no setting for that; in a release without these names
    # tests/test_drawn_cases.py may fail.
    with contextlib.suppress(ImportError, AttributeError):
        providers = importlib.import_module("hypothesis.internal.conjecture.providers")
        if is_fixed and providers._get_local_constants:
            none_found = providers.Constants()
            providers._get_local_constants = lambda: none_found
