"""An open-loop load generator for HTTP: requests begin by a clock, whatever the answers do.

The latency of a request counts from the moment at which it was due, so that a server that stops for a while is charged
for all requests that were due meanwhile (coordinated omission). It is one thread over plain sockets with requests that
were built before, to leave the processor to the server.
"""

from __future__ import annotations

import argparse
import gc
import json
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass
class Connection:
    """A connection with one request under way, or none."""

    socket: socket.socket
    due: float = 0.0
    received: bytes = b""


@dataclass
class Load:
    """What a run found, in seconds. `delays`: from the moment at which a request was due until it was sent."""

    latencies: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)  # of these, answered with 200
    delays: list[float] = field(default_factory=list)
    seconds: float = 0.0
    own_cpu: float = 0.0

    def figures(self) -> dict[str, float]:
        times = 1000 * np.array(self.latencies or [np.inf])
        return {
            "rps": len(self.latencies) / max(self.seconds, 1e-9),
            "p50_ms": float(np.percentile(times, 50)),
            "p99_ms": float(np.percentile(times, 99)),
            "p999_ms": float(np.percentile(times, 99.9)),
            "late_p99_ms": float(np.percentile(1000 * np.array(self.delays or [np.inf]), 99)),
            "failed": len(self.latencies) - len(self.accepted),
            "accepted": len(self.accepted),
            "accepted_p99_ms": float(np.percentile(1000 * np.array(self.accepted or [np.inf]), 99)),
            "seconds": self.seconds,
            "client_us": 1e6 * self.own_cpu / max(1, len(self.latencies)),
        }


class LoadGenerator:
    """Connections to a server. They have been used before a run begins: making them takes the server's time, too."""

    def __init__(self, port: int, requests: list[bytes], num_connections: int) -> None:
        self._requests, self._sent = requests, 0
        self._poll = select.epoll()
        self._connections: dict[int, Connection] = {}
        for _ in range(num_connections):
            made = socket.create_connection(("127.0.0.1", port))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._poll.register(made.fileno(), select.EPOLLIN)
            self._connections[made.fileno()] = Connection(made)
        self._idle = list(self._connections.values())
        self._run(Load(), deque([time.perf_counter()] * num_connections))

    def run(self, rate: float, seconds: float, seed: int) -> Load:
        """Send requests at a mean rate, at random moments, for `seconds`, and wait for their answers."""
        return self._at(np.cumsum(np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds))).tolist())

    def run_at_once(self, num: int) -> Load:
        """Send `num` requests: each connection sends the next one when it has an answer."""
        return self._at([0.0] * num)

    def _at(self, moments: list[float]) -> Load:
        """Send requests so many seconds from now."""
        load, cpu, start = Load(), time.process_time(), time.perf_counter() + 0.01
        self._run(load, deque([start + moment for moment in moments]))
        load.seconds, load.own_cpu = time.perf_counter() - start, time.process_time() - cpu
        return load

    def close(self) -> None:
        for connection in self._connections.values():
            connection.socket.close()

    def _run(self, load: Load, due: deque[float]) -> None:
        idle, poll, connections, num = self._idle, self._poll, self._connections, len(self._connections)
        while due or len(idle) < num:
            now = time.perf_counter()
            while due and idle and due[0] <= now:
                connection = idle.pop()
                connection.due = due.popleft()
                connection.socket.sendall(self._requests[self._sent % len(self._requests)])
                load.delays.append(now - connection.due)
                self._sent += 1
            pause = min(0.1, max(0.0, due[0] - time.perf_counter())) if due and idle else 0.1
            for number, _ in poll.poll(pause):
                if self._is_answered(load, connections[number]):
                    idle.append(connections[number])

    def _is_answered(self, load: Load, connection: Connection) -> bool:
        """Read what has come; whether the answer is complete."""
        data = connection.socket.recv(1 << 14)
        if not data:
            raise ConnectionError("the server has closed a connection")
        connection.received = data = connection.received + data
        if not is_whole(data):
            return False
        load.latencies.append(time.perf_counter() - connection.due)
        if data.startswith(b"HTTP/1.1 200"):
            load.accepted.append(load.latencies[-1])
        connection.received = b""
        return True


def is_whole(data: bytes) -> bool:
    """Whether a response is complete."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return False
    at = data.find(b"content-length: ", 0, head) + len(b"content-length: ")
    return len(data) >= head + 4 + int(data[at : data.find(b"\r\n", at)])


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def main() -> None:
    """`python -m benchmarks.serving_load`: a process of its own; one line of JSON with the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--requests", type=Path, required=True, help="bodies, one on each line")
    parser.add_argument("--path", required=True)
    parser.add_argument("--rate", type=float, default=0.0, help="0: --num requests, as fast as they are answered")
    parser.add_argument("--num", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    requests = [post(chosen.path, body) for body in chosen.requests.read_bytes().splitlines()]
    gc.disable()
    generator = LoadGenerator(chosen.port, requests, chosen.connections)
    is_timed = chosen.rate > 0
    found = generator.run(chosen.rate, chosen.seconds, chosen.seed) if is_timed else generator.run_at_once(chosen.num)
    json.dump(found.figures(), sys.stdout)
    generator.close()


if __name__ == "__main__":
    main()
