"""Jobs as a launcher sees them, made up for tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot

TABLES = {
    "words": {"kind": "sparse", "is_dense": False, "rows": 12_345, "bytes": 1_200_000, "evicted": 0, "created": 12_345},
    "dense.0": {"kind": "dense", "is_dense": True, "rows": 81, "bytes": 648},
}
SERVING = {
    "role": "server", "pid": 7, "requests": 900, "requests_per_s": 321.0, "busy": 0.97, "memory": 460_000_000,
    "rows": {"words": 12_345}, "tables": TABLES, "staleness_dense": {"1": 90, "3": 10},
    "staleness_sparse": {"2": 80, "9": 20},
}  # fmt: skip
TRAINING = {
    "role": "worker", "pid": 8, "mode": "async", "steps": 1_200, "steps_per_s": 40.5, "samples": 614_400,
    "samples_per_s": 20_736.0, "samples_per_s_mean": 19_000.0, "queue": 1, "queue_size": 2, "waiting": 0.61,
    "left": False, "retries": 0, "pull_wait_ms": 3.25, "push_wait_ms": 0.5, "memory": 450_000_000,
    "metrics": {"loss": 0.45678},
    "progress": {"epoch": 0, "epochs": 3, "done": 370, "total": 1000, "unit": "batches", "eta_s": 80.0},
}  # fmt: skip
COLLECTIVE = {
    "role": "rank", "pid": 9, "mode": "collective", "steps": 50, "samples": 1600, "steps_per_s": 5.0,
    "samples_per_s": 160.0, "samples_per_s_mean": 150.0, "memory": 450_000_000, "metrics": {"loss": 0.25},
}  # fmt: skip

COMPUTING = {
    "role": "heter_worker", "pid": 10, "requests": 2_500, "errors": 0, "passes": 1_234, "sessions": 2, "busy": 0.5,
    "memory": 450_000_000,
}  # fmt: skip


def server(index: int = 0, state: str = "running", **changed: Any) -> RoleSnapshot:
    return _role("server", index, state, SERVING, changed)


def worker(index: int = 0, state: str = "running", **changed: Any) -> RoleSnapshot:
    return _role("worker", index, state, TRAINING, changed)


def rank(index: int = 0, state: str = "running", **changed: Any) -> RoleSnapshot:
    return _role("rank", index, state, COLLECTIVE, changed)


def heter_worker(index: int = 0, state: str = "running", **changed: Any) -> RoleSnapshot:
    return _role("heter_worker", index, state, COMPUTING, changed)


def job(num_servers: int, num_workers: int, now: float = 1000.0, **of_workers: Any) -> JobSnapshot:
    servers, workers = map(server, range(num_servers)), (worker(i, **of_workers) for i in range(num_workers))
    return JobSnapshot(now, [*servers, *workers])


def _role(role: str, index: int, state: str, status: dict[str, Any], changed: dict[str, Any]) -> RoleSnapshot:
    code = {"done": 0, "failed": -9}.get(state)
    told = {} if state == "starting" else {**status, **changed}
    return RoleSnapshot(role, index, state, told, returncode=code, log=f"{role}log.{index}")
