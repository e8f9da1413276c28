"""The current job of this process and its callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torchfleet import __version__
from torchfleet.api.callbacks.callback import Callbacks
from torchfleet.api.job.not_begun import NO_WORKER
from torchfleet.api.job.protocol import Job
from torchfleet.base.errors import FleetError

if TYPE_CHECKING:  # collective jobs load nothing of servers
    from torchfleet.api.job.ps_job import ParameterServerJob
    from torchfleet.api.job.worker_role import WorkerRole

NO_JOB = "call fleet.init() first"
STOPPED = (
    "fleet.stop_worker() was called: this process has left its job. Save, predict and ask for statistics before it, "
    "and call it once; fleet.init() begins another job"
)


class CurrentJob:
    """The job and the callbacks of this process. No other module stores them."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.arguments: dict[str, Any] = {}  # of fleet.init, which made the job
        self.has_stopped = False  # stop_worker has ended the last job
        self.callbacks = Callbacks()
        self.prepared: dict[str, Any] = {}  # loaders and schedulers of fleet.prepare, whose state a save may have


current = CurrentJob()


def any_job(missing: str = NO_JOB) -> Job:
    """This process's job, of either kind. Without a job, raises FleetError: with `missing`, which says what to call
    first, or because the job was stopped."""
    if current.job is None:
        raise FleetError(STOPPED if current.has_stopped else missing)
    return current.job


def get_job(missing: str = NO_JOB) -> ParameterServerJob:
    job = any_job(missing)
    if job.info.is_collective:
        raise FleetError("this is for jobs with parameter servers, and this job is collective (is_collective=True)")
    return cast("ParameterServerJob", job)


def get_worker() -> WorkerRole:
    return get_job(NO_WORKER).worker


def run_info(job: Job) -> dict[str, Any]:
    """The `info` that callbacks receive at the start of a job."""
    info = job.info
    numbers = {"worker_index": info.worker_index, "num_workers": info.num_workers}
    servers = {} if info.is_collective else {"num_servers": info.num_servers}
    return {"mode": job.mode, **numbers, **servers, "version": __version__, "strategy": job.changed_settings}
