"""Rows of Criteo's shape, made up, as deepctr-torch takes them: 13 numbers, 26 categories of mixed sizes, clicked."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

NUM_DENSE, NUM_SLOTS = 13, 26
DENSE = [f"I{i}" for i in range(1, NUM_DENSE + 1)]
SPARSE = [f"C{i}" for i in range(1, NUM_SLOTS + 1)]

Columns = dict[str, np.ndarray[Any, Any]]  # one number per row, by the name of the feature


def sizes(largest: int = 50_000) -> dict[str, int]:
    """How many values each category has: from 4 up to `largest`."""
    return dict(zip(SPARSE, np.geomspace(4, largest, NUM_SLOTS).astype(int).tolist(), strict=True))


def generated(num_rows: int, largest: int = 50_000, seed: int = 0) -> tuple[Columns, np.ndarray[Any, Any]]:
    """Rows with a planted signal, and whether they were clicked: effects of single ids, of pairs and of the numbers.

    Ids of a category follow a Zipf law, as real ones do. Effects are the same for every seed.
    """
    rng, vocabulary = np.random.default_rng(seed), sizes(largest)
    ids = {name: np.minimum(rng.zipf(1.3, num_rows), size) - 1 for name, size in vocabulary.items()}
    dense = {name: rng.random(num_rows, np.float32) for name in DENSE}
    weights = np.linspace(-1, 1, NUM_DENSE)
    signal = sum((dense[name] - 0.5) * weight for name, weight in zip(DENSE, weights, strict=True)) - 0.6
    for number, name in enumerate(SPARSE):
        signal += 0.5 * _effect(ids[name], number)
    for left, right in zip(SPARSE[:4], SPARSE[3:7], strict=True):
        signal += 1.5 * _effect(1_000_003 * ids[left] + ids[right], 99)
    clicked = rng.random(num_rows) < 1 / (1 + np.exp(-signal))
    return {**dense, **{name: found.astype(np.float32) for name, found in ids.items()}}, clicked.astype(np.float32)


def feature_columns(dim: int = 8, largest: int = 50_000) -> list[Any]:
    """The columns as deepctr-torch describes them. Its import is here, without its question to the network."""
    ask_nobody()
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    sparse = [SparseFeat(name, vocabulary_size=size, embedding_dim=dim) for name, size in sizes(largest).items()]
    return [*sparse, *(DenseFeat(name, 1) for name in DENSE)]


def ask_nobody() -> None:
    """When it is imported, deepctr_torch asks pypi.org for its newest version, in a thread without a time-out, which
    holds a process without network up at its end. Here it has nothing to ask with."""
    silent = ModuleType("deepctr_torch.utils")
    silent.check_version = lambda version: None  # type: ignore[attr-defined]
    sys.modules.setdefault("deepctr_torch.utils", silent)


def _effect(ids: np.ndarray[Any, Any], salt: int) -> np.ndarray[Any, Any]:
    """A fixed number between -1 and 1 per id."""
    mixed = (ids.astype(np.uint64) + np.uint64(salt << 32)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5) * 2
