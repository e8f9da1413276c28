"""Queries and titles as bags of words: generated from the films of examples/movielens, or read from a file.

A word is a number below NUM_WORDS, from a hash of its text that is the same everywhere: there is no dictionary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

import torchfleet as fleet
from examples.columns import Columns
from examples.movielens.generate import generated as generated_films
from examples.movielens.generate import queries

NUM_WORDS = 50_000
LENGTH = 12  # words of a text that count


def generated(num_pairs: int, num_films: int = 1000, seed: int = 0) -> tuple[Columns, Columns]:
    """(pairs to train on, pairs whose titles no training pair has). A film is asked for by words of its kind."""
    films, rng = (
        generated_films(num_users=1, num_films=num_films, num_ratings=1, seed=seed),
        np.random.default_rng(seed),
    )
    assert films.kinds is not None
    cut = max(2, num_films // 5)  # films 1 to cut are held out
    parts = []
    for low, high, num in ((cut + 1, num_films + 1, num_pairs), (1, cut + 1, num_pairs // 10)):
        film, other = rng.integers(low, high, num), rng.integers(low, high, num)
        other = np.where(other == film, np.where(other + 1 < high, other + 1, low), other)
        bags = torch.cat([torch.zeros(1, LENGTH, dtype=torch.int64), bags_of(films.titles[1:])])
        asked = bags_of(queries(films.kinds[film], rng))
        parts.append({"query": asked, "title": bags[film], "other": bags[other]})
    return parts[0], parts[1]


def read(path: str | Path, seed: int = 0) -> tuple[Columns, Columns]:
    """Lines `query<tab>title`; the last tenth is held out. The other title of a pair is that of another line."""
    if not Path(path).is_file():
        raise SystemExit(f"no file at {path}; leave --data out to train on generated pairs")
    lines = [line.split("\t") for line in Path(path).read_text(encoding="utf-8").splitlines()]
    for number, fields in enumerate(lines, 1):
        if len(fields) != 2:
            raise SystemExit(f"{path}, line {number}: expected a query, a tab and a title, found {len(fields)} fields")
    asked, titles = bags_of([query for query, _ in lines]), bags_of([title for _, title in lines])
    cut, rng, parts = len(lines) * 9 // 10, np.random.default_rng(seed), []
    for low, high in ((0, cut), (cut, len(lines))):
        others = (np.arange(high - low) + rng.integers(1, max(2, high - low), high - low)) % max(1, high - low) + low
        parts.append({"query": asked[low:high], "title": titles[low:high], "other": titles[others]})
    return parts[0], parts[1]


def bags_of(texts: Sequence[str]) -> torch.Tensor:
    """The words of each text, (texts, LENGTH); 0 where there are fewer."""
    found = np.zeros((len(texts), LENGTH), np.int64)
    for row, text in zip(found, texts, strict=True):
        words = [_number(word) for word in text.lower().split()[:LENGTH]]
        row[: len(words)] = words
    return torch.from_numpy(found)


@lru_cache(maxsize=1 << 20)
def _number(word: str) -> int:
    return fleet.hash_string(word) % (NUM_WORDS - 1) + 1
