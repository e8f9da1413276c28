"""Tables of narrow rows: memory at its worst while they grow, waits, and lookups beside rows that are not packed.

python -m benchmarks.narrow --json            the figures of benchmarks/log.md, about ten minutes
python -m benchmarks.narrow --quick --json    a tenth of the size, to see that it works
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Literal
from unittest import mock

import numpy as np
import psutil

from benchmarks.timing import interleave, log, rate, report
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables import rowstore
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.client import Client

RuleName = Literal["sgd", "adagrad"]
TABLES: tuple[tuple[int, RuleName], ...] = (
    (1, "sgd"),
    (2, "sgd"),
    (4, "sgd"),
    (8, "sgd"),
    (1, "adagrad"),
    (4, "adagrad"),
)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.narrow", description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000, help="rows of each table (default 20 million)")
    parser.add_argument("--batch", type=int, default=26_000, help="distinct keys per request")
    parser.add_argument("--batches", type=int, default=40, help="requests per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["memory", "speed"], help="one half of it")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size and fewer rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows, chosen.rounds = chosen.rows // 10, 3
    return chosen


def spec(dim: int, rule: RuleName) -> TableSpec:
    return TableSpec(f"dim{dim}_{rule}", dim=dim, rule=Rule(rule, lr=0.01), initializer=Initializer("uniform", -1, 1))


def payload(table: TableSpec) -> int:
    """Bytes of a row: key, value, state."""
    return 8 + 4 * table.dim * (1 + int(table.num_states))


def measure_memory(chosen: argparse.Namespace, table: TableSpec) -> dict[str, float]:
    """From empty to all rows; memory after every request of the second half."""
    log(f"growing {table.name} to {chosen.rows:,} rows")
    waits, ratios = [], [0.0]
    with ServerProcess("tcp://127.0.0.1:0") as server, Client.connect([server.endpoint], window=1) as client:
        process = psutil.Process(server.pid)
        client.create_table(table)
        before = process.memory_info().rss
        for start in range(0, chosen.rows, chosen.batch):
            keys = np.arange(start, min(start + chosen.batch, chosen.rows), dtype=np.uint64)
            asked = time.perf_counter()
            client.pull(table.name, keys).result()
            waits.append(time.perf_counter() - asked)
            if start >= chosen.rows // 2:
                ratios.append((process.memory_info().rss - before) / ((start + len(keys)) * payload(table)))
    milliseconds = 1000 * np.array(waits)
    return {
        f"{table.name}_bytes_ratio": ratios[-1],
        f"{table.name}_worst_bytes_ratio": max(ratios),
        f"{table.name}_growth_p50_ms": float(np.median(milliseconds)),
        f"{table.name}_growth_p999_ms": float(np.percentile(milliseconds, 99.9)),
        f"{table.name}_growth_max_ms": float(milliseconds.max()),
    }


def measure_speed(chosen: argparse.Namespace, spec: TableSpec) -> dict[str, float]:
    """`SparseTable.pull` and `push`, rows in their map and rows beside it, in turns."""
    rng = np.random.default_rng(0)
    batches = [rng.choice(chosen.rows, chosen.batch, replace=False).astype(np.uint64) for _ in range(chosen.batches)]
    grads = rng.standard_normal((chosen.batch, spec.dim), np.float32)
    packed = SparseTable(spec, 1 << 36)
    with mock.patch.object(rowstore, "PACKED_BYTES", 0):
        beside = SparseTable(spec, 1 << 36)
    log(f"filling {spec.name} twice")
    every_key = rng.permutation(chosen.rows).astype(np.uint64)
    for table in (packed, beside):
        for start in range(0, chosen.rows, 100_000):
            table.pull(every_key[start : start + 100_000])

    def pull(table: SparseTable) -> None:
        for keys in batches:
            table.pull(keys)

    def push(table: SparseTable) -> None:
        for keys in batches:
            table.push(keys, grads)

    num = chosen.batch * len(batches)
    contenders = {
        f"{spec.name}_{act.__name__}_{name}_keys_per_s": partial(rate, num, partial(act, table))
        for act in (pull, push)
        for name, table in (("packed", packed), ("beside", beside))
    }
    found = interleave(chosen.rounds, contenders)
    assert np.array_equal(packed.pull(batches[0]), beside.pull(batches[0])), "the tables differ"
    for act in ("pull", "push"):
        packed_rate, beside_rate = (found[f"{spec.name}_{act}_{name}_keys_per_s"] for name in ("packed", "beside"))
        found[f"{spec.name}_{act}_ratio"] = packed_rate / beside_rate
    return found


def main() -> None:
    chosen = options()
    result: dict[str, float] = {}
    for table in (spec(dim, rule) for dim, rule in TABLES):
        if chosen.only != "speed":
            result |= measure_memory(chosen, table)
        if chosen.only != "memory":
            result |= measure_speed(chosen, table)
    report({**result, **{name: value for name, value in vars(chosen).items() if name != "json"}}, chosen.json)


if __name__ == "__main__":
    main()
