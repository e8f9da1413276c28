"""Parameters of tests with many combinations: a covering set of them in `make test`, all in `make test-long`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*columns: Sequence[Any]) -> list[Any]:
    """Every combination of one value of each column, for pytest.mark.parametrize. Those that are not needed for every
    pair of values of two columns to occur are marked `long`."""
    everything = list(itertools.product(*(range(len(column)) for column in columns)))
    missing = {pair for one in everything for pair in _pairs(one)}
    kept = set()
    while missing:
        best = max(everything, key=lambda one: len(missing & _pairs(one)))
        missing -= _pairs(best)
        kept.add(best)
    return [
        pytest.param(
            *(column[at] for column, at in zip(columns, one, strict=True)),
            marks=() if one in kept else pytest.mark.long,
        )
        for one in everything
    ]


def first_of(cases: Sequence[Any]) -> list[Any]:
    """All of them, for pytest.mark.parametrize; but for the first they are marked `long`."""
    return [pytest.param(case, marks=pytest.mark.long if at else ()) for at, case in enumerate(cases)]


def _pairs(one: Sequence[int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    places = list(enumerate(one))
    return set(itertools.combinations(places, 2))
