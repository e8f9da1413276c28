"""The facade: the functions of `import torchfleet as fleet`, each a check and a call of this process's job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, overload

import msgspec
import torch

from torchfleet import __version__
from torchfleet.adoption import AdoptedOptimizer
from torchfleet.callbacks.callback import Callbacks
from torchfleet.checkpoint.manifest import read_manifest
from torchfleet.checkpoint.manifest_file import has_manifest
from torchfleet.data.dataset import Dataset, file_shard
from torchfleet.data.samples.slots import Batch
from torchfleet.errors import FleetError, RoleError
from torchfleet.fetch import FetchHandler
from torchfleet.job.arguments import (
    check_loader,
    check_model,
    check_optimizer,
    check_role_maker,
    check_scheduler,
    check_strategy,
    metric,
)
from torchfleet.job.protocol import Job
from torchfleet.job.ps_job import NO_SERVER, NO_WORKER, ParameterServerJob
from torchfleet.job.worker_role import WorkerRole
from torchfleet.monitor.stop_request import end_with_save
from torchfleet.role import SERVER, PaddleCloudRoleMaker, RoleInfo
from torchfleet.storage import Storage
from torchfleet.strategy.distributed_strategy import DistributedStrategy
from torchfleet.tables.settings.policy import Shrink
from torchfleet.training import Report, Result, as_step, infer, train
from torchfleet.worker.distributed_optimizer import DistributedOptimizer
from torchfleet.worker.modes.whole_tables import WholeTables
from torchfleet.worker.peers import Workers

Item = TypeVar("Item")


class RoleMaker(Protocol):
    def read(self) -> RoleInfo: ...


_job: Job | None = None  # this process's; held here and nowhere else
_callbacks = Callbacks()  # of the same

_NO_JOB = "call fleet.init() first"


def init(
    role_maker: RoleMaker | None = None, is_collective: bool = False, strategy: DistributedStrategy | None = None
) -> None:
    """Find this process's role: from the environment, or as `role_maker` says. Without either: one local worker.

    With is_collective=True there are no servers: all processes train together (docs/collective/README.md).
    It may be called again as long as nothing is under way: before a worker or server has started, or after it stopped.
    """
    global _job
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
    _job = _collective_job(info, strategy) if is_collective else ParameterServerJob(info, strategy)


def _collective_job(info: RoleInfo, strategy: DistributedStrategy | None) -> Job:
    # Imported when it is needed: jobs with servers start in half the time without.
    from torchfleet.collective.collective_job import CollectiveJob

    return CollectiveJob(info, strategy)


def distributed_model(
    model: torch.nn.Module, strategy: DistributedStrategy | None = None, sparse: str | int | None = None
) -> torch.nn.Module:
    """The same model, with its sparse embeddings on the servers; in collective training, one that all ranks run.

    Sparse are those of fleet.nn, and torch's with sparse=True. With `sparse`, also others of torch's: those with at
    least so many rows, or with "auto" those whose trained weights have 1 MiB or more. Worker 0 prints which they are.
    On the servers a row is updated in the steps that look it up: docs/modes/README.md.
    """
    job = _any_job()
    check_model(model)
    check_strategy(strategy, "fleet.distributed_model")
    job.use(strategy, "fleet.distributed_model")
    return job.distribute_model(model, sparse)


@overload
def distributed_optimizer(
    optimizer: torch.optim.Optimizer, strategy: DistributedStrategy | None = None
) -> AdoptedOptimizer: ...


@overload
def distributed_optimizer(
    optimizer: Sequence[torch.optim.Optimizer], strategy: DistributedStrategy | None = None
) -> list[AdoptedOptimizer]: ...


def distributed_optimizer(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], strategy: DistributedStrategy | None = None
) -> AdoptedOptimizer | list[AdoptedOptimizer]:
    """The optimizer with its updates on the servers (SGD, Adagrad, Adam, AdamW, SparseAdam), or with the collective
    strategies around its step.

    With servers there may be several, given as a list or one after another, each with parameters of its own: say
    SparseAdam for the embeddings and Adam for the rest. Each makes its own steps. Not in geo and hybrid training.
    """
    if isinstance(optimizer, (list, tuple)) and optimizer:
        return [distributed_optimizer(one, strategy) for one in optimizer]
    job = _any_job()
    check_optimizer(optimizer)
    check_strategy(strategy, "fleet.distributed_optimizer")
    job.use(strategy, "fleet.distributed_optimizer")
    assert isinstance(optimizer, torch.optim.Optimizer)
    made = job.distribute_optimizer(optimizer)
    if job.info.is_collective:
        _callbacks.start(_run_info(job))
    return made


def distributed_scheduler(scheduler: Any) -> Any:
    """The same scheduler, counting global steps: in geo training each of its steps stands for one of every worker.

    For schedules that advance once per batch. One that advances per epoch needs no change.
    """
    job = _any_job()
    check_scheduler(scheduler)
    return job.distribute_scheduler(scheduler)


def is_collective() -> bool:
    """Whether fleet.init has been called, for a collective job."""
    return _job is not None and _job.info.is_collective


def is_set_up() -> bool:
    """Whether fleet.init has been called, for either kind of job."""
    return _job is not None


def is_under_way() -> bool:
    """Whether this process has a worker, a server or a rank that trains."""
    return _job is not None and _job.is_under_way


def is_server() -> bool:
    return _any_job().info.role == SERVER


def is_worker() -> bool:
    return not is_server()


def is_first_worker() -> bool:
    return is_worker() and worker_index() == 0


def worker_index() -> int:
    return _any_job().info.worker_index


def worker_num() -> int:
    """Workers of the job; of an elastic one, those that are there now."""
    return _any_job().num_workers


def first_step() -> int:
    """The number of the step with which this worker begins: 0, or in sync mode, if it was started again, as many as the
    job had made. Its loop goes on with that batch: docs/faults.md."""
    return _get_worker().first_step


def data_shard() -> tuple[int, int]:
    """(index, number): which of how many equal shares of the samples this worker trains on.

    In collective training the ranks of one pipeline, and those among which layers are cut, work on the same samples.
    """
    return _any_job().data_shard


def server_index() -> int:
    return _any_job().info.server_index


def server_num() -> int:
    return _any_job().info.num_servers


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    endpoints = list(_any_job().info.worker_endpoints)
    return ",".join(endpoints) if to_string else endpoints


def server_endpoints(to_string: bool = False) -> list[str] | str:
    endpoints = list(_any_job().info.server_endpoints)
    return ",".join(endpoints) if to_string else endpoints


def init_server(dirname: str | None = None, var_names: list[str] | None = None) -> None:
    """Make this server's tables; from a saved model if `dirname` is given: all of it, or what `var_names` names.

    Names are those of sparse tables and of dense parameters. The model may have been saved by any number of servers.
    In one process, whose servers are within the worker, init_worker then loads it.
    """
    _get_job().init_server(dirname, var_names)


def run_server() -> None:
    """Serve until all workers have stopped."""
    _get_job(NO_SERVER).run_server()


def init_worker(dirname: str | None = None, var_names: list[str] | None = None) -> None:
    """Connect to the servers; all workers start from worker 0's parameters.

    `dirname` is for scripts that also run in one process: there the saved model is loaded here. With servers it is
    they who load (init_server), and it is checked that they did.
    """
    job = _get_job()
    job.init_worker(dirname, var_names)
    _callbacks.start(_run_info(job))


def add_callback(callback: object, every_worker: bool = False) -> None:
    """Tell `callback` of this training: an object with some of the methods of fleet.callbacks.Callback.

    After fleet.init(), on every process: worker 0 (rank 0) calls it, the others only with `every_worker`, servers
    never. An error in it is printed, and training goes on; one in on_start is raised.
    """
    job = _any_job()
    if job.info.role != SERVER and (every_worker or job.info.worker_index == 0):
        _callbacks.add(callback)


def stop_worker() -> None:
    """Send what is queued and tell the servers; they end when the last worker has stopped.

    The first worker prints how old the rows were that its fleet learned from.
    """
    global _job
    stats = _any_job(NO_WORKER).stop()
    _job = None
    _callbacks.end(stats)


def reset() -> None:
    """End whatever this process has of a job, so that fleet.init can begin a new one; without a job, do nothing.

    A worker sends what is queued and leaves its servers, or lets go of them if they do not answer. A server gives its
    address back. The process group of a collective job is left if it was fleet that made it. Other processes are not
    waited for: in a job of several, `stop_worker` is the way to end.
    """
    global _job
    job, _job = _job, None
    if job is not None:
        job.reset()
    _callbacks.end({})


def barrier_worker() -> None:
    """Wait for all other workers."""
    _any_job(NO_WORKER).barrier()


def prefetch(loader: Iterable[Item]) -> Iterator[Item]:
    """The loader's batches; where the mode allows it, rows of the next batch are pulled while this one computes.

    In collective training it ends on all ranks together, when the first has no batch left: nobody waits for ever.
    """
    job = _any_job(NO_WORKER)
    check_loader(loader)
    return job.prefetch(loader)


def epochs(num: int, start: int = 0) -> Iterator[int]:
    """`start` to num - 1, for the loop over epochs: whoever watches the job then knows when all of them will be over.

    An epoch is a pass over `prefetch(loader)`, or a call of train_from_dataset. `start`: where a job goes on.
    """
    if type(num) is not int or type(start) is not int or not 0 <= start <= num:
        raise FleetError(f"fleet.epochs: expected a number of epochs and a start of at most that, found {num}, {start}")
    _any_job(NO_WORKER).plan_epochs(num, start)
    return iter(range(start, num))


def train_from_dataset(
    model: Callable[[Batch], Any],
    dataset: Dataset,
    optimizer: DistributedOptimizer | Sequence[DistributedOptimizer],
    loss_fn: Callable[[Any, Batch], torch.Tensor] | None = None,
    thread: int = 1,
    fetch_list: Sequence[str] | None = None,
    print_period: int = 100,
    fetch_handler: FetchHandler | None = None,
) -> Result:
    """One pass over a dataset with reading, pulling, computing and pushing overlapped: docs/data.md.

    `model` is a function step(batch) that returns the loss or a dict with it; or the model, with a
    `loss_fn(output, batch)`.
    """
    worker = _get_worker()
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not optimizers or not all(isinstance(one, DistributedOptimizer) for one in optimizers):
        raise FleetError("train_from_dataset: give the optimizer that fleet.distributed_optimizer returned")
    report, step = Report("train", fetch_list, print_period, fetch_handler), as_step(model, loss_fn)
    report.on_print = partial(_tell_callbacks, worker)
    with worker.status.follow_samples(dataset) as report.epoch:
        result = train(step, dataset, optimizers, worker.engine, thread, report)
    _callbacks.end_epoch({**result.last, "samples_per_s": result.samples_per_s})
    return result


def infer_from_dataset(
    model: Callable[[Batch], Any],
    dataset: Dataset,
    loss_fn: Callable[[Any, Batch], torch.Tensor] | None = None,
    thread: int = 1,
    fetch_list: Sequence[str] | None = None,
    print_period: int = 100,
    fetch_handler: FetchHandler | None = None,
) -> Result:
    """One pass without gradients, the model in eval mode: ids without a row read as zeros and get none."""
    worker = _get_worker()
    report = Report("infer", fetch_list, print_period, fetch_handler)
    worker.communicator.refresh()
    leave = worker.communicator.leave_thread
    return infer(as_step(model, loss_fn), dataset, worker.model, worker.engine, thread, report, leave)


def split_files(files: Sequence[str]) -> list[str]:
    """This worker's files: each file goes to exactly one worker, counts differ by at most one."""
    return file_shard(files, *data_shard())


