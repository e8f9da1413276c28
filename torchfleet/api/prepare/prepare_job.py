"""fleet.prepare: one call that prepares the model, optimizer and loaders of an ordinary script for a job."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from torchfleet.api import distributing, job_life, process_role, saves
from torchfleet.api.current_job import current
from torchfleet.api.prepare.first_batch import num_lookups
from torchfleet.api.prepare.loader_shard import BatchesOfEvery, shared_loader
from torchfleet.api.prepare.prepared_loader import PreparedLoader, prepared_loader
from torchfleet.base.errors import FleetError, ModelError
from torchfleet.base.role.role_makers import is_collective_job
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.worker.embedding.embedding_choice import Auto

if TYPE_CHECKING:  # collective jobs load nothing of servers and their data
    from torchfleet.data.features import Feature


def prepare(
    *objects: Any,
    strategy: DistributedStrategy | None = None,
    sparse: str | int | None = None,
    is_collective: bool | None = None,
    dirname: str | None = None,
    features: Sequence[Feature] | None = None,
) -> tuple[Any, ...]:
    """Prepare `objects` for this process's job and return them in the same order: a model, the optimizers of its
    parameters, DataLoaders, schedulers.

    Calls fleet.init unless it was called, distributed_model, distributed_optimizer and init_worker. Every worker gets
    its share of each loader's samples. A server, or heter worker, serves here until all workers have stopped, and then
    ends the script (SystemExit). When a script ends without an error, its worker is stopped; a script that continues
    must call fleet.stop_worker.

    `strategy`: a DistributedStrategy, by default one for sync mode. `is_collective`: None to follow the environment.
    `sparse`: as in distributed_model; with a loader, "auto" selects the tables of which a batch leaves most rows
    untouched. `dirname`: a saved model to continue from. `features`: as in distributed_model. See docs/prepare.md.
    """
    model, optimizers = _one_model(objects), [thing for thing in objects if isinstance(thing, torch.optim.Optimizer)]
    if not optimizers:
        raise ModelError(f"fleet.prepare: expected an optimizer, found none among {len(objects)} arguments")
    for number, thing in enumerate(objects):
        if not isinstance(thing, _KINDS):
            raise FleetError(
                f"fleet.prepare: argument {number + 1}: expected a model, an optimizer, a DataLoader or a scheduler of "
                f"torch, found {thing!r:.200}"
            )
        if isinstance(thing, PreparedLoader):
            raise FleetError(
                f"fleet.prepare: argument {number + 1} was prepared for a job before: give it the DataLoader itself"
            )
    _begin(is_collective)
    before = dict(model.named_parameters(remove_duplicate=False))
    made = distributing.distributed_model(model, strategy, _by_batch(sparse, objects), features=features)
    prepared: dict[int, Any] = {id(model): made}
    for optimizer in optimizers:
        follow(optimizer, before, dict(made.named_parameters(remove_duplicate=False)))
        prepared[id(optimizer)] = distributing.distributed_optimizer(optimizer)
    start(dirname)
    device = next((parameter.device for parameter in made.parameters()), torch.device("cpu"))
    current.prepared = {}
    for number, thing in enumerate(objects):
        if isinstance(thing, DataLoader):
            share = _shared(thing, f"the loader of argument {number + 1}")
            prepared[id(thing)] = prepared_loader(thing, share, device)
        elif isinstance(thing, LRScheduler):
            prepared[id(thing)] = thing
        if isinstance(thing, (DataLoader, LRScheduler)):
            current.prepared[f"prepare, argument {number + 1}"] = prepared[id(thing)]
    return tuple(prepared[id(thing)] for thing in objects)


_KINDS = (torch.nn.Module, torch.optim.Optimizer, DataLoader, LRScheduler)


def stop_at_exit() -> None:
    """At the end of a script: stop the worker, unless an error ended the script. If stopping fails, the script fails.

    After an error the worker is not reported as stopped: the others learn that it has ended.
    """
    if not process_role.is_under_way() or hasattr(sys, "last_value"):
        return
    try:
        job_life.stop_worker()
    except BaseException:  # at the end of a process, an error affects the exit status only this way
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _one_model(objects: Sequence[Any]) -> torch.nn.Module:
    found = [thing for thing in objects if isinstance(thing, torch.nn.Module)]
    if len(found) != 1:
        raise ModelError(f"fleet.prepare: expected one model, found {len(found)} among {len(objects)} arguments")
    return found[0]


def _begin(is_collective: bool | None) -> None:
    if process_role.is_under_way():
        raise FleetError("fleet.prepare: a job is under way already: call fleet.stop_worker() or fleet.reset() first")
    if not process_role.is_set_up():
        job_life.init(is_collective=is_collective_job() if is_collective is None else is_collective)
    elif is_collective is not None and is_collective != process_role.is_collective():
        raise FleetError(
            f"fleet.prepare(is_collective={is_collective}), and fleet.init has begun the other kind: leave it out"
        )


def start(dirname: str | None) -> None:
    """Begin with a saved model or a new one, once model and optimizer are distributed. A worker is stopped when the
    script ends. A server serves here, and then ends the script (SystemExit).
    """
    if process_role.is_collective():
        if dirname is not None:
            saves.load(dirname)
    elif process_role.is_server():
        job_life.init_server(dirname)
        job_life.run_server()
        raise SystemExit(0)
    else:
        job_life.init_worker(dirname)
    atexit.unregister(stop_at_exit)
    atexit.register(stop_at_exit)


def follow(
    optimizer: torch.optim.Optimizer, before: dict[str, torch.nn.Parameter], after: dict[str, torch.nn.Parameter]
) -> None:
    """Replace the optimizer's parameters by the model's current parameters of the same names."""
    moved: dict[int, list[torch.nn.Parameter]] = {}
    for name, parameter in before.items():
        now = moved.setdefault(id(parameter), [])
        if name in after and not any(after[name] is known for known in now):
            now.append(after[name])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            is_here = any(now is parameter for now in moved.get(id(parameter), [parameter]))
            state = optimizer.state.get(parameter, {}) if is_here else optimizer.state.pop(parameter, {})
            is_kept = is_here and process_role.is_collective()  # servers have their own state
            if state and not is_kept and float(state.get("step", 1)) > 0:  # Adagrad creates its state before any step
                raise ModelError("fleet.prepare: the optimizer has made steps already: prepare it before the first one")
        group["params"] = [now for parameter in group["params"] for now in moved.get(id(parameter), [parameter])]


def _by_batch(sparse: str | int | None, objects: Sequence[Any]) -> str | int | None:
    """`sparse`; with servers, "auto" also has the number of lookups in a batch of the first loader, if it is known."""
    loader = next((thing for thing in objects if isinstance(thing, DataLoader)), None)
    if sparse != "auto" or loader is None or process_role.is_collective():
        return sparse
    found = num_lookups(loader)
    return sparse if found is None else Auto(found)


def _shared(loader: DataLoader[Any], name: str) -> DataLoader[Any] | BatchesOfEvery:
    """This worker's share. Workers that make their steps together also meet at the beginning of each pass."""
    each_pass = process_role.mode() in ("sync", "collective")
    return shared_loader(loader, *process_role.data_shard(), _of_worker_0, each_pass, name)


def _of_worker_0(name: str, data: bytes) -> bytes:
    return process_role.gather(f"fleet.prepare: {name}", data)[0]
