"""The string hash in plain Python, for generator scripts: they start fast because they import no numpy or torch."""

from __future__ import annotations

from functools import lru_cache

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@lru_cache(1 << 16)
def hash_string(text: str | bytes, seed: int = 0) -> int:
    """A 64-bit hash of a string, equal on every machine, in every process and release. docs/data.md has the formula."""
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    h = _mix((seed + _GOLDEN * (len(data) + 1)) & _MASK)
    for at in range(0, len(data), 8):
        h = _mix(h ^ int.from_bytes(data[at : at + 8], "little"))
    return h


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
