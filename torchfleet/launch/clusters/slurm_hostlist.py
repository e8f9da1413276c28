"""Slurm's lists of hosts, written out: n[01-03,7],m5 stands for n01, n02, n03, n7 and m5."""

from __future__ import annotations

import itertools
import re

from torchfleet.base.errors import RoleError

MOST = 1 << 16  # hosts of a list
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_PART = re.compile(r"\[([^][]*)\]|([^][]+)")


def expand_hostlist(text: str) -> list[str]:
    """The names in their order. A number keeps the width that the first one of its range has.

    Raises RoleError for what is no such list, or stands for more than 65,536 names.
    """
    hosts: list[str] = []
    for item in _items(text):
        choices = [_numbers(inside, text) if inside else [plain] for inside, plain in _parts(item, text)]
        num = len(hosts)
        for choice in choices:
            num = min(MOST + 1, max(1, num - len(hosts)) * len(choice) + len(hosts))
        if num > MOST:
            raise RoleError(f"the list of hosts {text[:80]!r} stands for more than {MOST:,} names")
        hosts += ("".join(parts) for parts in itertools.product(*choices))
    return hosts


def _items(text: str) -> list[str]:
    """The parts between commas that are in no brackets."""
    items, depth = [""], 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            items.append("")
        else:
            items[-1] += letter
    if not all(items):
        raise RoleError(f"expected a list of hosts such as n[01-03,7],m5; found {text[:80]!r}")
    return items


def _parts(item: str, text: str) -> list[tuple[str, str]]:
    """What is in brackets and what is not, in their order: of each pair one is empty."""
    found = [(match[1] or "", match[2] or "") for match in _PART.finditer(item)]
    if "".join(f"[{inside}]" if inside else plain for inside, plain in found) != item:
        raise RoleError(f"brackets do not fit in the list of hosts {text[:80]!r}, at {item[:40]!r}")
    return found


def _numbers(inside: str, text: str) -> list[str]:
    numbers: list[str] = []
    for each in inside.split(","):
        match = _RANGE.fullmatch(each)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + MOST:
            raise RoleError(f"expected numbers such as 01-03,7 in brackets, found {each[:40]!r} in {text[:80]!r}")
        numbers += (str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return numbers
