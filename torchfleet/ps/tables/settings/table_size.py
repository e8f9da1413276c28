"""max_table_bytes, the largest size of one table in one process, as users write it: 8GB."""

from __future__ import annotations

import os
import re

from torchfleet.base.errors import TableError

VARIABLE = "FLEET_MAX_TABLE_BYTES"
HOW_TO_SET = f"fleetrun --max_table_bytes 8GB, or {VARIABLE}=8GB for one process"

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:I?B)?", re.IGNORECASE | re.ASCII)
_MOST = 1 << 56  # more than any machine has; a sum of such sizes is still a 64-bit number


def parse_bytes(text: str, where: str) -> int:
    """A number of bytes: 1073741824, 512MB, 8GB, 1.5T. Units are powers of 1024. Errors begin with `where`."""
    found = _SIZE.fullmatch(text.strip())
    num_bytes = int(min(float(found[1]) * 1024 ** _UNITS[found[2].upper()], 2 * _MOST)) if found else 0  # inf is no int
    if not 0 < num_bytes <= _MOST:
        raise TableError(f"{where} must be a number of bytes above 0, such as 8GB, 512MB or 1073741824, found {text!r}")
    return num_bytes


def given_table_bytes() -> int | None:
    """The size set in the environment; None if it is not set."""
    text = os.environ.get(VARIABLE)
    return parse_bytes(text, VARIABLE) if text else None
