"""The role of this process in the job, the other processes, and barriers and gathers among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchfleet.api.current_job import any_job, current, get_worker
from torchfleet.api.job.not_begun import NO_WORKER
from torchfleet.base.own_device import device_of
from torchfleet.base.role.role_info import HETER_WORKER, SERVER, WORKER

if TYPE_CHECKING:
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
    """Whether this process is a server. False in a job of one process, whose servers are inside the worker."""
    return any_job().info.role == SERVER


def is_worker() -> bool:
    """Whether this process trains: a worker, or a rank of a collective job. False on heter workers."""
    return any_job().info.role == WORKER


def is_heter_worker() -> bool:
    """Whether this process computes blocks for the workers: docs/heter.md."""
    return any_job().info.role == HETER_WORKER


def heter_worker_num() -> int:
    """Heter workers of the job; 0 in a job without them."""
    return len(any_job().info.heter_endpoints)


def is_first_worker() -> bool:
    """Whether this is worker 0 or rank 0, which saves and prints for all."""
    return is_worker() and worker_index() == 0


def worker_index() -> int:
    """The index of this worker or rank, from 0. On a server or heter worker, 0."""
    return any_job().info.worker_index


def worker_num() -> int:
    """Workers of the job; of an elastic job, the present ones."""
    return any_job().num_workers


def first_step() -> int:
    """The first step of this worker: 0 or, after a restart in sync mode, the number of steps that the job has made. The
    loop must continue with that batch: docs/faults.md.
    """
    return get_worker().first_step


def data_shard() -> tuple[int, int]:
    """(index, number): this worker trains on the share `index` of `number` equal shares of the samples.

    In collective training, the ranks of a pipeline or a tensor-parallel group train on the same samples.
    """
    return any_job().data_shard


def device() -> torch.device:
    """Return the device on which this process computes: its GPU if it has one, else the CPU. Servers use the CPU.

    A worker or rank has the GPU with its index on its machine; workers share GPUs if there are too few. The variable
    FLEET_DEVICE=cpu keeps a job off the GPUs. Put the model there before distributed_model: Model().to(fleet.device()).
    """
    return device_of(any_job().info)


def server_index() -> int:
    """The index of this server, from 0. On a worker, 0."""
    return any_job().info.server_index


def server_num() -> int:
    """Servers of the job. 1 in a job of one process, whose servers are inside the worker."""
    return any_job().info.num_servers


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """host:port of every worker, in order, if the environment defines them; joined by commas with `to_string`."""
    endpoints = list(any_job().info.worker_endpoints)
    return ",".join(endpoints) if to_string else endpoints


def server_endpoints(to_string: bool = False) -> list[str] | str:
    """host:port of every server, in order; joined by commas with `to_string`."""
    endpoints = list(any_job().info.server_endpoints)
    return ",".join(endpoints) if to_string else endpoints


def mode() -> str:
    """sync, half_async, async, geo or hybrid; or collective."""
    return any_job(NO_WORKER).mode


def barrier_worker() -> None:
    """Wait until all other workers have called it."""
    any_job(NO_WORKER).barrier()


def gather(name: str, data: bytes, comm_world: str = "worker") -> list[bytes]:
    """Gather `data` of all processes in `comm_world`, in their order: worker, server, or all (workers first).

    All of them call it with the same `name`. In a process without a job, returns only its own data.
    """
    return [data] if current.job is None else current.job.gather(name, data, comm_world)


def workers() -> Workers:
    """All workers of the job, over separate connections. The caller must close it."""
    return get_worker().workers()
