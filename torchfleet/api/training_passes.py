"""Batches, epochs and datasets of a training script, and the numbers that it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchfleet.api.current_job import any_job, current, get_worker
from torchfleet.api.job.arguments import check_loader, metric
from torchfleet.api.job.not_begun import NO_WORKER
from torchfleet.api.process_role import data_shard
from torchfleet.base.errors import FleetError
from torchfleet.base.fetch import FetchHandler
from torchfleet.base.paddle_names import DATASET_PASS, with_paddle_arguments

if TYPE_CHECKING:  # collective jobs, which report too, load nothing of servers and their data
    from torchfleet.api.job.worker_role import WorkerRole
    from torchfleet.api.training import Result
    from torchfleet.data.dataset import Dataset
    from torchfleet.data.slots import Batch
    from torchfleet.ps.worker.distributed_optimizer import DistributedOptimizer

Item = TypeVar("Item")


def split_files(files: Sequence[str]) -> list[str]:
    """This worker's files: each file goes to exactly one worker, and counts differ by at most one."""
    from torchfleet.data.dataset import file_shard

    return file_shard(files, *data_shard())


def prefetch(loader: Iterable[Item]) -> Iterator[Item]:
    """Iterate over the loader's batches. If the mode allows it, pull rows of the next batch while this one computes.

    In collective training it ends on all ranks together, as soon as one rank has no batch left, so that no rank hangs.
    A loader that fleet.prepare returned prefetches already: it is iterated as it is.
    """
    job = any_job(NO_WORKER)
    check_loader(loader)
    return iter(loader) if getattr(loader, "is_prefetched", False) else job.prefetch(loader)


def epochs(num: int, start: int = 0) -> Iterator[int]:
    """Yield `start` to num - 1, for the loop over epochs. The job's displays can then predict when all epochs will end.

    An epoch is a pass over `prefetch(loader)`, or a call of train_from_dataset. `start`: the epoch at which a job
    continues.
    """
    if type(num) is not int or type(start) is not int or not 0 <= start <= num:
        raise FleetError(f"fleet.epochs: expected a number of epochs and a start of at most that, found {num}, {start}")
    any_job(NO_WORKER).plan_epochs(num, start)
    return iter(range(start, num))


@with_paddle_arguments(DATASET_PASS)
def train_from_dataset(
    model: Callable[[Batch], Any],
    dataset: Dataset,
    optimizer: DistributedOptimizer | Sequence[DistributedOptimizer],
    loss_fn: Callable[[Any, Batch], torch.Tensor] | None = None,
    thread: int = 1,
    fetch_list: Sequence[str] | None = None,
    print_period: int = 100,
    fetch_handler: FetchHandler | None = None,
    fetch_info: Sequence[str] | None = None,
) -> Result:
    """One pass over a dataset with reading, pulling, computing and pushing overlapped: docs/data.md.

    `model` is a function step(batch) that returns the loss, or a dict with "loss" and other numbers to watch; or the
    model itself, with a `loss_fn(output, batch)`. `optimizer`: as returned by distributed_optimizer. `thread`: the
    number of threads, each of which trains on its own batches; sync mode allows one.

    Every `print_period` steps (0: never) a line shows step, samples per second and the entries of the dict that
    `fetch_list` names (default: all that are single numbers), under the labels of `fetch_info` if it is given, one for
    each name. `fetch_handler` is called periodically from its own thread, with the latest values:
    FetchHandler. Returns a Result with steps, samples, seconds, samples_per_s and `last`, the last step's values.
    """
    from torchfleet.api.training import Report, as_step, check_pass, train
    from torchfleet.data.features import text_of
    from torchfleet.ps.worker.distributed_optimizer import DistributedOptimizer

    worker = get_worker()
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not optimizers or not all(isinstance(one, DistributedOptimizer) for one in optimizers):
        raise FleetError("train_from_dataset: give the optimizer that fleet.distributed_optimizer returned")
    check_pass(dataset, thread, len(optimizers))
    report, step = Report("train", fetch_list, print_period, fetch_handler, fetch_info), as_step(model, loss_fn)
    report.on_print = partial(_tell_callbacks, worker)
    worker.describer.text = text_of(dataset.read_options)
    if thread > 1:
        worker.allow_threads()
    with worker.status.follow_samples(dataset) as report.epoch:
        result = train(step, dataset, optimizers, worker.engine, thread, report)
    current.callbacks.end_epoch({**result.last, "samples_per_s": result.samples_per_s})
    return result


def _tell_callbacks(worker: WorkerRole, metrics: dict[str, float]) -> None:
    current.callbacks.report(worker.communicator.num_steps, metrics)


@with_paddle_arguments(DATASET_PASS)
def infer_from_dataset(
    model: Callable[[Batch], Any],
    dataset: Dataset,
    loss_fn: Callable[[Any, Batch], torch.Tensor] | None = None,
    thread: int = 1,
    fetch_list: Sequence[str] | None = None,
    print_period: int = 100,
    fetch_handler: FetchHandler | None = None,
    fetch_info: Sequence[str] | None = None,
) -> Result:
    """One pass over `dataset` without gradients, with the model in eval mode. Ids without a row read as zeros; no rows
    are created.

    `model`, `loss_fn`, `thread`, `fetch_list`, `print_period`, `fetch_handler` and `fetch_info` are as in
    train_from_dataset. The Result also has `mean`: the mean of every number over all samples.
    """
    from torchfleet.api.training import Report, as_step, check_pass, infer

    worker = get_worker()
    check_pass(dataset, thread)
    report = Report("infer", fetch_list, print_period, fetch_handler, fetch_info)
    worker.communicator.flush()
    leave = worker.communicator.leave_thread
    return infer(as_step(model, loss_fn), dataset, worker.model, worker.engine, thread, report, leave)


def report(**metrics: float) -> None:
    """Report numbers, report(loss=0.3, auc=0.8), to the launcher's display, callbacks and other monitors of the job.

    `metrics` are numbers by names of your choice. The latest value of each name is shown.
    """
    job, found = any_job(NO_WORKER), {name: metric(name, value) for name, value in metrics.items()}
    job.report(found)
    current.callbacks.report(job.num_steps, found)