def workers() -> Workers:
    """All workers of the job, over connections of their own; close it."""
    return _get_worker().workers()


def gather(name: str, data: bytes, comm_world: str = "worker") -> list[bytes]:
    """What everyone in `comm_world` brought, in their order: worker, server, or all (workers first).

    In a process without a fleet, just this.
    """
    return [data] if _job is None else _job.gather(name, data, comm_world)


def begin_prediction(model: torch.nn.Module, dirname: str | None, var_names: list[str] | None) -> None:
    """For DistributedInfer: after training, or as a job of its own, whose servers serve here."""
    _get_job().begin_prediction(model, dirname, var_names)


def whole_tables(share: float | None = None, shared: bool = False) -> WholeTables:
    """Whole copies of the tables, as arrays to be trained in place: docs/modes/geo.md.

    In one process, or in geo training: then differences are exchanged every k_steps calls of `step_done`. `share` is
    the part of a difference that an exchange sends; unless given, it goes by how often a row was changed. With
    `shared` the workers of one machine train one copy together (Linux; elsewhere each has its own). All workers must
    then call this, and wait for each other here.
    """
    return _get_worker().whole_tables(share, shared)


replica = whole_tables  # its name in earlier versions


def mode() -> str:
    """sync, half_async, async, geo or hybrid; or collective."""
    return _any_job(NO_WORKER).mode


