"""The life cycle of a job: init, server or worker, callbacks, stop."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch

from torchfleet.api.current_job import any_job, current, get_job, run_info
from torchfleet.api.job.arguments import Strategy, check_role_maker, check_strategy
from torchfleet.api.job.not_begun import NO_SERVER, NO_WORKER
from torchfleet.api.job.protocol import Job
from torchfleet.api.process_role import is_under_way
from torchfleet.base.errors import FleetError, RoleError
from torchfleet.base.monitor.notices import tell
from torchfleet.base.paddle_names import ignored_flags
from torchfleet.base.role.role_info import HETER_WORKER, WORKER, RoleInfo
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy


class RoleMaker(Protocol):
    def read(self) -> RoleInfo: ...


def init(role_maker: RoleMaker | None = None, is_collective: bool = False, strategy: Strategy | None = None) -> None:
    """Determine this process's role, from the environment or from `role_maker`. Without either: one local worker.

    With is_collective=True there are no servers: all processes train together (docs/collective/README.md). `strategy`:
    the settings of the job. distributed_model and distributed_optimizer also accept it; pass it to one of the three.
    init may be called again with the same arguments while no worker or server is running, and with others after
    stop_worker or reset.
    """
    if is_under_way():
        raise FleetError(
            "fleet.init was called before, and its job is under way: call fleet.stop_worker() at its end, or "
            "fleet.reset() to give it up and begin anew"
        )
    check_role_maker(role_maker)
    settings = check_strategy(strategy, "fleet.init")
    info = (role_maker or PaddleCloudRoleMaker(is_collective)).read()
    if info.is_collective != is_collective:
        raise RoleError(
            f"fleet.init(is_collective={is_collective}) got a role maker for the other kind of job: give both the same"
        )
    given = {"is_collective": is_collective, "strategy": settings, "role_maker": info}
    _check_same(given)
    if info.num_threads:
        torch.set_num_threads(info.num_threads)
    reset()
    for told in ignored_flags(os.environ):
        tell(f"fleet: {told}")
    current.job = _collective_job(info, settings) if is_collective else _server_job(info, settings)
    current.arguments = given


def _check_same(given: dict[str, Any]) -> None:
    """Raise FleetError if a model was distributed after a call with other arguments."""
    if current.job is None or current.job.model is None:
        return
    for name, value in given.items():
        before = current.arguments.get(name, value)
        if value != before:
            raise FleetError(
                f"fleet.init was called before with {name}={before!r:.200}, and now with {name}={value!r:.200}: a job "
                "has one setting. Leave one of the two calls out, or call fleet.reset() between them to begin anew."
            )


def _collective_job(info: RoleInfo, strategy: DistributedStrategy | None) -> Job:
    # Imported on demand: without it, jobs with servers start in half the time.
    from torchfleet.collective.collective_job import CollectiveJob

    return CollectiveJob(info, strategy)


def _server_job(info: RoleInfo, strategy: DistributedStrategy | None) -> Job:
    # Imported on demand: without it, collective jobs start sooner and are 70 MiB smaller.
    from torchfleet.api.job.ps_job import ParameterServerJob

    return ParameterServerJob(info, strategy)


def init_server(dirname: str | None = None, var_names: list[str] | None = None) -> None:
    """Create this server's tables. `dirname`: a saved model to load, completely or only what `var_names` names.

    Names are those of sparse tables and dense parameters. The model may have been saved by any number of servers. In a
    job of one process, with the servers inside the worker, init_worker loads the model.
    """
    get_job().init_server(dirname, var_names)


def run_server() -> None:
    """Serve until all workers have stopped."""
    get_job(NO_SERVER).run_server()
    current.job = None


def run_heter_worker() -> None:
    """Compute the blocks under fleet.device_guard("gpu") for the workers, until all workers have stopped.

    For scripts with a branch for heter workers (is_heter_worker). In others init_worker does the same.
    """
    get_job().run_heter_worker()
    current.job = None


def init_worker(dirname: str | None = None, var_names: list[str] | None = None) -> None:
    """Connect to the servers. All workers start from worker 0's parameters.

    A heter worker serves here, as run_heter_worker does, and then ends the script (SystemExit).

    `dirname` is for scripts that also run in one process, where the saved model is loaded here. With servers, the
    servers load it (init_server), and this call checks that they did. `var_names`: the part of it to load, as in
    init_server.
    """
    job = get_job()
    if job.info.role == HETER_WORKER:
        run_heter_worker()
        raise SystemExit(0)
    job.init_worker(dirname, var_names)
    current.callbacks.start(run_info(job))


def begin_prediction(model: torch.nn.Module, dirname: str | None, var_names: list[str] | None) -> None:
    """Called by DistributedInfer, after training or in a separate job, whose servers serve here."""
    get_job().begin_prediction(model, dirname, var_names)


def add_callback(callback: object, every_worker: bool = False) -> None:
    """Add a callback: an object with some of the methods of fleet.callbacks.Callback.

    Call it after fleet.init(), on every process. Worker 0 (rank 0) uses `callback`, other workers only with
    `every_worker`, servers never. An error in it is printed and training continues; an error in on_start is raised.
    """
    job = any_job()
    if job.info.role == WORKER and (every_worker or job.info.worker_index == 0):
        current.callbacks.add(callback)


def stop_worker() -> None:
    """Send queued gradients and leave the servers. The servers end when the last worker has stopped.

    If worker 0 has saved since its last step, it waits here until the other workers have stopped, too, and saves again
    to the same folders if they have changed the model since: docs/checkpoints.md. Worker 0 prints a summary with the
    staleness of network and rows over all workers.
    """
    job = any_job(NO_WORKER)
    for dirname in job.complete_saves():
        current.callbacks.save(dirname)
    stats = job.stop()
    current.job, current.has_stopped = None, True
    current.callbacks.end(stats)


def reset() -> None:
    """End this process's part in a job, so that fleet.init can begin a new one. Without a job, do nothing.

    A worker sends queued gradients and leaves its servers, or abandons them if they do not respond. A server releases
    its address. The process group of a collective job is destroyed if fleet created it. This does not wait for other
    processes: in a job of several processes, end with `stop_worker`.
    """
    job, current.job, current.has_stopped = current.job, None, False
    if job is not None:
        job.reset()
    current.callbacks.end({})
