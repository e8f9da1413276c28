"""Findings about links, and about machines that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torchfleet.base.pages import page
from torchfleet.observe.doctor.finding import NOTE, SLOWS, STOPS, Finding
from torchfleet.observe.doctor.link import LinkFacts
from torchfleet.observe.watch.figures import size

_STEP_BYTES = 26 * 1000 * (8 + 2 * 4 * 16)  # ids, rows and gradients of 1000 samples with 26 ids of dim 16
_SLOW_STEP = 0.05  # seconds; a link on which these bytes take longer is slow
_SLOW_MS = 2.0
_CLOCK_MS = 100.0
_SETTINGS = ("overcommit", "huge_pages", "governor", "open_files")


def check_link(link: LinkFacts) -> Iterator[Finding]:
    """Yield the problems of this link."""
    rate = min(link.to_bytes_s, link.from_bytes_s)
    seconds = _STEP_BYTES / max(rate, 1.0)
    if seconds > _SLOW_STEP:
        yield Finding(
            SLOWS,
            f"{link.place}: {rate * 8 / 1e6:,.0f} Mbit/s: a step of 1,000 samples with 26 ids of dim 16, "
            f"{size(_STEP_BYTES)}, takes {1000 * seconds:,.0f} ms on the way",
            f"use a faster link, geo mode, larger batches, or compress gradients ({page('modes')})",
            60 + min(30.0, seconds),
        )
    if link.p50_ms > _SLOW_MS:
        yield Finding(
            SLOWS,
            f"{link.place}: {link.p50_ms:.1f} ms there and back: a sync step waits for at least two of these",
            "put servers and workers into one room; async mode and fleet.prefetch hide a part of it",
            50 + min(30.0, link.p50_ms / 10),
        )
    elif link.p99_ms > 10 * max(link.p50_ms, 0.1):
        yield Finding(
            NOTE,
            f"{link.place}: one request of a hundred takes {link.p99_ms:.1f} ms, most take {link.p50_ms:.2f}",
            "look for other processes on the cores, or loss on the link",
        )
    if abs(link.clock_ahead_ms) > _CLOCK_MS:
        yield Finding(
            NOTE,
            f"{link.place}: its clock is {link.clock_ahead_ms:+,.0f} ms off ours",
            "run chrony on both: times in logs do not agree. Traces of fleet profile are corrected.",
        )


def check_others(own: Mapping[str, object], other: Mapping[str, object], place: str) -> Iterator[Finding]:
    """`own`, `other`: facts of two machines, {"machine": ..., "software": ...}."""
    mine, theirs = (_dictionary(facts, "software") for facts in (own, other))
    if not theirs:
        yield Finding(NOTE, f"{place} did not say what it is", "run `fleet doctor --serve` there")
        return
    if mine.get("torchfleet") != theirs.get("torchfleet"):
        yield Finding(
            STOPS,
            f"{place} has torchfleet {theirs.get('torchfleet')}, this machine {mine.get('torchfleet')}",
            "install the same release: a worker of another one is refused",
            90,
        )
    packages = {name: _dictionary(facts, "packages") for name, facts in (("own", mine), ("other", theirs))}
    for name in ("torch", "numba", "numpy", "pyzmq"):
        here, there = packages["own"].get(name), packages["other"].get(name)
        if here != there:
            yield Finding(
                NOTE, f"{place} has {name} {there}, this machine {here}", "the same on all is less to think of"
            )
    if _minor(mine.get("python")) != _minor(theirs.get("python")):
        yield Finding(
            NOTE,
            f"{place} has Python {theirs.get('python')}, this machine {mine.get('python')}",
            "install the same on all",
        )
    here, there = (_dictionary(facts, "machine") for facts in (own, other))
    for name in _SETTINGS:
        if here.get(name) != there.get(name):
            what = name.replace("_", " ")
            yield Finding(NOTE, f"{place}: {what} is {there.get(name)}, here {here.get(name)}", "make them alike")


def _dictionary(facts: Mapping[str, object], name: str) -> dict[str, object]:
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def _minor(version: object) -> str:
    return ".".join(str(version).split(".")[:2])