def settle() -> None:
    """Wait until every gradient handed over so far has been applied."""
    _get_worker().communicator.settle()


def flush() -> None:
    """Wait until every gradient of this worker has reached the servers."""
    _get_worker().communicator.flush()


def report(**metrics: float) -> None:
    """Numbers (loss, auc, ...) for everything that watches the job, from the launcher's display to callbacks."""
    job, found = _any_job(NO_WORKER), {name: metric(name, value) for name, value in metrics.items()}
    job.report(found)
    _callbacks.report(job.num_steps, found)


def stats() -> dict[str, Any]:
    """Counters and times of this worker and of all servers, staleness histograms among them."""
    return _get_worker().stats()


def describe() -> str:
    """The tables, which parameter goes to which, and what each server holds."""
    return _get_job().describe()


def save_persistables(dirname: str, mode: int = 0, extra: Mapping[str, Any] | None = None) -> int:
    """Save tables, parameters and optimizer state, to go on training from: docs/checkpoints.md. On worker 0 only.

    `mode`: 0 for all of it, 1 for what changed since the last save there (a delta). `extra`, which JSON must be able to
    hold, is kept with the model: `saved_extra` gives it back. Returns the number of the save.
    """
    if mode not in (0, 1):
        raise FleetError(f"save_persistables(mode={mode}): 0 is a full save, 1 a delta")
    worker = _get_job(NO_WORKER).first_worker("save_persistables")
    number = worker.save(dirname, "delta" if mode else "full", extra).number
    _callbacks.save(dirname)
    return number


