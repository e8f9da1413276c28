"""The `extra` of a save: what a script has given, and what fleet.save_state adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATE = "fleet.state"  # the states of all workers, as fleet.save_state adds them


def script_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What the script has given."""
    return {name: value for name, value in extra.items() if name != STATE}
