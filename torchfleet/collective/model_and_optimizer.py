"""Model and optimizer of a rank under the strategies of its job."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.collective.build import build
from torchfleet.collective.collective_model import CollectiveModel
from torchfleet.collective.collective_optimizer import CollectiveOptimizer
from torchfleet.collective.data_parallel import WrappedModel, broadcast, data_parallel, share_buffers
from torchfleet.collective.device_rows import DeviceRows, on_devices
from torchfleet.collective.first_values import Filling, is_without_memory, set_aside, share_seed
from torchfleet.collective.job_settings import JobSettings
from torchfleet.collective.strategy import Forward, JobView, Runner, Strategy
from torchfleet.collective.tensors.local_tensors import is_local

_AXES = {
    "tensor_parallel_degree": "model",
    "sharding_degree": "sharding",
    "context_parallel_degree": "context",
}  # key of configs → its axis


class ModelAndOptimizer(JobSettings):
    """Makes the model once, then the optimizer once. Calls all strategies in order, and names none of them."""

    _kind = "collective training"
    _beside_rows = False  # the model looks up rows that are not parameters

    def __init__(self, info: RoleInfo) -> None:
        super().__init__(info)
        self.model: CollectiveModel | None = None
        self.optimizer: CollectiveOptimizer | None = None
        self.strategies: list[Strategy] = []
        self.device_rows: DeviceRows | None = None  # tables on this rank's device

    def _reason_not_to_change(self) -> str:
        if self.optimizer is not None or (self.model is not None and self.model.num_samples):
            return "training has begun without it"
        return ""

    def _settings_changed(self, user: str) -> None:
        """Rebuild the model: as in Paddle, a strategy may come with the optimizer. Its parameters must be kept."""
        model, self.model = self.model, None
        if model is None:
            return
        before = {id(parameter) for parameter in model.parameters()}
        self.close_strategies()
        model.forget()
        made = self.distribute_model(model.module)
        if {id(parameter) for parameter in made.parameters()} != before:
            raise StrategyError(
                f"{user} got a strategy that changes the model's parameters, which the optimizer has as they were: "
                "give it to fleet.init or fleet.distributed_model, and make the optimizer after that"
            )
        model.become(made)
        self.model = model

    def distribute_model(
        self, model: torch.nn.Module, sparse: str | int | None = None, dry_batch: Any = None
    ) -> CollectiveModel:
        if self.model is not None:
            raise ModelError(
                "fleet.distributed_model was called before: a job has one model; fleet.init() begins another"
            )
        model = _own_model(model)
        self.strategies = build(self.settings, self.world)
        self._refuse_local_parameters(model)
        for strategy in self.strategies:
            strategy.look_at(model)
        self._offer(dry_batch)
        self.device_rows = None if self._beside_rows else on_devices(model, sparse, self.world)
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

    def close_strategies(self) -> None:
        """End what runs beside training: the job is over, or gets other strategies."""
        for strategy in self.strategies:
            strategy.close()

    def _begin_backward(self) -> None:
        for strategy in self.strategies:
            strategy.begin_backward()

    def _forward_of(self, model: torch.nn.Module) -> Forward:
        """The forward that the strategies wrap."""
        return model.__call__

    @property
    def _owns_gradients(self) -> bool:
        return any(strategy.owns_gradients for strategy in self.strategies)

    def _offer(self, dry_batch: Any) -> None:
        """Give the batch to the strategies that make a dry step. A batch that is missing or not needed is an error."""
        takers = [strategy for strategy in self.strategies if strategy.wants_batch]
        if takers and dry_batch is None:
            raise ModelError(
                f"{takers[0].field}=True runs the model in a dry step, which needs a batch: call "
                "fleet.distributed_model(model, dry_batch=inputs), with the model's arguments as for train_batch"
            )
        if not takers and dry_batch is not None:
            raise ModelError(
                "fleet.distributed_model(dry_batch=...): no strategy makes a dry step. Leave it out, or set "
                "pipeline=True and pipeline_configs={'cut': 'measured'}."
            )
        for strategy in takers:
            strategy.dry_batch = dry_batch

    def _refuse_local_parameters(self, model: torch.nn.Module) -> None:
        """Refuse layers that shard themselves over all ranks under strategies that do not support them."""
        name = next((name for name, parameter in model.named_parameters() if is_local(parameter)), None)
        for strategy in self.strategies:
            if name is not None and not strategy.accepts_local_parameters:
                raise ModelError(
                    f"'{name}' is cut over all ranks by its layer (MarginSoftmax), which cannot be used together with "
                    f"{strategy.field}=True. Leave one of them out."
                )

    def _convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model where it is, then move it: no device ever holds more than its own part of a sharded model."""
        world, is_bare = self.world, is_without_memory(model)
        if self._owns_gradients and world.size > 1:
            broadcast(model, world)  # before sharding; otherwise DistributedDataParallel does it
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
        _refuse_repeated_closures(optimizer)
        self.names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._check_parameters(parameters)
        if self.device_rows is not None:
            self.device_rows.make_tables(optimizer)
        inner = optimizer
        for strategy in self.strategies:
            inner = strategy.optimizer(inner, self.names)
        self.optimizer = CollectiveOptimizer(
            optimizer, inner, self.strategies, parameters, self.world, self.device_rows
        )
        self.model.clear = self.optimizer.zero_grad
        self._optimizer_made(self.model, self.optimizer)
        if self.info.worker_index == 0:
            print(self.describe(), flush=True)
        return self.optimizer

    def _optimizer_made(self, model: CollectiveModel, optimizer: CollectiveOptimizer) -> None:
        """Called with the model and the optimizer that the script gets, before anything is printed."""

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
        sizes = {**world.degrees, "context": world.context_degree}
        axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        lines = [f"{self._kind} on {world.size} rank{'s' * (world.size > 1)} ({world.device.type})"]
        if axes:
            lines[0] += f": {axes}"
        for strategy in self.strategies:
            shown = {key: sizes[_AXES[key]] if key in _AXES else value for key, value in strategy.configs.items()}
            keys = ", ".join(f"{key} {_short(value)}" for key, value in shown.items() if value != {})
            lines.append(f"  {strategy.field}" + (f": {keys}" if keys else ""))
        if self.device_rows is not None:
            lines.append(self.device_rows.describe())
        return "\n".join(lines)

    def _note_loss(self, loss: float | torch.Tensor) -> None:
        for strategy in self.strategies:
            strategy.note_loss(loss)


def _refuse_repeated_closures(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that call their closure themselves, several times in a step, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ModelError(
            f"{type(optimizer).__name__} calls its closure several times within a step, and the strategies act once in "
            "a step, on gradients that are complete: use an optimizer whose step() needs no closure. To train by "
            f"{type(optimizer).__name__}, do it in one process, without fleet.distributed_optimizer."
        )


def _short(value: Any) -> Any:
    return f"of {len(value)} patterns" if isinstance(value, dict) else value


def _own_model(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own model, unwrapped if a previous job has wrapped it, as when a notebook's cell is run again."""
    if not isinstance(model, CollectiveModel):
        return model
    changed = [s.field for s in model.strategies if type(s).convert is not Strategy.convert and not s.can_convert_again]
    if changed:
        raise ModelError(
            f"the model is what fleet.distributed_model returned before, and {changed[0]} has changed its layers: make "
            "the model anew"
        )
    return model.module