def save(dirname: str, extra: Mapping[str, Any] | None = None, asynchronous: bool = False) -> int:
    """Save model, optimizer and strategies, to go on training from, and `extra`, which JSON must be able to hold.

    In collective training all ranks call it together; with parameter servers it is save_persistables, on worker 0 only.
    `asynchronous`, in collective training: return as soon as all is copied, and write it while training goes on. The
    next save, a load and stop_worker wait for it, and raise what went wrong. Returns the number of the save.
    """
    number = _any_job(NO_WORKER).save(dirname, extra, asynchronous)
    _callbacks.save(dirname)
    return number


def load(dirname: str) -> dict[str, Any]:
    """Collective training: go on from what `save` left there, on any number of ranks and under any strategies.

    All ranks call it together, after distributed_model and distributed_optimizer. Returns what `extra` was.
    """
    return _any_job().load(dirname)


def stop_if_asked(dirname: str, extra: Mapping[str, Any] | None = None) -> None:
    """If this job was asked to end: save, as `save` does, and end this process with status 75, "start me again".

    Schedulers ask with SIGUSR1, some time before a limit: docs/cluster/slurm.md. Call it after a step. With parameter
    servers all workers may call it, and worker 0 acts; the scheduler ends the others. In collective training all ranks
    call it together, and end together.
    """
    job = _any_job(NO_WORKER)
    if job.is_asked_to_stop():
        end_with_save(partial(save, dirname, extra), dirname)


