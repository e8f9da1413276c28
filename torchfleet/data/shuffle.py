"""Global shuffle: a uniformly random permutation of all workers' samples, in equal shares.

First all workers draw, from a common seed, how many samples go from each worker to each other worker. The distribution
is that of a random permutation (multivariate hypergeometric, row by row). Then each worker picks the samples that it
sends at random, and shuffles those that it ends up with. Together that is a uniform permutation, with shares that
differ by at most one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import DataError
from torchfleet.base.monitor.progress import Progress
from torchfleet.data.dataset import WorkerGroup
from torchfleet.data.sample_rows import SampleRows
from torchfleet.data.sample_store import Store
from torchfleet.data.slots import SampleLayout

_PARCEL_ROWS, _PARCEL_BYTES = 1 << 14, 1 << 22
_MAX_SEED = 1 << 63


def exchange_samples(store: Store, workers: WorkerGroup, seed: int | None, on_begin: Callable[[], None]) -> Store:
    """A store with this worker's share of all samples; `order` depends only on the seed, not on the order of arrival.

    `store` is emptied along the way, so that memory holds the samples once. `on_begin` is called before the first
    sample is sent.
    """
    numbers, common, topic = _agree(store, workers, seed)
    index, num = workers.index, workers.num
    flows = deal(numbers, np.random.default_rng([common, 0]))
    places = np.empty(store.num, np.int64)  # of each row in this worker's order
    places[store.order] = np.arange(store.num)
    receivers = np.repeat(np.arange(num), flows[index])
    np.random.default_rng([common, 1, index]).shuffle(receivers)
    share = Share(store.layout, int(flows[:, index].sum()))
    exchange = workers.exchange(f"global shuffle {topic}")
    on_begin()
    for row_numbers, rows in store.drain(_rows_per_parcel(store)):
        at = places[row_numbers.start : row_numbers.stop]
        chosen = receivers[at]
        for to in range(num):
            picked = np.flatnonzero(chosen == to)
            if len(picked) and to == index:
                share.add(index, at[picked], rows.pick(picked))
            elif len(picked):
                exchange.send(to, packed(index, at[picked], rows.pick(picked)), share.take)
    exchange.take_until(lambda: share.is_complete, share.take)
    exchange.finish()
    return share.finish()


class Share:
    """The samples of this worker as they arrive, with their origins, which determine their order."""

    def __init__(self, layout: SampleLayout, expected: int) -> None:
        self._store, self._expected = Store(layout), expected
        self._origins: list[npt.NDArray[np.int64]] = []
        self._progress = Progress("global shuffle")

    @property
    def is_complete(self) -> bool:
        return self._store.num >= self._expected

    def take(self, parcel: list[npt.NDArray[Any]]) -> None:
        self.add(*unpacked(parcel, self._store.layout))
        self._progress.show(f"{self._store.num:,} of {self._expected:,} samples are here")

    def add(self, sender: int, places: npt.NDArray[np.int64], rows: SampleRows) -> None:
        self._store.append(rows)
        self._origins.append(np.stack([np.full(len(places), sender), places]))

    def finish(self) -> Store:
        if self._store.num != self._expected:
            raise DataError(f"global shuffle: expected {self._expected:,} samples, found {self._store.num:,}")
        self._progress.end(f"{self._store.num:,} samples")
        senders, places = np.concatenate([np.empty((2, 0), np.int64), *self._origins], axis=1)
        self._store.order = np.lexsort((places, senders))
        return self._store


def _agree(store: Store, workers: WorkerGroup, seed: int | None) -> tuple[npt.NDArray[np.int64], int, int]:
    """(sample counts of all workers, a common seed, a topic for this exchange)."""
    own = int(np.random.default_rng(seed).integers(_MAX_SEED))
    topic = int(np.random.default_rng().integers(_MAX_SEED))  # new every time, regardless of the seed
    layout = repr(store.layout.slots).encode()
    parts = workers.gather("global shuffle", np.array([store.num, own, topic], np.int64).tobytes() + layout)
    if len(parts) != workers.num:
        raise DataError(f"global shuffle needs all {workers.num} workers, and only {len(parts)} are left")
    if any(part[24:] != layout for part in parts):
        raise DataError("global shuffle: the workers' datasets have different slots (use_var); make them equal")
    found = np.array([np.frombuffer(part[:24], np.int64) for part in parts])
    return found[:, 0], int(found[0, 1]), int(found[0, 2])


def deal(numbers: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """flows[i, j]: how many samples go from worker i to worker j, as in a random permutation in equal shares."""
    num = len(numbers)
    total = int(numbers.sum())
    room = np.full(num, total // num) + (np.arange(num) < total % num)
    flows = np.zeros((num, num), np.int64)
    for i, count in enumerate(numbers):
        left, rest = int(count), int(room.sum())
        for j in range(num):
            rest -= int(room[j])
            flows[i, j] = hypergeometric(rng, int(room[j]), rest, left)
            left -= int(flows[i, j])
        room -= flows[i]
    return flows


def hypergeometric(rng: np.random.Generator, good: int, bad: int, draws: int) -> int:
    """How many of `draws` are good. numpy's function is limited to 10^9; beyond that, by inversion around the mean."""
    total = good + bad
    if total < 10**9:
        return int(rng.hypergeometric(good, bad, draws))
    mean = draws * good / total
    width = 12 * (mean * bad / total * (total - draws) / (total - 1)) ** 0.5 + 50  # values beyond are negligible
    low = max(0, draws - bad, int(mean - width))
    high = min(good, draws, int(mean + width))
    k = np.arange(low, high, dtype=np.float64)
    steps = np.log(good - k) + np.log(draws - k) - np.log(k + 1) - np.log(bad - draws + k + 1)
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    weights = np.cumsum(np.exp(logs - logs.max()))
    return low + int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))


def _rows_per_parcel(store: Store) -> int:
    mean_bytes = 4 * len(store.rows.words) / max(1, store.num)
    return max(1, min(_PARCEL_ROWS, int(_PARCEL_BYTES / max(1.0, mean_bytes))))


def packed(sender: int, places: npt.NDArray[np.int64], rows: SampleRows) -> list[npt.NDArray[Any]]:
    return [
        np.array([sender], np.uint64),
        places.view(np.uint64),
        rows.words.view(np.uint8),
        rows.starts.view(np.uint64),
    ]


def unpacked(parcel: list[npt.NDArray[Any]], layout: SampleLayout) -> tuple[int, npt.NDArray[np.int64], SampleRows]:
    """(sender, places, rows) that came from another worker, checked before a kernel reads them."""
    if [array.dtype for array in parcel] == [np.uint64, np.uint64, np.uint8, np.uint64] and parcel[2].size % 4 == 0:
        sender, places, words, starts = (np.ascontiguousarray(array).reshape(-1).copy() for array in parcel)
        rows = SampleRows(words.view(np.uint32), starts.view(np.int64))
        if len(sender) == 1 and len(places) == rows.num and layout.check(rows):
            return int(sender[0]), places.view(np.int64), rows
    raise DataError(
        "global shuffle: received samples that do not match use_var; do all workers run the same release and script?"
    )
