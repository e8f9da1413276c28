"""Which process of the job this is, who the others are, and how it meets them."""

from __future__ import annotations

from torchfleet.api.current_job import any_job, current, get_worker
from torchfleet.api.job.ps_job import NO_WORKER
from torchfleet.base.role.role_info import SERVER
from torchfleet.ps.worker.peers import Workers


def is_collective() -> bool:
    """Whether fleet.init has been called, for a collective job."""
    return current.job is not None and current.job.info.is_collective


def is_set_up() -> bool:
    """Whether fleet.init has been called, for either kind of job."""
    return current.job is not None


def is_under_way() -> bool:
    """Whether this process has a worker, a server or a rank that trains."""
    return current.job is not None and current.job.is_under_way


def is_server() -> bool:
    """Whether this process is a server. In one process, whose servers are within the worker, it is False."""
    return any_job().info.role == SERVER


def is_worker() -> bool:
    """Whether this process trains: a worker, or a rank of a collective job."""
    return not is_server()


def is_first_worker() -> bool:
    """Whether this is worker 0, or rank 0: the one that saves and prints for all."""
    return is_worker() and worker_index() == 0


def worker_index() -> int:
    """This worker's number, or this rank's, from 0. On a server 0."""
    return any_job().info.worker_index


def worker_num() -> int:
    """Workers of the job; of an elastic one, those that are there now."""
    return any_job().num_workers


def first_step() -> int:
    """The number of the step with which this worker begins: 0, or in sync mode, if it was started again, as many as the
    job had made. Its loop goes on with that batch: docs/faults.md."""
    return get_worker().first_step


def data_shard() -> tuple[int, int]:
    """(index, number): which of how many equal shares of the samples this worker trains on.

    In collective training the ranks of one pipeline, and those among which layers are cut, work on the same samples.
    """
    return any_job().data_shard


def server_index() -> int:
    """This server's number, from 0. On a worker 0."""
    return any_job().info.server_index


def server_num() -> int:
    """Servers of the job. In one process, whose servers are within the worker, 1."""
    return any_job().info.num_servers


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """host:port of every worker, if the environment has them, in their order; with `to_string` joined by commas."""
    endpoints = list(any_job().info.worker_endpoints)
    return ",".join(endpoints) if to_string else endpoints


def server_endpoints(to_string: bool = False) -> list[str] | str:
    """host:port of every server, in their order; with `to_string` joined by commas."""
    endpoints = list(any_job().info.server_endpoints)
    return ",".join(endpoints) if to_string else endpoints


def mode() -> str:
    """sync, half_async, async, geo or hybrid; or collective."""
    return any_job(NO_WORKER).mode


def barrier_worker() -> None:
    """Wait until all other workers have called it, too."""
    any_job(NO_WORKER).barrier()


def gather(name: str, data: bytes, comm_world: str = "worker") -> list[bytes]:
    """What everyone in `comm_world` brought, in their order: worker, server, or all (workers first).

    In a process without a fleet, just this.
    """
    return [data] if current.job is None else current.job.gather(name, data, comm_world)


def workers() -> Workers:
    """All workers of the job, over connections of their own; close it."""
    return get_worker().workers()
