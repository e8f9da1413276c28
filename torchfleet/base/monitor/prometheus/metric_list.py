"""All metrics by name, with their meaning and the field of a process's status that holds the value.

Names and units follow the conventions of Prometheus: base units (seconds, bytes, ratios from 0 to 1); counters end in
`_total` and never decrease while the process lives. docs/metrics_export.md has the same list; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Mapping[str, Any]
Found = float | Mapping[str, float] | None  # None: not in the status; a mapping: by value of the label


@dataclass(frozen=True)
class Listed:
    """A metric with one value from a status, or one for each value of `label`."""

    name: str  # of a counter: without _total
    kind: Literal["counter", "gauge"]
    text: str
    of: Callable[[Status], Found]
    label: str = ""


def _counter(name: str, text: str, of: Callable[[Status], Found], label: str = "") -> Listed:
    return Listed(name, "counter", text, of, label)


def _gauge(name: str, text: str, of: Callable[[Status], Found], label: str = "") -> Listed:
    return Listed(name, "gauge", text, of, label)


def _field(name: str) -> Callable[[Status], Found]:
    def found(status: Status) -> Found:
        value = status.get(name)
        return value if isinstance(value, (int, float)) else None

    return found


def _within(name: str, field: str) -> Callable[[Status], Found]:
    def found(status: Status) -> Found:
        value = status.get(name, {}).get(field)
        return value if isinstance(value, (int, float)) else None

    return found


def _of_tables(field: str) -> Callable[[Status], Found]:
    """A field of `tables`, by table."""

    def found(status: Status) -> Found:
        return {name: table[field] for name, table in status.get("tables", {}).items() if field in table}

    return found


def _commands(status: Status) -> Found:
    return dict(status.get("commands", {}))


def _metrics(status: Status) -> Found:
    return dict(status.get("metrics", {}))


def _epoch_share(status: Status) -> Found:
    progress = status.get("progress", {})
    done, total = progress.get("done"), progress.get("total")
    return min(1.0, done / total) if total and done is not None else None


LISTED = (
    # workers and ranks
    _counter("torchfleet_steps", "Steps that the optimizer has made.", _field("steps")),
    _counter("torchfleet_samples", "Samples trained on, without evaluation.", _field("samples")),
    _counter("torchfleet_pull_wait_seconds", "Time in which the model waited for rows.", _field("pull_waited_s")),
    _counter(
        "torchfleet_push_wait_seconds",
        "Time in which optimizer.step() waited for the servers.",
        _field("push_waited_s"),
    ),
    _gauge("torchfleet_waiting_ratio", "Share of the last second spent waiting.", _field("waiting")),
    _gauge("torchfleet_queue_steps", "Steps whose gradients wait to be sent.", _field("queue")),
    _gauge("torchfleet_queue_size_steps", "Most steps that may wait to be sent.", _field("queue_size")),
    _counter("torchfleet_request_retries", "Requests that were sent again.", _field("retries")),
    _gauge("torchfleet_metric", "What the script reported last.", _metrics, "name"),
    _gauge("torchfleet_epoch", "The epoch under way, from 0.", _within("progress", "epoch")),
    _gauge("torchfleet_epoch_done_ratio", "Share of the epoch that is done.", _epoch_share),
    _gauge(
        "torchfleet_remaining_seconds",
        "Estimated time to the end, from the recent speed.",
        _within("progress", "eta_s"),
    ),
    # servers
    _counter("torchfleet_server_requests", "Requests, by command.", _commands, "command"),
    _counter("torchfleet_server_errors", "Requests that were answered with an error.", _field("errors")),
    _counter(
        "torchfleet_server_dropped_pushes", "Pushes whose gradients of the network were too old.", _field("dropped")
    ),
    _gauge("torchfleet_server_busy_ratio", "Share of the last second in which the loop computed.", _field("busy")),
    _gauge("torchfleet_server_is_backup", "1 on a replica that follows, 0 on one that answers.", _field("backup")),
    _gauge("torchfleet_table_rows", "Rows of a table on this server.", _of_tables("rows"), "table"),
    _gauge("torchfleet_table_bytes", "Memory of a table on this server.", _of_tables("bytes"), "table"),
    _counter("torchfleet_rows_created", "Rows that were made.", _of_tables("created"), "table"),
    _counter("torchfleet_rows_evicted", "Rows that were dropped.", _of_tables("evicted"), "table"),
    _counter("torchfleet_server_received_bytes", "Bytes of requests.", _field("bytes_in")),
    _counter("torchfleet_server_sent_bytes", "Bytes of replies.", _field("bytes_out")),
    _counter("torchfleet_workers_joined", "Workers that have joined this server.", _field("workers_joined")),
    _counter("torchfleet_workers_lost", "Workers that were given up.", _field("workers_lost")),
    _counter("torchfleet_saves", "Saves that this server has written.", _within("saves", "num")),
    _gauge(
        "torchfleet_last_save_timestamp_seconds",
        "When the last save was done, in seconds since 1970.",
        _within("saves", "last_time"),
    ),
    _gauge("torchfleet_last_save_seconds", "How long the last save took.", _within("saves", "last_seconds")),
    _gauge("torchfleet_last_save_bytes", "Size of the last save.", _within("saves", "last_bytes")),
    # heter workers
    _counter(
        "torchfleet_heter_passes", "Forward and backward passes that a heter worker has computed.", _field("passes")
    ),
    _gauge("torchfleet_heter_sessions", "Workers that compute at a heter worker.", _field("sessions")),
    # all
    _gauge("torchfleet_resident_memory_bytes", "Resident memory of the process.", _field("memory")),
)
