"""The speed of a process: rates over the last seconds and since its first step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

WINDOW = 5.0  # seconds over which a recent rate is measured


class RecentRates:
    """Rates of counters over the last seconds, from their values at each call of `look`."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looks: deque[tuple[float, Mapping[str, float]]] = deque()

    def look(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Rates per second by name; empty at the first call. After a pause, the rate covers the time since the last
        call.
        """
        now = self._now()
        while len(self._looks) > 1 and now - self._looks[0][0] > WINDOW:
            self._looks.popleft()
        rates = {}
        if self._looks:
            when, before = self._looks[0]
            seconds = max(1e-9, now - when)
            rates = {name: max(0.0, value - before.get(name, 0)) / seconds for name, value in counters.items()}
        self._looks.append((now, dict(counters)))
        return rates


class TrainingPace:
    """The steps and samples of a worker or rank, as reported in its status."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._rates = now, RecentRates(now)
        self._first: tuple[float, int] | None = None  # when the first step ended, and the samples until then

    def status(
        self, steps: int, samples: int, last_step: float, waits: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """`last_step`: when the last step ended. The mean covers the time of training until then, not an evaluation or
        a save after it. `waits`: seconds that training has waited so far, by cause. Their means per step are in
        milliseconds.
        """
        if self._first is None and steps:
            self._first = last_step, samples
        waits = waits or {}
        rates = self._rates.look({"steps": steps, "samples": samples, **waits})
        found: dict[str, float] = {"steps": steps, "samples": samples}
        found |= {f"{name}_per_s": rates.get(name, 0.0) for name in ("steps", "samples")}
        if self._first is not None and (seconds := last_step - self._first[0]) > 0:
            found["samples_per_s_mean"] = (samples - self._first[1]) / seconds
        if rates.get("steps"):
            found |= {f"{name}_wait_ms": 1000 * rates[name] / rates["steps"] for name in waits}
        return found
