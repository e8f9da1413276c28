"""The staleness of gradients over all servers, and its effect on a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchfleet.base.pages import page

EXACT_AGES = 16  # staleness below this value is counted exactly, above it by powers of two
Ages = dict[int, int]  # pushes by staleness; from EXACT_AGES on, a key k stands for k to 2k - 1

OLD_NETWORK = 2  # updates: from this median staleness on, models of the examples lose 0.01 to 0.05 of AUC


def ages_by_kind(tables: Iterable[Mapping[str, Any]]) -> dict[str, Ages]:
    """From the statistics of tables on any number of servers: pushes by staleness, for dense and for sparse tables."""
    found: dict[str, Ages] = {"staleness_dense": {}, "staleness_sparse": {}}
    for table in tables:
        name = "staleness_dense" if table["is_dense"] else "staleness_sparse"
        found[name] = summed([found[name], table["staleness"]])
    return found


def last_age(age: int) -> int:
    """The largest staleness that a key of a histogram stands for."""
    return 2 * age - 1 if age >= EXACT_AGES else age


def summed(histograms: Iterable[Mapping[Any, int]]) -> Ages:
    """The sum of several histograms. Those read from JSON have strings as keys."""
    total: Ages = {}
    for ages in histograms:
        for age, num in ages.items():
            total[int(age)] = total.get(int(age), 0) + num
    return dict(sorted(total.items()))


def quantile(ages: Ages, share: float) -> int | None:
    """The staleness that this share of the pushes does not exceed, as a key of `ages`; None without pushes."""
    enough, seen = share * sum(ages.values()), 0
    for age, num in sorted(ages.items()):
        seen += num
        if seen >= enough:
            return age
    return None


def median(ages: Ages) -> int | None:
    """The staleness that half of the pushes do not exceed, as a key of `ages`; None without pushes."""
    return quantile(ages, 0.5)


def in_short(dense: Ages, sparse: Ages) -> str:
    """The staleness of the network and of the rows, in updates, in one line; empty if unknown."""
    told = [
        f"{what} {median(ages)} (95 %: {quantile(ages, 0.95)})"
        for what, ages in (("network", dense), ("rows", sparse))
        if ages
    ]
    return f"staleness in updates, median: {', '.join(told)}" if told else ""


def advice(dense_ages: Ages) -> str:
    """Advice on a network that is too stale; empty if it is not."""
    age = median(dense_ages)
    if age is None or age < OLD_NETWORK:
        return ""
    return (
        f"half of the gradients come from a network that was {age} updates old or older. From {OLD_NETWORK} on that "
        "costs quality: the network learns slower or not at all, where rows of that age do no harm. Use hybrid, whose "
        "network is never old: a_sync_configs={'hybrid': True}. It costs speed, since its workers make every step "
        "together: measured, 8 % of async's with 2 workers, 27 % with 4, 37 % with 8 "
        f"({page('scale')}). To stay with "
        f"async: fewer workers, gather, or a smaller max_staleness ({page('modes/async')})."
    )
