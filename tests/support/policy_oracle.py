"""Admission, eviction and statistics of one table in plain Python: dicts of rows, one key at a time, no kernel.

Only declarations (AdmissionEntry, Shrink) are read from the package; hashes are written down here once more. Conditions
come as Python functions over a dict of numbers, beside the text that the table gets. Floats are numpy.float32, rounded
where the table rounds. Values are replayed under SGD.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

f32 = np.float32
ZERO = f32(0)
DAY, HOUR = 86_400, 3_600
_ALL = (1 << 64) - 1
MAP_BYTES = 18  # per row, what max_bytes counts beside the row's own words

Condition = Callable[[Mapping[str, float]], bool]


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
    return x ^ (x >> 31)


def owner_of(key: int, num_servers: int) -> int:
    return ((mix(key ^ 0x6A09E667F3BCC909) >> 32) * num_servers) >> 32


def is_chosen(key: int, probability: float) -> bool:
    return (mix(key ^ 0x3C6EF372FE94F82B) >> 11) < int(probability * (1 << 53))


def share_of(total: int, server: int, num_servers: int) -> int:
    return total * (server + 1) // num_servers - total * server // num_servers


@functools.cache
def powers_of(rate: float) -> tuple[np.float32, ...]:
    """What is left of a show after 0, 1, 2, ... days."""
    power, powers = 1.0, [f32(1)]
    for _ in range(4096):
        power *= rate
        powers.append(f32(power))
    return tuple(powers)


@dataclass
class Known:
    """What is kept of a key, with a row or without."""

    value: np.ndarray | None = None
    count: int = 0
    seen: int = 0
    born: int = 0
    tick: int = 0
    show: np.float32 = ZERO
    click: np.float32 = ZERO
    delta: np.float32 = ZERO
    slot: int = 0


@dataclass
class Oracle:
    """A table under these policies. `predicate` and `where` say in Python what `entry` and `shrink` say as text."""

    entry: Any
    shrink: Any
    dim: int
    lr: float
    first: float
    predicate: Condition | None = None
    where: Condition | None = None
    num_columns: int = 0  # statistics per row, for max_bytes
    now: int = 0
    step: int = 0
    period: int | None = None
    rows: dict[int, Known] = field(default_factory=dict)
    candidates: dict[int, Known] = field(default_factory=dict)
    panes: dict[int, list[int]] = field(default_factory=dict)  # by key: the panes of its appearances

    @property
    def powers(self) -> tuple[np.float32, ...]:
        return powers_of(self.entry.show_click_decay_rate)

    # Events

    def pull(self, keys: Iterable[int]) -> np.ndarray:
        """A batch for training, of distinct keys."""
        for key in keys:
            if key not in self.rows and self._admits(key):
                known = self.candidates.pop(key, Known(seen=self.now))
                self.rows[key] = self._new_row(known)
            if key in self.rows:
                self._appear(self.rows[key])
                self.rows[key].tick = self.step
        return self.read(keys)

    def read(self, keys: Iterable[int]) -> np.ndarray:
        """For prediction: nothing is noted."""
        zeros = np.zeros(self.dim, f32)
        return np.array([self.rows[key].value if key in self.rows else zeros for key in keys]).reshape(-1, self.dim)

    def push(self, keys: Sequence[int], grads: np.ndarray, shows: Sequence[tuple[int, int, int]] | None = None) -> None:
        """Gradients (keys may repeat), and with each (show, click, slot) where workers send them."""
        self.step += 1
        for i in sorted(set(keys), key=list(keys).index):
            at = [j for j, key in enumerate(keys) if key == i]
            if i not in self.rows and self._is_open:
                self.rows[i] = self._new_row(Known(seen=self.now, tick=self.step))
            known = self.rows.get(i, self.candidates.get(i))
            if known is not None and shows is not None:
                self._add_shows(known, [shows[j] for j in at])
            if i in self.rows:
                total = grads[at[0]].copy()
                for j in at[1:]:
                    total += grads[j]
                self.rows[i].value = self.rows[i].value - f32(self.lr) * total

    def set_time(self, now: int, num_servers: int) -> int:
        """Returns how many rows the shrink dropped that this made due."""
        self.now = now
        if self.shrink.every_hours is None:
            return 0
        before, self.period = self.period, int(now // (self.shrink.every_hours * HOUR))
        return self.evict(self.shrink, self.where, num_servers) if before is not None and self.period > before else 0

    def evict(self, policy: Any, where: Condition | None, num_servers: int) -> int:
        """fleet.shrink. Returns how many rows were dropped."""
        before = len(self.rows)
        self.rows = {key: row for key, row in self.rows.items() if not self._is_out(row, policy, where)}
        self.candidates = {key: known for key, known in self.candidates.items() if not self._is_expired(known, policy)}
        limits = [policy.max_rows] if policy.max_rows is not None else []
        if policy.max_bytes is not None:
            limits.append(policy.max_bytes // (4 * (2 + self.dim + self.num_columns) + MAP_BYTES))
        for server in range(num_servers) if limits else ():
            own = [key for key in self.rows if owner_of(key, num_servers) == server]
            own.sort(key=lambda key: (self.rows[key].tick, mix(key)))
            for key in own[: max(0, len(own) - share_of(min(limits), server, num_servers))]:
                del self.rows[key]
        return before - len(self.rows)

    def saved(self) -> None:
        """A save for training has been made: the delta score begins anew."""
        for row in self.rows.values():
            row.delta = ZERO

    # What holds of a key

    def values_of(self, known: Known) -> dict[str, float]:
        """What conditions see."""
        power = self.powers[min(max(0, self.now // DAY - known.seen // DAY), 4096)]
        show, click = f32(known.show * power), f32(known.click * power)
        found = {
            "count": known.count,
            "show": show,
            "click": click,
            "score": self._score(show, click),
            "delta": known.delta,
            "slot": known.slot,
            "unseen_days": max(0, self.now - known.seen) / DAY,
            "age_days": max(0, self.now - known.born) / DAY,
            "norm": 0.0 if known.value is None else float(np.sqrt(np.sum(known.value.astype(np.float64) ** 2))),
        }
        return {name: float(value) for name, value in found.items()}

    @property
    def _is_open(self) -> bool:
        entry = self.entry
        return entry.count == 1 and entry.probability == 1 and entry.window_count == 1 and not entry.predicate

    def _admits(self, key: int) -> bool:
        """One appearance of a key without a row."""
        entry = self.entry
        if self._is_open:
            return True
        if not is_chosen(key, entry.probability):
            return False
        is_in = True
        if entry.window_hours:
            pane = self.now // max(1, max(4, round(entry.window_hours * HOUR)) // 4)
            self.panes[key] = [*(p for p in self.panes.get(key, []) if p > pane - 4), pane]
            is_in = len(self.panes[key]) >= entry.window_count
        if entry.count > 1 or entry.predicate:
            known = self.candidates.setdefault(key, Known(seen=self.now, born=self.now))
            known.count += 1
            is_in = is_in and known.count >= entry.count
            is_in = is_in and (self.predicate is None or self.predicate(self.values_of(known)))
            if not is_in:
                self._appear(known)
        return is_in

    def _new_row(self, known: Known) -> Known:
        """Shows, clicks and slot come from the candidate that it was."""
        value = np.full(self.dim, self.first, f32)
        return Known(value, 0, known.seen, self.now, known.tick, known.show, known.click, ZERO, known.slot)

    def _appear(self, known: Known) -> None:
        if self.now // DAY > known.seen // DAY:
            power = self.powers[min(self.now // DAY - known.seen // DAY, 4096)]
            known.show, known.click = f32(known.show * power), f32(known.click * power)
        known.seen = max(known.seen, self.now)

    def _add_shows(self, known: Known, pushed: list[tuple[int, int, int]]) -> None:
        show, click = f32(sum(p[0] for p in pushed)), f32(sum(p[1] for p in pushed))
        known.show, known.click = f32(known.show + show), f32(known.click + click)
        known.delta = f32(known.delta + self._score(show, click))
        known.slot = pushed[-1][2] or known.slot

    def _score(self, show: np.float32, click: np.float32) -> np.float32:
        weights = f32(self.entry.nonclick_weight), f32(self.entry.click_weight)
        return f32(f32(weights[0] * f32(show - click)) + f32(weights[1] * click))

    def _is_out(self, row: Known, policy: Any, where: Condition | None) -> bool:
        values = self.values_of(row)
        is_low = policy.delete_threshold is not None and f32(values["score"]) < f32(policy.delete_threshold)
        is_small = policy.min_norm is not None and values["norm"] < policy.min_norm
        return self._is_expired(row, policy) or is_low or is_small or (where is not None and where(values))

    def _is_expired(self, known: Known, policy: Any) -> bool:
        unseen, ttl = policy.delete_after_unseen_days, policy.ttl_days
        values = self.values_of(known)
        return (unseen is not None and values["unseen_days"] > unseen) or (ttl is not None and values["age_days"] > ttl)
