"""Hooks on the model and its optimizers while a worker trains. They are removed when it leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from torchfleet.base.adoption import AdoptedOptimizer
from torchfleet.base.job_hook import JobHook
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.step_tracing import StepTracing
from torchfleet.base.tracing.otlp import trace_every
from torchfleet.base.tracing.process_part import ProcessName
from torchfleet.base.tracing.profile_folder import folder_of
from torchfleet.ps.worker.client.connection import incarnation
from torchfleet.ps.worker.global_schedules import GlobalSchedules
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.lookup.sources import NoRows
from torchfleet.ps.worker.modes.communicator import Communicator

LEFT = (
    "fleet.stop_worker() was called: this worker has left its servers, and the rows of the model are with them. Train "
    "and predict before it, and take its state_dict(); or save the model before it, and predict with "
    "fleet.load_inference_model."
)


def hook_model(
    model: torch.nn.Module,
    plan: Plan,
    engine: Engine,
    communicator: Callable[[], Communicator],
    ends: contextlib.ExitStack,
) -> None:
    """Connect embeddings to `engine`, and refresh the network whenever the model is called. `ends` undoes both.

    `communicator` returns the current one, since a worker may change it.
    """
    for group in plan.sparse.values():
        for module in group.modules:
            module.bind(engine)

    def freshen(called: torch.nn.Module) -> None:
        if called is model:  # a copy of the model has the hook, too, but its own parameters
            communicator().enter(model.training, torch.is_grad_enabled())

    eager = torch.compiler.disable(freshen)  # type: ignore[no-untyped-call]
    hook = model.register_forward_pre_hook(JobHook(lambda called, _: eager(called)))
    for handle in (*engine.follow(model), hook):
        ends.callback(handle.remove)
    ends.callback(engine.use, NoRows(LEFT))
    ends.callback(engine.end_recording)


def trace_steps(
    info: RoleInfo, mode: str, model: torch.nn.Module, optimizers: Sequence[AdoptedOptimizer]
) -> StepTracing:
    name = ProcessName("worker", info.worker_index, info.num_workers, info.num_servers, incarnation(), mode)
    return StepTracing(name, model, optimizers, folder_of(info.status_file), trace_every())


def global_schedules(info: RoleInfo, mode: str, optimizer: AdoptedOptimizer) -> GlobalSchedules | None:
    """Only in geo mode do a worker's steps differ from the job's."""
    return GlobalSchedules(optimizer, info.num_workers) if mode == "geo" and info.num_workers > 1 else None
