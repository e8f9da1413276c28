"""A made-up stream of clicks that drifts: items appear every hour, are popular for a while, and die."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HOUR = 3600
START = 20_606 * 24 * HOUR  # 2026-06-02, a day's first hour
NUM_USERS = 4_000
NUM_CATEGORIES = 60
NUM_SLOTS = 4
LIFE_HOURS = 36.0  # of an item, on average
BORN_PER_HOUR = 300

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass
class Items:
    """Those that live: their ids, what they bring to a click, how popular they are, and when they die."""

    ids: Ids
    weights: npt.NDArray[np.float64]
    popularity: npt.NDArray[np.float64]
    deaths: npt.NDArray[np.float64]

    def at(self, hour: int, rng: np.random.Generator) -> Items:
        """An hour later: the dead are gone, new ones are there."""
        lives = self.deaths > hour
        first = hour * BORN_PER_HOUR
        born = Items(
            np.arange(first, first + BORN_PER_HOUR, dtype=np.int64),
            rng.normal(0.0, 1.2, BORN_PER_HOUR),
            rng.pareto(1.3, BORN_PER_HOUR) + 0.05,
            hour + rng.exponential(LIFE_HOURS, BORN_PER_HOUR),
        )
        pairs = (
            (getattr(self, name)[lives], getattr(born, name)) for name in ("ids", "weights", "popularity", "deaths")
        )
        return Items(*(np.concatenate(pair) for pair in pairs))


class Drift:
    """Hours of samples: (ids by slot, labels). The same seed gives the same stream."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self._samples, self._seed = samples, seed
        rng = np.random.default_rng([seed, 1 << 40])
        self._users = rng.normal(0.0, 0.8, NUM_USERS)
        self._categories = rng.normal(0.0, 0.5, NUM_CATEGORIES)
        self._hour = -1
        none = np.empty(0)
        self._items = Items(none.astype(np.int64), none, none, none)

    def hour(self, number: int) -> tuple[Ids, Floats]:
        """Must be asked for in order: items live on from hour to hour."""
        while self._hour < number:
            self._hour += 1
            self._items = self._items.at(self._hour, np.random.default_rng([self._seed, 2, self._hour]))
        rng, items, num = np.random.default_rng([self._seed, 3, number]), self._items, self._samples
        chosen = rng.choice(len(items.ids), num, p=items.popularity / items.popularity.sum())
        users = rng.zipf(1.4, num) % NUM_USERS
        categories = rng.integers(0, NUM_CATEGORIES, num)
        requests = number * num + np.arange(num)  # an id that never comes back, as streams have them
        logits = self._users[users] + self._categories[categories] + items.weights[chosen] - 1.5
        labels = rng.random(num) < 1 / (1 + np.exp(-logits))
        ids = np.stack([users, categories, items.ids[chosen], requests], axis=1).astype(np.int64)
        return ids + (np.arange(NUM_SLOTS, dtype=np.int64) << 48), labels.astype(np.float32)
