"""A plausible record of a run, made without a job: what the dashboard is tried on."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
BEGIN = 1_790_000_000.0


class MadeJob:
    """A job with servers whose records can be asked for second by second. The same arguments give the same records."""

    def __init__(
        self, num_servers: int = 2, num_workers: int = 4, seconds: int = 120, seed: int = 0, begin: float = BEGIN
    ) -> None:
        self.num_servers, self.num_workers, self.seconds = num_servers, num_workers, seconds
        self.random, self.begin = random.Random(seed), begin
        self.tables = {"user": 40_000.0, "item": 160_000.0, "context": 9_000.0}
        self.killed = num_workers - 1  # this worker is killed half way, and started again

    def start(self) -> list[Record]:
        command = ["python", "train.py", "--epochs", "3", "--batch_size", "512"]
        begin = {"time": self.begin, "kind": "start", "command": command, "attempt": 0, "version": "0.1.0"}
        line = {"time": self.begin, "kind": "event", "text": "[fleetrun] logs in log/latest"}
        return [begin, line, *(self._role(self.begin, role, index, {}) for role, index in self.roles())]

    def second(self, second: int) -> Iterator[Record]:
        time = self.begin + second
        if second == self.seconds // 2:
            text = f"[fleetrun] worker {self.killed} was killed by SIGKILL; starting it again"
            yield {"time": time, "kind": "event", "text": text}
        for role, index in self.roles():
            status = self._server(index, second) if role == "server" else self._worker(index, second)
            yield self._role(time, role, index, status, second)

    def end(self) -> Iterator[Record]:
        time = self.begin + self.seconds
        for role, index in self.roles():
            status = self._server(index, self.seconds) if role == "server" else self._worker(index, self.seconds)
            yield {**self._role(time, role, index, status, self.seconds), "state": "done", "returncode": 0}
        yield {"time": time, "kind": "event", "text": "[fleetrun] finished; logs in log/latest"}
        yield {"time": time, "kind": "end", "finished": True}

    def roles(self) -> list[tuple[str, int]]:
        return [("server", i) for i in range(self.num_servers)] + [("worker", i) for i in range(self.num_workers)]

    def _role(self, time: float, role: str, index: int, status: Record, second: int = 0) -> Record:
        restarts = int(role == "worker" and index == self.killed and second >= self.seconds // 2)
        return {
            "time": time, "kind": "role", "key": f"{role}.{index}", "role": role, "index": index,
            "state": "running" if status else "starting", "status": status, "replica": 0, "returncode": None,
            "num_restarts": restarts, "log": f"{role}log.{index}",
        }  # fmt: skip

    def _worker(self, index: int, second: int) -> Record:
        slow = 0.6 if index == 1 else 1.0
        speed = 5200 * slow * (1 + 0.06 * self.random.gauss(0, 1)) * (1 - 0.25 * math.exp(-second / 8))
        samples, total = int(5000 * slow * second), 5000 * self.seconds
        done = samples % max(1, total // 3)
        loss = 0.46 + 0.24 * math.exp(-second / 30) + 0.004 * self.random.gauss(0, 1)
        return {
            "role": "worker", "mode": "async", "host": f"node{index % 7}", "pid": 4000 + index,
            "steps": samples // 512, "steps_per_s": speed / 512, "samples": samples, "samples_per_s": speed,
            "samples_per_s_mean": 5000 * slow, "queue": self.random.randint(0, 4), "queue_size": 16,
            "waiting": 0.12 + 0.05 * self.random.random(), "left": False, "retries": 0, "pull_wait_ms": 2.1 / slow,
            "push_wait_ms": 0.7, "memory": int(610e6 + 1.2e6 * second),
            "metrics": {"loss": loss, "auc": 0.5 + 0.29 * (1 - math.exp(-second / 25))},
            "progress": {
                "epoch": min(2, samples * 3 // total), "epochs": 3, "done": done, "total": total // 3,
                "unit": "samples", "eta_s": max(0.0, self.seconds - second),
            },
        }  # fmt: skip

    def _server(self, index: int, second: int) -> Record:
        tables = {
            name: {
                "kind": "sparse", "rows": int(most * (1 - math.exp(-second / 40))), "bytes": int(84 * most),
                "evicted": int(most * max(0, second - 60) / 900), "created": int(most),
            }
            for name, most in self.tables.items()
        }  # fmt: skip
        num = second // 40
        saves = (
            {"num": num, "last_time": self.begin + 40 * num, "last_seconds": 1.3, "last_rows": 81_000 * num}
            if num
            else {}
        )
        if saves:
            saves |= {"last_bytes": 7_600_000 * num, "dirname": f"model/save-{num}"}
        return {
            "role": "server", "host": "node0", "pid": 3900 + index, "backup": False, "requests": 400 * second,
            "requests_per_s": 380 + 20 * self.random.random(), "errors": 0, "dropped": 0,
            "busy": 0.35 + 0.1 * self.random.random(), "rows": {name: table["rows"] for name, table in tables.items()},
            "tables": tables, "memory": int(180e6 + 2.1e6 * second), "saves": saves,
            "staleness_dense": {str(age): int(9000 * math.exp(-((age - 3) ** 2) / 6)) for age in range(9)},
            "staleness_sparse": {str(age): int(20000 * math.exp(-age / 1.5)) for age in range(7)},
            "hot_keys": {name: [[str((1 << 60) + 7 * i + index), 900 // (i + 1)] for i in range(8)] for name in tables},
            "bytes_in": 9_000_000 * second, "bytes_out": 14_000_000 * second, "workers_joined": self.num_workers,
            "workers_lost": 0,
        }  # fmt: skip


def write(folder: Path, job: MadeJob, until: int | None = None, is_ended: bool = True) -> Path:
    """The record of a job, whole or until a second, in a folder; with logs of a few lines. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    append(folder, job.start())
    for second in range(1, job.seconds if until is None else until):
        append(folder, job.second(second))
    if is_ended and until is None:
        append(folder, job.end())
    for role, index in job.roles():
        lines = (f"[12:00:{second % 60:02d}] {role} {index}: step {second}\n" for second in range(job.seconds))
        folder.joinpath(f"{role}log.{index}").write_text("".join(lines))
    return folder


def append(folder: Path, records: Iterator[Record] | list[Record]) -> None:
    with open(folder / "history.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
