"""Converts a status to metric families of prometheus_client."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchfleet import __version__
from torchfleet.base.monitor.freshness import EXACT_AGES
from torchfleet.base.monitor.prometheus.metric_list import LISTED, Found, Listed, Status
from torchfleet.base.monitor.prometheus.step_times import BOUNDS, StepTimes

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_AGES = (0, 1, 2, 3, 4, 5, 7, 9, 12, *((EXACT_AGES << i) - 1 for i in range(7)))  # updates: upper bounds of buckets
_KINDS = ("dense", "sparse")


@dataclass
class Published:
    """The last published status. The thread that owns the state replaces it as a whole; the port's thread reads it."""

    status: Status = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)


class Exposition:
    """A collector of prometheus_client: the metrics of one process, with the labels that identify it."""

    def __init__(self, labels: Mapping[str, str], steps: StepTimes) -> None:
        self._labels, self._steps = dict(labels), steps
        self.published = Published()

    def collect(self) -> Iterator[Metric]:
        """The registry calls this at every scrape, in the port's thread."""
        from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

        status, names, values = self.published.status, tuple(self._labels), tuple(self._labels.values())
        info = InfoMetricFamily("torchfleet_build", "The release, and the mode of training.", labels=names)
        info.add_metric(values, {"version": __version__, "mode": str(status.get("mode", ""))})
        yield info
        age = GaugeMetricFamily("torchfleet_status_age_seconds", "Age of the values beside it.", labels=names)
        age.add_metric(values, time.monotonic() - self.published.at)
        yield age
        for listed in LISTED:
            yield from self._family(listed, listed.of(status))
        yield from self._step_seconds()
        yield from self._staleness(status)

    def _family(self, listed: Listed, found: Found) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        if found is None or found == {}:
            return
        names, values = [*self._labels], [*self._labels.values()]
        if listed.label:
            names.append(listed.label)
        make = CounterMetricFamily if listed.kind == "counter" else GaugeMetricFamily
        family = make(listed.name, listed.text, labels=names)
        if isinstance(found, Mapping):
            for value, number in found.items():
                family.add_metric([*values, value], number)
        else:
            family.add_metric(values, found)
        yield family

    def _step_seconds(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import HistogramMetricFamily

        counts, total = self._steps.taken()
        if not sum(counts):
            return
        text = "Time from the end of one step to the end of the next, with all that lies between."
        family = HistogramMetricFamily("torchfleet_step_seconds", text, labels=tuple(self._labels))
        ends = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"]
        sums = [sum(counts[: i + 1]) for i in range(len(counts))]
        family.add_metric(tuple(self._labels.values()), list(zip(ends, sums, strict=True)), total)
        yield family

    def _staleness(self, status: Status) -> Iterator[Metric]:
        """From EXACT_AGES on, staleness is counted by powers of two. Its sum is unknown, so there is no
        torchfleet_..._sum.
        """
        from prometheus_client.metrics_core import HistogramMetricFamily

        text = "Updates between a value's pull and the push of its gradient, by kind of table."
        family = HistogramMetricFamily("torchfleet_staleness_updates", text, labels=(*self._labels, "kind"))
        for kind in _KINDS:
            ages = {int(age): num for age, num in status.get(f"staleness_{kind}", {}).items()}
            if ages:
                labels = {**self._labels, "kind": kind}
                family.add_metric([*labels.values()], buckets_of(ages), None)
                family.add_sample("torchfleet_staleness_updates_count", labels, sum(ages.values()))
        if family.samples:
            yield family


def buckets_of(ages: Mapping[int, int]) -> list[tuple[str, float]]:
    """Cumulative buckets: the pushes with at most this staleness, in updates."""
    ends = [*_AGES, math.inf]
    return [
        ("+Inf" if end == math.inf else str(end), float(sum(num for age, num in ages.items() if age <= end)))
        for end in ends
    ]
