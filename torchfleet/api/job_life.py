"""A job from its first call to its last: the role, server or worker, callbacks, the end."""

from __future__ import annotations

from typing import Protocol

import torch

from torchfleet.api.current_job import any_job, current, get_job, run_info
from torchfleet.api.job.arguments import check_role_maker, check_strategy
from torchfleet.api.job.protocol import Job
from torchfleet.api.job.ps_job import NO_SERVER, NO_WORKER, ParameterServerJob
from torchfleet.api.process_role import is_under_way
from torchfleet.base.errors import FleetError, RoleError
from torchfleet.base.role.role_info import SERVER, RoleInfo
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy


class RoleMaker(Protocol):
    def read(self) -> RoleInfo: ...


def init(
    role_maker: RoleMaker | None = None, is_collective: bool = False, strategy: DistributedStrategy | None = None
) -> None:
    """Find this process's role: from the environment, or as `role_maker` says. Without either: one local worker.

    With is_collective=True there are no servers: all processes train together (docs/collective/README.md). `strategy`:
    the settings of the job; distributed_model and distributed_optimizer take it, too, and one of the three is enough.
    It may be called again as long as nothing is under way: before a worker or server has started, or after it stopped.
    """
    if is_under_way():
        raise FleetError(
            "fleet.init was called before, and its job is under way: call fleet.stop_worker() at its end, or "
            "fleet.reset() to give it up and begin anew"
        )
    check_role_maker(role_maker)
    check_strategy(strategy, "fleet.init")
    info = (role_maker or PaddleCloudRoleMaker(is_collective)).read()
    if info.is_collective != is_collective:
        raise RoleError(
            f"fleet.init(is_collective={is_collective}) got a role maker for the other kind of job: give both the same"
        )
    if info.num_threads:
        torch.set_num_threads(info.num_threads)
    reset()
    current.job = _collective_job(info, strategy) if is_collective else ParameterServerJob(info, strategy)


def _collective_job(info: RoleInfo, strategy: DistributedStrategy | None) -> Job:
    # Imported when it is needed: jobs with servers start in half the time without.
    from torchfleet.collective.collective_job import CollectiveJob

    return CollectiveJob(info, strategy)


def init_server(dirname: str | None = None, var_names: list[str] | None = None) -> None:
    """Make this server's tables; from a saved model if `dirname` is given: all of it, or what `var_names` names.

    Names are those of sparse tables and of dense parameters. The model may have been saved by any number of servers.
    In one process, whose servers are within the worker, init_worker then loads it.
    """
    get_job().init_server(dirname, var_names)


def run_server() -> None:
    """Serve until all workers have stopped."""
    get_job(NO_SERVER).run_server()


def init_worker(dirname: str | None = None, var_names: list[str] | None = None) -> None:
    """Connect to the servers; all workers start from worker 0's parameters.

    `dirname` is for scripts that also run in one process: there the saved model is loaded here. With servers it is
    they who load (init_server), and it is checked that they did. `var_names`: as in init_server, what of it is loaded.
    """
    job = get_job()
    job.init_worker(dirname, var_names)
    current.callbacks.start(run_info(job))


def begin_prediction(model: torch.nn.Module, dirname: str | None, var_names: list[str] | None) -> None:
    """For DistributedInfer: after training, or as a job of its own, whose servers serve here."""
    get_job().begin_prediction(model, dirname, var_names)


def add_callback(callback: object, every_worker: bool = False) -> None:
    """Tell `callback` of this training: an object with some of the methods of fleet.callbacks.Callback.

    After fleet.init(), on every process: worker 0 (rank 0) calls it, the others only with `every_worker`, servers
    never. An error in it is printed, and training goes on; one in on_start is raised.
    """
    job = any_job()
    if job.info.role != SERVER and (every_worker or job.info.worker_index == 0):
        current.callbacks.add(callback)


def stop_worker() -> None:
    """Send what is queued and tell the servers; they end when the last worker has stopped.

    The first worker prints how old the rows were that its fleet learned from.
    """
    stats = any_job(NO_WORKER).stop()
    current.job = None
    current.callbacks.end(stats)


def reset() -> None:
    """End whatever this process has of a job, so that fleet.init can begin a new one; without a job, do nothing.

    A worker sends what is queued and leaves its servers, or lets go of them if they do not answer. A server gives its
    address back. The process group of a collective job is left if it was fleet that made it. Other processes are not
    waited for: in a job of several, `stop_worker` is the way to end.
    """
    job, current.job = current.job, None
    if job is not None:
        job.reset()
    current.callbacks.end({})
