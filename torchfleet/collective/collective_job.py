"""One rank's part in a collective job: what fleet.py's functions act on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from torchfleet.collective.build import build, check
from torchfleet.collective.collective_model import CollectiveModel
from torchfleet.collective.collective_optimizer import CollectiveOptimizer
from torchfleet.collective.data_parallel import Chained, broadcast, data_parallel, together
from torchfleet.collective.strategy import Part
from torchfleet.collective.world import World, begun
from torchfleet.errors import FleetError, ModelError, StrategyError
from torchfleet.monitor.status import StatusFile
from torchfleet.role import RoleInfo
from torchfleet.strategy.distributed_strategy import DistributedStrategy


class CollectiveJob:
    """Model, optimizer and strategies of a rank. The ranks meet when the strategy is known."""

    def __init__(self, info: RoleInfo, strategy: DistributedStrategy | None) -> None:
        self.info = begun.info = info
        self.model: CollectiveModel | None = None
        self.optimizer: CollectiveOptimizer | None = None
        self._strategy: DistributedStrategy | None = None
        self._world: World | None = None
        self.parts: list[Part] = []
        self._reported: dict[str, float] = {}
        self._status = StatusFile(info.status_file, self._status_now)
        self._started = time.monotonic()
        if strategy is not None:
            self.use(strategy, "fleet.init")
            self._begin()

    def use(self, strategy: DistributedStrategy | None, user: str) -> None:
        """The strategy may be given to init, distributed_model or distributed_optimizer; late, or another: an error."""
        if strategy is None or strategy == self._strategy:
            return
        if self._strategy is not None:
            raise StrategyError(
                f"{user} got another strategy than was given before: give one, to fleet.init, and leave it out here"
            )
        if self.model is not None:
            raise StrategyError(
                f"{user} got a strategy, but the model is distributed already, without one: give it to fleet.init or "
                "fleet.distributed_model"
            )
        check(strategy)
        strategy.lock(user)
        self._strategy = strategy

    def _begin(self) -> None:
        if self._world is None:
            strategy = self.strategy
            torch.backends.cudnn.benchmark = strategy.cudnn_exhaustive_search
            if strategy.execution_strategy.num_threads:
                torch.set_num_threads(strategy.execution_strategy.num_threads)
            self._world = World(self.info, strategy)

    @property
    def strategy(self) -> DistributedStrategy:
        if self._strategy is None:
            self.use(DistributedStrategy(), "fleet.distributed_model")
        assert self._strategy is not None
        return self._strategy

    @property
    def world(self) -> World:
        self._begin()
        assert self._world is not None
        return self._world

    def distribute_model(self, model: torch.nn.Module) -> CollectiveModel:
        if self.model is not None:
            raise ModelError("fleet.distributed_model was called before: a job has one model")
        world = self.world
        self.parts = build(self.strategy, world)
        self._check_own(model)
        model = model.to(world.device)
        is_cut = any(part.owns_gradients for part in self.parts)
        if is_cut and world.size > 1:
            broadcast(model)
        for part in self.parts:
            model = part.convert(model)
        forward: Any = model.__call__
        for part in self.parts:
            forward = part.around(forward)
        chained = Chained(model, forward)
        parallel = None
        has_common = any(one.requires_grad and not getattr(one, "fleet_local", False) for one in model.parameters())
        is_wanted = world.size > 1 or any(type(part).attach is not Part.attach for part in self.parts)
        if not is_cut and has_common and is_wanted:
            parallel = data_parallel(chained, self.strategy, world)
            for part in self.parts:
                part.attach(parallel)
        for part in self.parts:
            part.build(model, forward)
        pipeline: Any = next((part for part in self.parts if part.field == "pipeline"), None)
        self._tell_amp(model, is_cut, pipeline)
        self.model = CollectiveModel(chained, self.parts, parallel, pipeline)
        if any(type(part).note_loss is not Part.note_loss for part in self.parts):
            self.model.on_loss = self._note_loss
        return self.model

    def _check_own(self, model: torch.nn.Module) -> None:
        """Layers that are cut over all ranks by themselves count on data parallelism for the rest of the model."""
        own = next((name for name, one in model.named_parameters() if getattr(one, "fleet_local", False)), None)
        for field in ("pipeline", "tensor_parallel", "localsgd", "adaptive_localsgd"):
            if own is not None and getattr(self.strategy, field):
                raise ModelError(
                    f"'{own}' is cut over all ranks by its layer (MarginSoftmax), which cannot be used together with "
                    f"{field}=True. Leave one of them out."
                )

    def _tell_amp(self, model: torch.nn.Module, is_cut: bool, pipeline: Any) -> None:
        amp: Any = next((part for part in self.parts if part.field == "amp"), None)
        if amp is None:
            return
        amp.is_cut = is_cut or any(getattr(one, "fleet_local", False) for one in model.parameters())
        if pipeline is not None:
            amp.is_last, amp.ends_backward = pipeline.is_last, False

    def distribute_optimizer(self, optimizer: torch.optim.Optimizer) -> CollectiveOptimizer:
        if self.model is None:
            raise ModelError("call fleet.distributed_model(model) before fleet.distributed_optimizer")
        if self.optimizer is not None:
            raise ModelError("fleet.distributed_optimizer was called before: a job has one optimizer")
        self.names: dict[torch.Tensor, str] = {one: name for name, one in self.model.named_parameters()}
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._check_parameters(parameters)
        inner = optimizer
        for part in self.parts:
            inner = part.optimizer(inner, self.names)
        self.optimizer = CollectiveOptimizer(optimizer, inner, self.parts, parameters, self.world)
        self.optimizer.after_step = self._status.write
        if self.info.worker_index == 0:
            print(self.describe(), flush=True)
        return self.optimizer

    def _check_parameters(self, parameters: list[torch.nn.Parameter]) -> None:
        strange = sum(one not in self.names for one in parameters)
        if strange:
            raise ModelError(
                f"{strange} of the optimizer's {len(parameters)} parameters do not belong to the distributed model: "
                "make the optimizer from the parameters of what fleet.distributed_model returned"
            )

    def describe(self) -> str:
        """One line per strategy that is on, in the order they act."""
        world = self.world
        axes = ", ".join(f"{axis} {size}" for axis, size in world.degrees.items() if size > 1)
        lines = [f"collective training on {world.size} rank{'s' * (world.size > 1)} ({world.device.type})"]
        if axes:
            lines[0] += f": {axes}"
        for part in self.parts:
            keys = ", ".join(f"{key} {value}" for key, value in part.configs.items())
            lines.append(f"  {part.field}" + (f": {keys}" if keys else ""))
        return "\n".join(lines)

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        return together(loader, self.world) if self.world.size > 1 else iter(loader)

    def report(self, metrics: dict[str, float]) -> None:
        self._reported.update(metrics)
        if "loss" in metrics:
            self._note_loss(metrics["loss"])
        self._status.write()

    def _note_loss(self, loss: float | torch.Tensor) -> None:
        for part in self.parts:
            part.note_loss(loss)

    def stop(self) -> None:
        self._status.write(now=True)
        begun.info = None
        if self._world is not None:
            self._world.close()

    def _status_now(self) -> dict[str, Any]:
        seconds = max(1e-9, time.monotonic() - self._started)
        steps = self.optimizer.num_steps if self.optimizer else 0
        samples = self.model.num_samples if self.model else 0
        return {
            "role": "worker",
            "mode": "collective",
            "steps": steps,
            "steps_per_s": steps / seconds,
            "samples_per_s": samples / seconds,
            **self._reported,
        }

    def save(self, dirname: str, extra: Mapping[str, Any] | None) -> int:
        from torchfleet.collective.checkpoint.saving import save

        model, optimizer = self._trained()
        for part in self.parts:
            part.before_save()
        return save(dirname, model.module, optimizer.inner, self.parts, self.world, extra, self.names)

    def load(self, dirname: str) -> dict[str, Any]:
        from torchfleet.collective.checkpoint.loading import load

        model, optimizer = self._trained()
        extra = load(dirname, model.module, optimizer.inner, self.parts, self.world, self.names)
        for part in self.parts:
            part.after_load()
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
    def data_shard(self) -> tuple[int, int]:
        return self.world.data_shard

    def distribute_scheduler(self, scheduler: Any) -> Any:
        """As it is: every step is a global one."""
        return scheduler

    def barrier(self) -> None:
        self.world.barrier()

    def gather(self, name: str, data: bytes) -> list[bytes]:
        """What every rank brought, in their order. All ranks call it in the same order, so `name` is not needed."""
        return self.world.gather(data)
