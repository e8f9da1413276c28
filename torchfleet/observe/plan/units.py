"""The measured units that a plan is made of, from units.json: each with its value, what it is, and its source."""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchfleet.base.errors import FleetError
from torchfleet.base.prepared_types import prepared

_FILE = Path(__file__).with_name("units.json")
_LOG = "benchmarks/log.md"


class Unit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`command` measures it, or is the page that has it; `log` is its heading in benchmarks/log.md, or ""."""

    value: float
    unit: str
    what: str
    command: str
    log: str

    @property
    def source(self) -> str:
        return f"{self.command}; {_LOG}#{self.log}" if self.log else self.command


def read_units(changes: dict[str, float] | None = None) -> dict[str, Unit]:
    """All units by name. `changes` replaces some values. Raises FleetError for unknown names and wrong values."""
    units = msgspec.json.decode(_FILE.read_bytes(), type=prepared(dict[str, Unit]))
    for name, value in (changes or {}).items():
        if name not in units:
            raise FleetError(f"--unit {name}: expected one of {', '.join(units)}")
        if not 0 < value < float("inf"):
            raise FleetError(f"--unit {name}: expected a number above 0, found {value}")
        units[name] = msgspec.structs.replace(units[name], value=value, what="given", command="--unit", log="")
    return units