def saved_extra(dirname: str) -> dict[str, Any] | None:
    """What a save's `extra` kept with the model that is there; None if there is no complete model."""
    storage = Storage(dirname)
    if not has_manifest(storage):
        return None
    from torchfleet.collective.checkpoint import collective_manifest

    return dict(
        collective_manifest.read(storage).extra
        if collective_manifest.is_collective(dirname)
        else read_manifest(storage).extra
    )


def shrink(
    table: str | None = None,
    *,
    delete_after_unseen_days: float | None = None,
    delete_threshold: float | None = None,
    ttl_days: float | None = None,
    max_rows: int | None = None,
    max_bytes: int | None = None,
    min_norm: float | None = None,
    where: str | None = None,
    max_share: float | None = None,
) -> dict[str, int]:
    """Drop rows, of one table or of all: those for which any of these holds; without any, each table's own policy acts.

    On worker 0 only; training goes on meanwhile. Returns how many rows of which table were dropped: docs/online.md.
    `max_share`: of a server's rows; a shrink that would drop more drops none and raises TableError. None: the table's
    own, else 0.5.
    """
    policy = Shrink(delete_after_unseen_days, delete_threshold, ttl_days, max_rows, max_bytes, min_norm, where)
    if max_share is not None:
        policy = msgspec.structs.replace(policy, max_share=max_share)
    return _get_job(NO_WORKER).first_worker("shrink").shrink(table, policy)


def set_time(seconds: float) -> dict[str, int]:
    """Set the time of all tables, in seconds since 1970 (UTC), until the next call; else they go by the wall clock.

    On worker 0 only. Returns when the shrinks that this makes due are done: how many rows of which table they dropped.
    """
    return _get_job(NO_WORKER).first_worker("set_time").set_time(seconds)


def save_inference_model(dirname: str) -> None:
    """Save what prediction needs: tables and parameters without optimizer state. On worker 0 only."""
    _get_job(NO_WORKER).first_worker("save_inference_model").save(dirname, "inference")
    _callbacks.save(dirname)


def _run_info(job: Job) -> dict[str, Any]:
    """What callbacks learn of a job at its start."""
    info = job.info
    numbers = {"worker_index": info.worker_index, "num_workers": info.num_workers}
    servers = {} if info.is_collective else {"num_servers": info.num_servers}
    return {"mode": job.mode, **numbers, **servers, "version": __version__, "strategy": job.changed_settings}


def _tell_callbacks(worker: WorkerRole, metrics: dict[str, float]) -> None:
    _callbacks.report(worker.communicator.num_steps, metrics)


def _any_job(missing: str = _NO_JOB) -> Job:
    """This process's job, of either kind; `missing` says what to call before there is one."""
    if _job is None:
        raise FleetError(missing)
    return _job


def _get_job(missing: str = _NO_JOB) -> ParameterServerJob:
    job = _any_job(missing)
    if not isinstance(job, ParameterServerJob):
        raise FleetError("this is for jobs with parameter servers, and this job is collective (is_collective=True)")
    return job


def _get_worker() -> WorkerRole:
    return _get_job(NO_WORKER).worker
