"""Numbers as people read them: short, with the same width from one look to the next."""

from __future__ import annotations

import math

_SIZES = ("bytes", "kB", "MB", "GB", "TB", "PB")


def count(number: float) -> str:
    """1,234; from a million on 1.23 M, then 4.56 G."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(number) >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:,.0f}"


def rate(number: float) -> str:
    """A number per second: with a digit behind the point where it is small."""
    return f"{number:.1f}" if 0 < number < 100 else count(number)


def size(num_bytes: float) -> str:
    """96 MB, 1.2 GB."""
    power = 0
    while num_bytes >= 1000 and power < len(_SIZES) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{num_bytes:.1f} {_SIZES[power]}" if 0 < num_bytes < 10 and power else f"{num_bytes:.0f} {_SIZES[power]}"


def duration(seconds: float) -> str:
    """0:42, 3:07, 1:02:03, 2 d 03:10."""
    whole = max(0, round(seconds))
    minutes, hours = whole // 60 % 60, whole // 3600
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def seconds(number: float) -> str:
    """A measured time, with the digits that a reader needs to divide by it: 4.21 s, 11.3 s, 3:07."""
    if number >= 100:
        return duration(number)
    return f"{number:.2f} s" if number < 10 else f"{number:.1f} s"


def share(part: float | None) -> str:
    """40 %; nothing for what is not known."""
    return "" if part is None else f"{part:.0%}".replace("%", " %")


def metric(value: float) -> str:
    """A loss, an AUC."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.5g}"


def plural(num: int, noun: str) -> str:
    """1 server, 2 servers."""
    return f"{num:,} {noun}{'s' * (num != 1)}"


def ranges(numbers: list[int]) -> str:
    """0–2, 5."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in found)
