"""Converts the model, optimizer and scheduler of a script to those of its job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from torchfleet.api.current_job import any_job, current, run_info
from torchfleet.api.job.arguments import Strategy, check_model, check_optimizer, check_scheduler, check_strategy
from torchfleet.base.adoption import AdoptedOptimizer

if TYPE_CHECKING:  # collective jobs load nothing of servers and their data
    from torchfleet.data.features import Feature


def distributed_model(
    model: torch.nn.Module,
    strategy: Strategy | None = None,
    sparse: str | int | None = None,
    dry_batch: Any = None,
    features: Sequence[Feature] | None = None,
) -> torch.nn.Module:
    """Put the sparse embeddings of the model on the servers; in collective training, wrap it for all ranks.

    Sparse embeddings are those of fleet.nn, and torch's with sparse=True. `sparse` adds others of torch's: an int
    selects those with at least that many rows, "auto" those whose trained weights have 1 MiB or more. Worker 0 prints
    which they are. The servers update a row only in steps that look it up: docs/modes/README.md. `strategy`: as in
    init. `dry_batch`: the inputs of a batch, as for train_batch, for a pipeline that measures where to cut the model.
    `features` describes inputs of the model, by name: how raw values become ids (docs/data.md). They belong to the
    model: all of its saves have them, and a job that loads a save has those of the save.
    """
    job = any_job()
    check_model(model)
    if features is not None:
        job.features.give(features)
    job.use(check_strategy(strategy, "fleet.distributed_model"), "fleet.distributed_model")
    return job.distribute_model(model, sparse, dry_batch)


@overload
def distributed_optimizer(optimizer: torch.optim.Optimizer, strategy: Strategy | None = None) -> AdoptedOptimizer: ...


@overload
def distributed_optimizer(
    optimizer: Sequence[torch.optim.Optimizer], strategy: Strategy | None = None
) -> list[AdoptedOptimizer]: ...


def distributed_optimizer(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], strategy: Strategy | None = None
) -> AdoptedOptimizer | list[AdoptedOptimizer]:
    """Return the optimizer with its updates on the servers (SGD, Adagrad, Adam, AdamW, SparseAdam, RMSprop
    and those of fleet.optim), or with the collective strategies around its step.

    With servers there may be several optimizers, passed as a list or in several calls, each with its own parameters:
    for example SparseAdam for the embeddings and Adam for the rest. Each makes its own steps. Geo and hybrid mode allow
    only one. `strategy`: as in init.
    """
    if isinstance(optimizer, (list, tuple)) and optimizer:
        return [distributed_optimizer(one, strategy) for one in optimizer]
    job = any_job()
    check_optimizer(optimizer)
    job.use(check_strategy(strategy, "fleet.distributed_optimizer"), "fleet.distributed_optimizer")
    assert isinstance(optimizer, torch.optim.Optimizer)
    made = job.distribute_optimizer(optimizer)
    if job.info.is_collective:
        current.callbacks.start(run_info(job))
    return made


def distributed_scheduler(scheduler: Any) -> Any:
    """Return the same scheduler, which then counts global steps: in geo mode, each of its steps counts once per worker.

    A scheduler of torch needs this call only if it does not advance with every step of the optimizer and is still meant
    to count the steps of all workers.
    """
    job = any_job()
    check_scheduler(scheduler)
    return job.distribute_scheduler(scheduler)
