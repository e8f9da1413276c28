"""Counters of all serving processes in one shared file, and their sum in Prometheus' format."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torchfleet import __version__
from torchfleet.base.extras import required

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CLIENT_LEFT = 499  # not a status of HTTP: the client closed the connection before it had its answer
OUTCOMES = ("ok", "refused", "busy", "failed", "left")  # 2xx, 4xx, 503, other 5xx, CLIENT_LEFT
SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_REQUESTS = 0
_LATENCY = _REQUESTS + len(OUTCOMES)
_LATENCY_SUM = _LATENCY + len(SECONDS) + 1
_BATCHES = _LATENCY_SUM + 1
_SAMPLES = _BATCHES + len(SIZES) + 1  # also the sum of all batches' sizes
_QUEUE = _SAMPLES + 1
_VERSION = _QUEUE + 1
_CREATED = _VERSION + 1
# Figures of rows that are read from servers of shards (sharded_model.py). Figures without a text are not counters.
SHARD_FIELDS = {
    "row_cache_hits": "Rows found in the cache of hot rows.",
    "row_cache_misses": "Rows read from servers.",
    "shard_reads": "Reads from servers of shards.",
    "shard_hedged_reads": "Reads sent to a second server because the first was slow.",
    "shard_hedged_reads_won": "Of these, answered by the second server first.",
    "shard_failed_over_reads": "Reads that went to another server because one failed.",
    "shard_failed_reads": "Reads that no server answered.",
    "row_cache_bytes": "",
    "shard_replicas_lost": "",
}
FOLLOWED = {  # of MappedModel.figures
    "follow_gaps_total": "Times that saves were missing in the chain that was followed.",
    "follow_resyncs_total": "Times that all rows were read anew.",
    "follow_disk_full_total": "Times that a version could not be written for want of space.",
    "follow_is_in_trouble": "1 if the last look for a new version failed.",
    "follow_pinned_version": "The version that fleet rollback asked for; 0: the newest.",
    "follow_checked_seconds_ago": "Seconds since the last look for a new version.",
}
MAX_TABLES = 1024  # whose unknown ids are counted
_SHARDS = _CREATED + 1
_TABLES = _SHARDS + len(SHARD_FIELDS)
NUM_FIELDS = _TABLES + MAX_TABLES


def outcome_of(status: int) -> str:
    if status < 400:
        return "ok"
    if status == CLIENT_LEFT:
        return "left"
    return "busy" if status == 503 else "refused" if status < 500 else "failed"


class ServingMetrics:
    """The counters of one process, beside those of the other processes. A restarted process continues its own."""

    def __init__(self, path: str | None, worker: int, num_workers: int) -> None:
        """`path`: the shared file; None: counters of this process alone."""
        shape = num_workers, NUM_FIELDS
        self._all: Any = np.zeros(shape) if path is None else np.memmap(path, np.float64, "r+", shape=shape)
        self._own = self._all[worker].data  # a memoryview reads and writes single numbers faster
        self._own[_QUEUE] = 0.0
        self.tables: list[str] = []  # the same in all processes, in this order

    @staticmethod
    def create(path: str, num_workers: int) -> None:
        """Make the file for `num_workers` processes."""
        np.zeros((num_workers, NUM_FIELDS)).tofile(path)

    def request(self, status: int, seconds: float) -> None:
        own = self._own
        own[_REQUESTS + OUTCOMES.index(outcome_of(status))] += 1
        if status < 400:
            own[_LATENCY + bisect_left(SECONDS, seconds)] += 1
            own[_LATENCY_SUM] += seconds

    def batch(self, num_samples: int) -> None:
        self._own[_BATCHES + bisect_left(SIZES, num_samples)] += 1
        self._own[_SAMPLES] += num_samples

    def queue(self, num_samples: int) -> None:
        self._own[_QUEUE] = num_samples

    def version(self, number: int, created: float) -> None:
        self._own[_VERSION], self._own[_CREATED] = number, created

    def shards(self, counts: Mapping[str, float]) -> None:
        """`counts`: figures of this process by the names of SHARD_FIELDS; empty if rows are not read from servers."""
        for i, name in enumerate(SHARD_FIELDS if counts else ()):
            self._own[_SHARDS + i] = counts[name]

    def unknown_ids(self, counts: Mapping[str, int]) -> None:
        """`counts`: ids without a row that were looked up, by table."""
        for table, num in counts.items():
            if table in self.tables:
                self._own[_TABLES + self.tables.index(table)] += num

    def exposition(self, followed: Mapping[str, float] | None = None) -> bytes:
        """All metrics as text. `followed`: figures of the process that follows a job. Raises MissingPackage without
        prometheus_client.
        """
        client = required("prometheus_client", "/metrics", "serve")
        registry = client.CollectorRegistry()
        registry.register(self)
        for name, value in (followed or {}).items():
            if name.startswith("follow_"):  # `collect` reports version and age for each process
                gauge = client.Gauge(f"torchfleet_serve_{name}", FOLLOWED[name], registry=registry)
                gauge.set(value)
        text: bytes = client.generate_latest(registry)
        return text

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        total = np.asarray(self._all).sum(axis=0)
        yield InfoMetricFamily("torchfleet_build", "The release.", {"version": __version__})
        requests = CounterMetricFamily("torchfleet_serve_requests", "Requests by outcome.", labels=["outcome"])
        for i, outcome in enumerate(OUTCOMES):
            requests.add_metric([outcome], total[_REQUESTS + i])
        yield requests
        yield CounterMetricFamily("torchfleet_serve_samples", "Samples computed.", total[_SAMPLES])
        yield HistogramMetricFamily(
            "torchfleet_serve_request_seconds",
            "Time from a whole request to its response.",
            _buckets(total[_LATENCY : _LATENCY + len(SECONDS) + 1], SECONDS),
            total[_LATENCY_SUM],
        )
        yield HistogramMetricFamily(
            "torchfleet_serve_batch_samples",
            "Samples of a batch.",
            _buckets(total[_BATCHES : _BATCHES + len(SIZES) + 1], SIZES),
            total[_SAMPLES],
        )
        yield GaugeMetricFamily("torchfleet_serve_queue_samples", "Samples that wait.", total[_QUEUE])
        unknown = CounterMetricFamily(
            "torchfleet_serve_unknown_ids", "Ids that were looked up and have no row.", labels=["table"]
        )
        for i, table in enumerate(self.tables):
            unknown.add_metric([table], total[_TABLES + i])
        yield unknown
        by = ["process"]
        version = GaugeMetricFamily("torchfleet_serve_model_version", "The version served.", labels=by)
        age = GaugeMetricFamily("torchfleet_serve_model_age_seconds", "Age of what it learned last.", labels=by)
        for worker, fields in enumerate(np.asarray(self._all)):
            if fields[_CREATED]:
                version.add_metric([str(worker)], fields[_VERSION])
                age.add_metric([str(worker)], max(0.0, time.time() - fields[_CREATED]))
        yield version
        yield age
        shards = dict(zip(SHARD_FIELDS, total[_SHARDS:_TABLES].tolist(), strict=True))
        if any(shards.values()):
            yield from _shard_metrics(shards)


def _buckets(counts: Any, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
    names = [*(f"{float(bound)}" for bound in bounds), "+Inf"]
    return list(zip(names, np.cumsum(counts).tolist(), strict=True))


def _shard_metrics(found: Mapping[str, float]) -> Iterator[Metric]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    for name, text in SHARD_FIELDS.items():
        if text:
            yield CounterMetricFamily(f"torchfleet_serve_{name}", text, found[name])
    hits, misses = found["row_cache_hits"], found["row_cache_misses"]
    rate = hits / max(1.0, hits + misses)
    yield GaugeMetricFamily("torchfleet_serve_row_cache_hit_rate", "Rows found in the cache, of all rows.", rate)
    yield GaugeMetricFamily("torchfleet_serve_row_cache_bytes", "Memory of the cache.", found["row_cache_bytes"])
    lost = found["shard_replicas_lost"]
    yield GaugeMetricFamily("torchfleet_serve_shard_replicas_lost", "Servers that do not answer.", lost)
