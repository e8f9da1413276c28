"""All metrics, by name: what each means, and where its value stands in the status of a process.

Names and units follow the conventions of Prometheus: base units (seconds, bytes, ratios from 0 to 1), counters end in
`_total` and never go down while the process lives. docs/metrics_export.md has the same list; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Mapping[str, Any]
Found = float | Mapping[str, float] | None  # None: the status does not say; a mapping: by value of the label


@dataclass(frozen=True)
class Listed:
    """A metric that is one number of a status, or one for each value of `label`."""

    name: str  # of a counter without its _total
    kind: Literal["counter", "gauge"]
    text: str
    of: Callable[[Status], Found]
    label: str = ""


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
    """By table, a field of `tables`."""

    def found(status: Status) -> Found:
        return {name: table[field] for name, table in status.get("tables", {}).items() if field in table}

    return found


def _commands(status: Status) -> Found:
    return dict(status.get("commands", {}))


def _epoch_share(status: Status) -> Found:
    progress = status.get("progress", {})
    done, total = progress.get("done"), progress.get("total")
    return min(1.0, done / total) if total and done is not None else None


LISTED = (
    # workers and ranks
    Listed("torchfleet_steps", "counter", "Steps that the optimizer has made.", _field("steps")),
    Listed("torchfleet_samples", "counter", "Samples trained on, without evaluation.", _field("samples")),
    Listed(
        "torchfleet_pull_wait_seconds", "counter", "Time in which the model waited for rows.", _field("pull_waited_s")
    ),
    Listed(
        "torchfleet_push_wait_seconds",
        "counter",
        "Time in which optimizer.step() waited for the servers.",
        _field("push_waited_s"),
    ),
    Listed("torchfleet_waiting_ratio", "gauge", "Share of the last second spent waiting.", _field("waiting")),
    Listed("torchfleet_queue_steps", "gauge", "Steps whose gradients wait to be sent.", _field("queue")),
    Listed("torchfleet_queue_size_steps", "gauge", "Most steps that may wait to be sent.", _field("queue_size")),
    Listed("torchfleet_request_retries", "counter", "Requests that were sent again.", _field("retries")),
    Listed("torchfleet_metric", "gauge", "What the script reported last.", lambda s: dict(s.get("metrics", {})), "name"),
    Listed("torchfleet_epoch", "gauge", "The epoch under way, from 0.", _within("progress", "epoch")),
    Listed("torchfleet_epoch_done_ratio", "gauge", "Share of the epoch that is done.", _epoch_share),
    Listed("torchfleet_remaining_seconds", "gauge", "Time to the end, by the speed of late.", _within("progress", "eta_s")),
    # servers
    Listed("torchfleet_server_requests", "counter", "Requests, by command.", _commands, "command"),
    Listed("torchfleet_server_errors", "counter", "Requests that were answered with an error.", _field("errors")),
    Listed(
        "torchfleet_server_dropped_pushes",
        "counter",
        "Pushes whose gradients of the network were too old.",
        _field("dropped"),
    ),
    Listed("torchfleet_server_busy_ratio", "gauge", "Share of the last second in which the loop computed.", _field("busy")),
    Listed("torchfleet_server_is_backup", "gauge", "1 on a replica that follows, 0 on one that answers.", _field("backup")),
    Listed("torchfleet_table_rows", "gauge", "Rows of a table on this server.", _of_tables("rows"), "table"),
    Listed("torchfleet_table_bytes", "gauge", "Memory of a table on this server.", _of_tables("bytes"), "table"),
    Listed("torchfleet_rows_created", "counter", "Rows that were made.", _of_tables("created"), "table"),
    Listed("torchfleet_rows_evicted", "counter", "Rows that were dropped.", _of_tables("evicted"), "table"),
    Listed("torchfleet_server_received_bytes", "counter", "Bytes of requests.", _field("bytes_in")),
    Listed("torchfleet_server_sent_bytes", "counter", "Bytes of replies.", _field("bytes_out")),
    Listed("torchfleet_workers_joined", "counter", "Workers that have joined this server.", _field("workers_joined")),
    Listed("torchfleet_workers_lost", "counter", "Workers that were given up.", _field("workers_lost")),
    Listed("torchfleet_saves", "counter", "Saves that this server has written.", _within("saves", "num")),
    Listed(
        "torchfleet_last_save_timestamp_seconds",
        "gauge",
        "When the last save was done, in seconds since 1970.",
        _within("saves", "last_time"),
    ),
    Listed("torchfleet_last_save_seconds", "gauge", "How long the last save took.", _within("saves", "last_seconds")),
    Listed("torchfleet_last_save_bytes", "gauge", "Size of the last save.", _within("saves", "last_bytes")),
    # all
    Listed("torchfleet_resident_memory_bytes", "gauge", "Resident memory of the process.", _field("memory")),
)
