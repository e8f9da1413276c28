"""A rank's side of a collective job: model, optimizer and strategies, as fleet.py's functions use them."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchfleet.collective.build import build
from torchfleet.collective.collective_model import CollectiveModel
from torchfleet.collective.collective_optimizer import CollectiveOptimizer
from torchfleet.collective.data_parallel import WrappedModel, broadcast, data_parallel, share_buffers
from torchfleet.collective.first_values import Filling, is_without_memory, set_aside, share_seed
from torchfleet.collective.job_settings import JobSettings
from torchfleet.collective.meeting.job_meetings import JobMeetings
from torchfleet.collective.strategy import Forward, JobView, Runner, Strategy
from torchfleet.collective.tensors.local_tensors import is_local
from torchfleet.collective.world import begun
from torchfleet.errors import FleetError, ModelError, StrategyError
from torchfleet.monitor.epochs import Epochs, length
from torchfleet.monitor.prometheus.metrics_port import open_metrics_port
from torchfleet.monitor.status import StatusFile
from torchfleet.monitor.stop_request import stop_request
from torchfleet.monitor.training_pace import TrainingPace
from torchfleet.profiling.step_tracing import StepTracing
from torchfleet.role import RoleInfo
from torchfleet.strategy.distributed_strategy import DistributedStrategy
from torchfleet.tracing.otlp import trace_every
from torchfleet.tracing.process_part import ProcessName
from torchfleet.tracing.profile_folder import folder_of

if TYPE_CHECKING:
    from torchfleet.collective.checkpoint.background_saves import BackgroundSaves

_AXES = {"tensor_parallel_degree": "model", "sharding_degree": "sharding"}  # of configs, by the axis that it is of
_PATIENCE = 10.0  # seconds that a job which is given up waits for its save
_AS_OFTEN = ("amp", "sync_batch_norm")  # change layers to what they are already, the second time


class CollectiveJob(JobSettings):
    """Model, optimizer and strategies of a rank. The ranks meet when the strategy is known."""

    _kind = "collective training"
    _beside_rows = False  # the model looks rows up that are not parameters

    def __init__(self, info: RoleInfo, settings: DistributedStrategy | None) -> None:
        super().__init__(info)
        begun.info = info
        self.model: CollectiveModel | None = None
        self.optimizer: CollectiveOptimizer | None = None
        self._meetings = JobMeetings()
        self._saves: BackgroundSaves | None = None
        self.strategies: list[Strategy] = []
        self._reported: dict[str, float] = {}
        self._tracing: StepTracing | None = None
        self._is_over = False
        port = open_metrics_port("rank", info.worker_index)
        self._status = StatusFile(info.status_file, self._status_now, port)
        atexit.register(_write_last, weakref.ref(self), os.getpid())
        self._pace, self.epochs = TrainingPace(), Epochs(lambda: self.optimizer.num_steps if self.optimizer else 0)
        if settings is not None:
            self.use(settings, "fleet.init")
            self._begin()

    def _reason_not_to_change(self) -> str:
        if self.optimizer is not None or (self.model is not None and self.model.num_samples):
            return "training has begun without it"
        return ""

    def _settings_changed(self, user: str) -> None:
        """Paddle's order: the strategy comes with the optimizer, whose parameters must stay those of the model."""
        model, self.model = self.model, None
        if model is None:
            return
        before = {id(parameter) for parameter in model.parameters()}
        model.forget()
        made = self.distribute_model(model.module)
        if {id(parameter) for parameter in made.parameters()} != before:
            raise StrategyError(
                f"{user} got a strategy that changes the model's parameters, which the optimizer has as they were: "
                "give it to fleet.init or fleet.distributed_model, and make the optimizer after that"
            )
        model.become(made)
        self.model = model

    def distribute_model(self, model: torch.nn.Module, sparse: str | int | None = None) -> CollectiveModel:
        if self.model is not None:
            raise ModelError(
                "fleet.distributed_model was called before: a job has one model; fleet.init() begins another"
            )
        if sparse is not None:
            raise ModelError(
                f"fleet.distributed_model(sparse={sparse!r}) moves embeddings to servers, and a collective job has none"
            )
        model = _own_model(model)
        self.strategies = build(self.settings, self.world)
        self._refuse_local_parameters(model)
        model = self._convert(model)
        forward: Forward = self._forward_of(model)
        for strategy in self.strategies:
            forward = strategy.wrap_forward(forward)
        wrapped = WrappedModel(model, forward)
        parallel = self._data_parallel(wrapped)
        runner = self._runner()
        has_local = any(is_local(parameter) for parameter in model.parameters())
        own_backward = any(strategy.has_own_backward for strategy in self.strategies)
        is_sharded = has_local or self._owns_gradients
        view = JobView(model, forward, is_sharded, runner, own_backward, self._begin_backward)
        for strategy in self.strategies:
            strategy.joined(view)
        share = partial(share_buffers, model, self.world)
        self.model = CollectiveModel(wrapped, self.strategies, parallel, runner, share)
        if any(strategy.wants_loss for strategy in self.strategies):
            self.model.on_loss = self._note_loss
        return self.model

    def _begin_backward(self) -> None:
        for strategy in self.strategies:
            strategy.begin_backward()

    def _forward_of(self, model: torch.nn.Module) -> Forward:
        """What the strategies' forwards are wrapped around."""
        return model.__call__

    @property
    def _owns_gradients(self) -> bool:
        return any(strategy.owns_gradients for strategy in self.strategies)

    def _refuse_local_parameters(self, model: torch.nn.Module) -> None:
        """Layers that are sharded over all ranks by themselves count on data parallelism for the rest of the model."""
        name = next((name for name, parameter in model.named_parameters() if is_local(parameter)), None)
        for strategy in self.strategies:
            if name is not None and not strategy.accepts_local_parameters:
                raise ModelError(
                    f"'{name}' is cut over all ranks by its layer (MarginSoftmax), which cannot be used together with "
                    f"{strategy.field}=True. Leave one of them out."
                )

    def _convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Cut where it lies, then moved: no device ever holds more of a model that is cut than its own part."""
        world, is_bare = self.world, is_without_memory(model)
        if self._owns_gradients and world.size > 1:
            broadcast(model, world)  # before it is sharded; DistributedDataParallel does it otherwise
        whole = set_aside(model) if any(strategy.replaces_parameters for strategy in self.strategies) else {}
        for strategy in self.strategies:
            model = strategy.convert(model)
        if not (whole or is_bare):
            return model.to(world.device)
        in_host = any(strategy.keeps_parameters_in_host for strategy in self.strategies)
        home = torch.device("cpu") if in_host else world.device
        Filling(world.device, home, share_seed(world.gather), whole).fill(model)
        return model

    def _data_parallel(self, wrapped: WrappedModel) -> DistributedDataParallel | None:
        is_wanted = self.world.size > 1 or any(strategy.registers_hook for strategy in self.strategies)
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        if self._owns_gradients or not is_wanted or all(is_local(parameter) for parameter in trained):
            return None
        parallel = data_parallel(wrapped, self.settings, self.world, self._beside_rows)
        for strategy in self.strategies:
            strategy.attach(parallel)
        return parallel

    def _runner(self) -> Runner | None:
        runners = [runner for strategy in self.strategies if (runner := strategy.runner()) is not None]
        assert len(runners) <= 1, "two strategies run batches"
        return runners[0] if runners else None

    def distribute_optimizer(self, optimizer: torch.optim.Optimizer) -> CollectiveOptimizer:
        if self.model is None:
            raise ModelError("call fleet.distributed_model(model) before fleet.distributed_optimizer")
        if self.optimizer is not None:
            raise ModelError(
                "fleet.distributed_optimizer was called before: a job has one optimizer; fleet.init() begins another"
            )
        self.names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._check_parameters(parameters)
        inner = optimizer
        for strategy in self.strategies:
            inner = strategy.optimizer(inner, self.names)
        self.optimizer = CollectiveOptimizer(optimizer, inner, self.strategies, parameters, self.world)
        self.optimizer.after_step, self.model.clear = self._step_made, self.optimizer.zero_grad
        self._tracing = self._trace(self.model, self.optimizer)
        self._attend(self.model, self.optimizer)
        if self.info.worker_index == 0:
            print(self.describe(), flush=True)
        return self.optimizer

    def _trace(self, model: CollectiveModel, optimizer: CollectiveOptimizer) -> StepTracing | None:
        """Beside rows it is the worker whose steps these are."""
        if self._beside_rows:
            return None
        info = self.info
        name = ProcessName("rank", info.worker_index, info.num_workers, 0, secrets.randbits(63), self.mode)
        return StepTracing(name, model, [optimizer], folder_of(info.status_file), trace_every())

    def _step_made(self) -> None:
        self._status.step_made()
        if self._tracing is not None:
            self._tracing.step_made()

    def _attend(self, model: CollectiveModel, optimizer: CollectiveOptimizer) -> None:
        """From now on a rank that waits in a step is known to those whose loops are over."""
        model.on_begin, optimizer.on_call = self._meetings.attend(self.world, self.settings.sync_timeout)

    def _check_parameters(self, parameters: list[torch.nn.Parameter]) -> None:
        strange = sum(parameter not in self.names for parameter in parameters)
        if strange:
            raise ModelError(
                f"{strange} of the optimizer's {len(parameters)} parameters do not belong to the distributed model: "
                "make the optimizer from the parameters of what fleet.distributed_model returned"
            )

    def describe(self) -> str:
        """One line per strategy that is on, in the order they act."""
        world = self.world
        axes = ", ".join(f"{axis} {size}" for axis, size in world.degrees.items() if size > 1)
        lines = [f"{self._kind} on {world.size} rank{'s' * (world.size > 1)} ({world.device.type})"]
        if axes:
            lines[0] += f": {axes}"
        for strategy in self.strategies:
            shown = {
                key: world.degrees[_AXES[key]] if key in _AXES else value for key, value in strategy.configs.items()
            }
            keys = ", ".join(f"{key} {value}" for key, value in shown.items())
            lines.append(f"  {strategy.field}" + (f": {keys}" if keys else ""))
        return "\n".join(lines)

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        with self.epochs.begin(partial(length, loader), "batches") as epoch:
            for item in self._meetings.batches(loader, self.world):
                yield item
                epoch.done += 1

    def plan_epochs(self, num: int, start: int) -> None:
        self.epochs.plan(num, start)

    def report(self, metrics: dict[str, float]) -> None:
        self._reported.update(metrics)
        if "loss" in metrics:
            self._note_loss(metrics["loss"])
        self._status.write()

    def _note_loss(self, loss: float | torch.Tensor) -> None:
        for strategy in self.strategies:
            strategy.note_loss(loss)

    @property
    def num_steps(self) -> int:
        return self.optimizer.num_steps if self.optimizer else 0

    @property
    def changed_settings(self) -> dict[str, Any]:
        return self.settings.differences()

    def stop(self) -> dict[str, Any]:
        final = {"worker": {"steps": self.num_steps, "samples": self.model.num_samples if self.model else 0}}
        self._status.write(now=True)
        self._close_status()
        self._end_tracing()
        self._finish_save()
        self._meetings.meet("fleet.stop_worker()")
        self._meetings.leave()
        begun.info = None
        if self._world is not None:
            self._world.close()
        return {"mode": self.mode, **final}

    @property
    def is_under_way(self) -> bool:
        return self.optimizer is not None

    def _end_tracing(self) -> None:
        if self._tracing is not None:
            self._tracing.close()
            self._tracing = None

    def reset(self) -> None:
        self._end_tracing()
        with contextlib.suppress(Exception):
            self._finish_save(_PATIENCE)
        self._meetings.leave(alone=True)
        begun.info = None
        self._close_status()
        if self._settings is not None:
            self._settings.unlock()
        if self._world is not None:
            self._world.close(alone=True)

    def write_last(self) -> None:
        """The last steps count, too: most scripts of ranks end without fleet.stop_worker()."""
        if not self._is_over:
            self._status.write(now=True)

    def _close_status(self) -> None:
        self._is_over = True
        self._status.close()

    def _status_now(self) -> dict[str, Any]:
        steps = self.optimizer.num_steps if self.optimizer else 0
        samples = self.model.num_samples if self.model else 0
        progress = self.epochs.status()
        return {
            "role": "worker",
            "mode": self.mode,
            **self._pace.status(steps, samples),
            **({"progress": progress} if progress else {}),
            "metrics": dict(self._reported),
        }

    def save(self, dirname: str, extra: Mapping[str, Any] | None, asynchronous: bool = False) -> int:
        from torchfleet.collective.checkpoint.background_saves import BackgroundSaves
        from torchfleet.collective.checkpoint.save_writing import write_save
        from torchfleet.collective.checkpoint.saving import plan_save

        model, optimizer = self._trained()
        self._finish_save()
        self._meetings.meet("fleet.save")
        for strategy in self.strategies:
            strategy.before_save()
        inner, strategies, world = optimizer.inner, self.strategies, self.world
        planned, tensors = plan_save(dirname, model.module, inner, strategies, world, extra, self.names)
        if asynchronous:
            self._saves = self._saves or BackgroundSaves(world)
            self._saves.begin(planned, tensors)
        else:
            write_save(planned, tensors, world)
        return planned.number

    def is_asked_to_stop(self) -> bool:
        """Whether any rank is: all of them end after the same step."""
        return any(self.gather("fleet.stop_if_asked", b"1" if stop_request.has_come() else b""))

    def _finish_save(self, timeout: float | None = None) -> None:
        """Wait for a save that is written beside training; its error, if any, is raised here."""
        if self._saves is not None:
            self._saves.finish(timeout)

    def load(self, dirname: str) -> dict[str, Any]:
        from torchfleet.collective.checkpoint.loading import load

        model, optimizer = self._trained()
        self._finish_save()
        self._meetings.meet("fleet.load")
        extra = load(dirname, model.module, optimizer.inner, self.strategies, self.world, self.names)
        for strategy in self.strategies:
            strategy.after_load()
        return extra

    def _trained(self) -> tuple[CollectiveModel, CollectiveOptimizer]:
        if self.model is None or self.optimizer is None:
            raise FleetError("call fleet.distributed_model and fleet.distributed_optimizer before this")
        return self.model, self.optimizer

    # What fleet.py calls on every kind of job (torchfleet/job/protocol.py), beside the methods above

    @property
    def mode(self) -> str:
        return "collective"

    @property
    def num_workers(self) -> int:
        return self.info.num_workers

    @property
    def data_shard(self) -> tuple[int, int]:
        return self.world.data_shard

    def distribute_scheduler(self, scheduler: Any) -> Any:
        """As it is: every step is a global one."""
        return scheduler

    def barrier(self) -> None:
        self._meetings.meet("fleet.barrier_worker()")
        self.world.barrier()

    def gather(self, name: str, data: bytes, comm_world: str = "worker") -> list[bytes]:
        """What every rank brought, in their order. All ranks call it in the same order, so `name` is not needed."""
        if comm_world == "server":
            raise FleetError("comm_world='server': this job is collective and has no servers; use 'worker' or 'all'")
        self._meetings.meet(f"fleet.util or fleet.metrics ({name})")
        return self.world.gather(data)


def _own_model(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own model, also of one that a job before this one returned: a notebook's cell is run again."""
    if not isinstance(model, CollectiveModel):
        return model
    changed = [
        s.field for s in model.strategies if type(s).convert is not Strategy.convert and s.field not in _AS_OFTEN
    ]
    if changed:
        raise ModelError(
            f"the model is what fleet.distributed_model returned before, and {changed[0]} has changed its layers: make "
            "the model anew"
        )
    return model.module


def _write_last(job: weakref.ref[CollectiveJob], pid: int) -> None:
    """When the process ends; not one that was forked from it, which has nothing to report."""
    if os.getpid() == pid and (found := job()) is not None:
        found.write_last()
