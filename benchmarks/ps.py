"""Pull and push through real sockets, beside the bare kernels on an equal table; memory per row; stalls while growing.

python -m benchmarks.ps --json            the figures of benchmarks/log.md, about two minutes
python -m benchmarks.ps --quick --json    a tenth of the size, to see that it works
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.timing import interleave, log, rate, report
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Future

Keys = npt.NDArray[np.uint64]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ps", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the table (default 10 million)")
    parser.add_argument("--dim", type=int, default=10)
    parser.add_argument("--batch", type=int, default=26_000, help="distinct Zipf keys per request")
    parser.add_argument("--zipf", type=float, default=1.05, help="exponent of the key distribution")
    parser.add_argument("--in_flight", type=int, default=3, help="requests under way at once")
    parser.add_argument("--batches", type=int, default=60, help="requests per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--growth_rows", type=int, default=50_000_000, help="keys in the growth test (dim 8, Adagrad)")
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:0", help="tcp://... or ipc://PATH")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size and fewer rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rows, chosen.growth_rows, chosen.rounds = chosen.rows // 10, chosen.growth_rows // 10, 3
    return chosen


def zipf_batches(rng: np.random.Generator, num: int, size: int, num_keys: int, exponent: float) -> list[Keys]:
    """Batches of `size` distinct keys in the order in which Zipf draws bring them up; hot keys are spread out."""
    cumulative = np.cumsum(1.0 / np.arange(1, num_keys + 1) ** exponent)
    names = rng.permutation(num_keys).astype(np.uint64)
    batches = []
    for _ in range(num):
        ranks = np.empty(0, np.int64)
        while len(ranks) < size:
            drawn = np.searchsorted(cumulative, rng.random(4 * size) * cumulative[-1])
            ranks = np.concatenate([ranks, drawn])
            _, first = np.unique(ranks, return_index=True)
            ranks = ranks[np.sort(first)]
        batches.append(names[ranks[:size]])
    return batches


def spec(name: str, dim: int) -> TableSpec:
    return TableSpec(name, dim=dim, rule=Rule("adagrad", lr=0.01), initializer=Initializer("uniform", -0.01, 0.01))


def pipelined(num_in_flight: int, requests: Sequence[Callable[[], Future[Any]]]) -> None:
    """All requests, with at most `num_in_flight` under way."""
    under_way: deque[Future[Any]] = deque()
    for ask in requests:
        if len(under_way) == num_in_flight:
            under_way.popleft().result()
        under_way.append(ask())
    while under_way:
        under_way.popleft().result()


def measure_speed(chosen: argparse.Namespace) -> dict[str, float]:
    rng = np.random.default_rng(0)
    batches = zipf_batches(rng, chosen.batches, chosen.batch, chosen.rows, chosen.zipf)
    grads = [rng.standard_normal((chosen.batch, chosen.dim), np.float32) for _ in range(4)]
    num = chosen.batch * len(batches)
    with ServerProcess(chosen.endpoint) as server, Client.connect([server.endpoint], window=chosen.in_flight) as client:
        bare = SparseTable(spec("speed", chosen.dim), 1 << 36)
        client.create_table(spec("speed", chosen.dim))
        log(f"filling two tables with {chosen.rows:,} rows")
        every_key = rng.permutation(chosen.rows).astype(np.uint64)
        for start in range(0, chosen.rows, 100_000):
            bare.pull(every_key[start : start + 100_000])
            client.pull("speed", every_key[start : start + 100_000]).result()

        def bare_pull() -> None:
            for keys in batches:
                bare.pull(keys)

        def bare_push() -> None:
            for i, keys in enumerate(batches):
                bare.push(keys, grads[i % 4])

        pulls = [partial(client.pull, "speed", keys) for keys in batches]
        pushes = [partial(client.push, "speed", keys, grads[i % 4]) for i, keys in enumerate(batches)]
        log("pull and push, keys per second")
        found = interleave(
            chosen.rounds,
            {
                "pull_roof_keys_per_s": lambda: rate(num, bare_pull),
                "pull_keys_per_s": lambda: rate(num, lambda: pipelined(chosen.in_flight, pulls)),
                "push_roof_keys_per_s": lambda: rate(num, bare_push),
                "push_keys_per_s": lambda: rate(num, lambda: pipelined(chosen.in_flight, pushes)),
            },
        )
        assert np.array_equal(bare.pull(batches[0]), client.pull("speed", batches[0]).result()), "the tables differ"
    found["pull_ratio"] = found["pull_keys_per_s"] / found["pull_roof_keys_per_s"]
    found["push_ratio"] = found["push_keys_per_s"] / found["push_roof_keys_per_s"]
    return found


def measure_growth(chosen: argparse.Namespace) -> dict[str, float]:
    """From empty to `growth_rows` keys: every request timed, and the server's memory at the end."""
    log(f"growing a table to {chosen.growth_rows:,} rows of dim 8 with Adagrad")
    waits = []
    with ServerProcess(chosen.endpoint) as server, Client.connect([server.endpoint], window=1) as client:
        process = psutil.Process(server.pid)
        client.create_table(spec("growth", 8))
        before = process.memory_info().rss
        for start in range(0, chosen.growth_rows, chosen.batch):
            keys = np.arange(start, min(start + chosen.batch, chosen.growth_rows), dtype=np.uint64)
            asked = time.perf_counter()
            client.pull("growth", keys).result()
            waits.append(time.perf_counter() - asked)
            if start // chosen.batch % 200 == 199:
                log(f"  {start:,} rows, longest wait so far {max(waits) * 1000:.1f} ms")
        held = process.memory_info().rss - before
    payload = chosen.growth_rows * (8 + 4 * 8 * 2)
    milliseconds = 1000 * np.array(waits)
    return {
        "bytes_per_row_ratio": held / payload,
        "growth_p50_ms": float(np.median(milliseconds)),
        "growth_p999_ms": float(np.percentile(milliseconds, 99.9)),
        "growth_max_ms": float(milliseconds.max()),
    }


def main() -> None:
    chosen = options()
    result = {**measure_speed(chosen), **measure_growth(chosen)}
    report({**result, **{name: value for name, value in vars(chosen).items() if name != "json"}}, chosen.json)


if __name__ == "__main__":
    main()
