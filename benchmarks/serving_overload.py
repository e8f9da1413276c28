"""What `fleet serve` does with more requests than it can answer: at one, two and four times what it can.

Requests are sent by a clock, whatever the answers do, and a latency counts from the moment at which the request was
due. "Accepted" are those that are answered with predictions; the others are refused with 503.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil

from benchmarks.serving import free_port, generated, running, write_requests
from benchmarks.timing import log

SAMPLES = 128  # of a request
TIMES = (1, 2, 4)
CONNECTIONS = 300
_LOOK = 0.05  # seconds between two looks at the memory
_FEW = 8  # connections that keep the server busy


class PeakMemory:
    """The most memory of processes, in MB, while it is entered."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self.mb, self._processes = memory_mb(processes), processes
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK):
            self.mb = max(self.mb, memory_mb(self._processes))


def memory_mb(processes: list[psutil.Process]) -> float:
    return float(sum(process.memory_info().rss for process in processes)) / 1e6


def overload_figures(work: Path, folder: Path, num_rows: int, seconds: float) -> dict[str, float]:
    """The capacity is what is answered when a few connections always have a request. `overload_mb`: growth of the most
    memory over that of a server which has answered as much as it can.
    """
    requests, port = work / "overload.jsonl", free_port()
    write_requests(requests, num_rows, SAMPLES, 100)
    serve = ["torchfleet.observe.commands", "serve", str(folder), "--port", str(port), "--workers", "1"]
    result: dict[str, float] = {}
    with running(serve, port) as process:
        servers = psutil.Process(process.pid).children()
        first = generated(port, requests, _FEW, num=100)  # also warms caches
        capacity = generated(port, requests, _FEW, num=max(100, int(seconds * first["rps"])))["rps"]
        log(f"  capacity: {capacity:,.1f} requests of {SAMPLES} samples a second")
        before = memory_mb(servers)
        with PeakMemory(servers) as peak:
            for times in TIMES:
                rate = times * capacity
                found = generated(port, requests, CONNECTIONS, rate=rate, seconds=max(seconds, 200 / capacity))
                log(f"  at {times} times that: " + ", ".join(f"{name} {value:,.1f}" for name, value in found.items()))
                for name in ("accepted", "failed", "accepted_p99_ms", "late_p99_ms"):
                    result[f"overload_{times}x_{name}"] = found[name]
                result[f"overload_{times}x_accepted_rps"] = found["accepted"] / found["seconds"]
    result |= {"overload_capacity_rps": capacity, "overload_mb": peak.mb - before}
    result["overload_p99_ratio"] = result["overload_4x_accepted_p99_ms"] / result["overload_1x_accepted_p99_ms"]
    return result | {"load_average": os.getloadavg()[0]}
