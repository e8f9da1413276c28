"""Model, optimizer and scheduler of a script, made those of its job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from torchfleet.api.current_job import any_job, current, run_info
from torchfleet.api.job.arguments import check_model, check_optimizer, check_scheduler, check_strategy
from torchfleet.base.adoption import AdoptedOptimizer
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy


def distributed_model(
    model: torch.nn.Module, strategy: DistributedStrategy | None = None, sparse: str | int | None = None
) -> torch.nn.Module:
    """The same model, with its sparse embeddings on the servers; in collective training, one that all ranks run.

    Sparse are those of fleet.nn, and torch's with sparse=True. With `sparse`, also others of torch's: those with at
    least so many rows, or with "auto" those whose trained weights have 1 MiB or more. Worker 0 prints which they are.
    On the servers a row is updated in the steps that look it up: docs/modes/README.md. `strategy`: as in init.
    """
    job = any_job()
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
    `strategy`: as in init.
    """
    if isinstance(optimizer, (list, tuple)) and optimizer:
        return [distributed_optimizer(one, strategy) for one in optimizer]
    job = any_job()
    check_optimizer(optimizer)
    check_strategy(strategy, "fleet.distributed_optimizer")
    job.use(strategy, "fleet.distributed_optimizer")
    assert isinstance(optimizer, torch.optim.Optimizer)
    made = job.distribute_optimizer(optimizer)
    if job.info.is_collective:
        current.callbacks.start(run_info(job))
    return made


def distributed_scheduler(scheduler: Any) -> Any:
    """The same scheduler, counting global steps: in geo training each of its steps stands for one of every worker.

    For schedules that advance once per batch. One that advances per epoch needs no change.
    """
    job = any_job()
    check_scheduler(scheduler)
    return job.distribute_scheduler(scheduler)
