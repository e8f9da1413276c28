"""Global shuffle: a uniformly random permutation of all workers' samples, dealt out in equal shares.

How many samples go from each worker to each other one is drawn first, by all workers alike, from the distribution that
a random permutation would give (multivariate hypergeometric, row by row). Each worker then picks at random which ones,
and shuffles what it ends up with: together that is a uniform permutation, with shares that differ by at most one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.data.dataset import Workers
from torchfleet.data.progress import Progress
from torchfleet.data.rows import Rows
from torchfleet.data.store import Store
from torchfleet.errors import DataError

_PARCEL_ROWS = 1 << 14
_MAX_SEED = 1 << 63


def exchange_samples(store: Store, workers: Workers, seed: int | None) -> Store:
    """A store with this worker's share of all samples. `store` is emptied as they go: memory stays that of one."""
    numbers, common = _agree(store, workers, seed)
    index, num = workers.index, workers.num
    flows = deal(numbers, np.random.default_rng([common, 0]))
    ways = np.repeat(np.arange(num), flows[index])
    np.random.default_rng([common, 1, index]).shuffle(ways)
    ways_of_rows = np.empty(store.num, np.int64)
    ways_of_rows[store.order] = ways
    share = Store(store.layout)
    expected = int(flows[:, index].sum())
    progress = Progress("global shuffle")

    def take_in(parcel: list[npt.NDArray[Any]]) -> None:
        share.append(unpacked(parcel, store))
        progress.show(f"{share.num:,} of {expected:,} samples are here")

    exchange = workers.exchange(f"global shuffle {common}")
    for numbers_of_rows, rows in store.drain(_PARCEL_ROWS):
        chosen = ways_of_rows[numbers_of_rows.start : numbers_of_rows.stop]
        for to in range(num):
            picked = rows.pick(np.flatnonzero(chosen == to))
            if picked.num and to == index:
                share.append(picked)
            elif picked.num:
                exchange.send(to, packed(picked), take_in)
    exchange.take_until(lambda: share.num >= expected, take_in)
    exchange.finish()
    if share.num != expected:
        raise DataError(f"global shuffle: expected {expected:,} samples, found {share.num:,}")
    progress.end(f"{share.num:,} samples")
    share.order = np.arange(share.num)
    return share


def _agree(store: Store, workers: Workers, seed: int | None) -> tuple[npt.NDArray[np.int64], int]:
    """(numbers of samples of all workers, a seed that all of them have): the first worker's, or a random one."""
    own = int(np.random.default_rng(seed).integers(_MAX_SEED))
    layout = repr(store.layout.slots).encode()
    parts = workers.gather("global shuffle", np.array([store.num, own], np.int64).tobytes() + layout)
    if len(parts) != workers.num:
        raise DataError(f"global shuffle needs all {workers.num} workers, and only {len(parts)} are left")
    if any(part[16:] != layout for part in parts):
        raise DataError("global shuffle: the workers' datasets have different slots (use_var); make them equal")
    found = np.array([np.frombuffer(part[:16], np.int64) for part in parts])
    return found[:, 0], int(found[0, 1])


def deal(numbers: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """flows[i, j]: how many samples go from worker i to worker j, as in a random permutation cut into equal shares."""
    num = len(numbers)
    total = int(numbers.sum())
    room = np.full(num, total // num) + (np.arange(num) < total % num)
    flows = np.zeros((num, num), np.int64)
    for i, count in enumerate(numbers):
        flows[i] = rng.multivariate_hypergeometric(room, count, method="marginals")
        room -= flows[i]
    return flows


def packed(rows: Rows) -> list[npt.NDArray[Any]]:
    return [rows.words.view(np.uint8), rows.starts.view(np.uint64)]


def unpacked(parcel: list[npt.NDArray[Any]], store: Store) -> Rows:
    """Rows that came from another worker, checked before anything walks along them."""
    if len(parcel) == 2 and parcel[0].dtype == np.uint8 and parcel[1].dtype == np.uint64 and parcel[0].size % 4 == 0:
        words = np.ascontiguousarray(parcel[0]).reshape(-1).copy().view(np.uint32)
        rows = Rows(words, parcel[1].reshape(-1).astype(np.int64))
        if len(rows.starts) and store.layout.check(rows):
            return rows
    raise DataError("global shuffle: a parcel that holds no samples of these slots; do all workers run one version?")
