"""Rows of display advertising: 26 categories, 13 numbers, clicked or not. Real ones from a file, or made up."""

from __future__ import annotations

import argparse
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

NUM_SLOTS, NUM_DENSE = 26, 13
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids (N, 26), numbers (N, 13), labels (N,)

_LOW = np.array([0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], np.float32)
_RANGE = np.array([20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50], np.float32)


def generated(num_rows: int, seed: int = 0) -> Rows:
    """Rows with a planted signal: effects of single ids, of pairs of ids, and of the numbers.

    Ids of a slot follow a Zipf law over up to 50,000 values, as real ones do.
    """
    rng = np.random.default_rng(seed)
    sizes = np.geomspace(4, 50_000, NUM_SLOTS).astype(np.int64)
    ranks = np.stack([np.minimum(rng.zipf(1.3, num_rows), size) - 1 for size in sizes], axis=1)
    ids = ranks + np.concatenate([[0], np.cumsum(sizes)[:-1]])
    dense = rng.random((num_rows, NUM_DENSE), np.float32)
    signal = _effect(ids, 1).sum(axis=1) * 0.5 + (dense - 0.5) @ np.linspace(-1, 1, NUM_DENSE, dtype=np.float32)
    for a, b in ((0, 3), (1, 4), (2, 5), (3, 6)):
        signal += 1.5 * _effect(ids[:, a] * 1_000_003 + ids[:, b], 2)
    clicked = rng.random(num_rows) < 1 / (1 + np.exp(-(signal - 1.2)))
    return torch.from_numpy(ids), torch.from_numpy(dense), torch.from_numpy(clicked.astype(np.float32))


def criteo(path: str | Path) -> Rows:
    """Raw rows of the Criteo challenge (label, 13 integers, 26 categories, tab-separated), plain, .gz or .xz."""
    opener: Callable[..., object] = {".xz": lzma.open, ".gz": gzip.open}.get(Path(path).suffix, open)
    ids, dense, labels = [], [], []
    with opener(path, "rt") as lines:  # type: ignore[attr-defined]
        for line in lines:
            fields = line.rstrip("\n").split("\t")
            labels.append(float(fields[0]))
            dense.append([float(x) if x else 0.0 for x in fields[1:14]])
            ids.append([zlib.crc32(f"{slot}:{x}".encode()) for slot, x in enumerate(fields[14:40])])
    numbers = (np.array(dense, np.float32) - _LOW) / _RANGE
    return torch.tensor(ids), torch.from_numpy(np.log1p(np.maximum(numbers, 0))), torch.tensor(labels)


def add_options(parser: argparse.ArgumentParser, rows: int = 60_000) -> None:
    """Where rows come from, as flags."""
    parser.add_argument("--rows", type=int, default=rows, help="rows to make up when there is no --data")
    parser.add_argument("--data", help="a file of raw Criteo rows, plain, .gz or .xz")


def clicks(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The rows that these flags name, as columns `ids`, `dense` and `label`."""
    if options.data and not Path(options.data).is_file():
        raise SystemExit(f"no file at {options.data}; leave --data out to train on generated rows")
    found = criteo(options.data) if options.data else generated(options.rows, options.seed)
    return dict(zip(("ids", "dense", "label"), found, strict=True))


def _effect(ids: np.ndarray, salt: int) -> np.ndarray:
    """A fixed number between -1 and 1 per id: the same for training and test rows."""
    mixed = (ids.astype(np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(40)).astype(np.float32) / 2**24 - 0.5) * 2
