"""The strategy with which Lightning's Trainer trains a module in a torchfleet job."""

from __future__ import annotations

import math
import time
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

import torchfleet as fleet
from torchfleet.api import process_role
from torchfleet.api.prepare.prepare_job import start
from torchfleet.apps.lightning.checkpoint_folders import CheckpointFolders
from torchfleet.apps.lightning.process_device import ProcessDevice
from torchfleet.apps.lightning.worker_exchange import WorkerExchange
from torchfleet.base.errors import FleetError, ModelError, StrategyError
from torchfleet.base.pages import page
from torchfleet.base.role.role_info import SERVER
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker, is_collective_job
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy

_PERIOD = 0.5  # seconds between two reports of metrics, the rate of the display
_OWN_CALLS = {  # strategies that need the model's forward to be called, where Lightning calls training_step
    "pipeline": "training_step computes on every rank what a pipeline computes in stages",
    "context_parallel": "the positions of tokens are arguments of the model's forward, and training_step is called",
}
_MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "half_async": {"a_sync": True, "a_sync_configs": {"half_async": True}},
    "async": {"a_sync": True},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 100}},
    "hybrid": {"a_sync": True, "a_sync_configs": {"hybrid": True}},
}


class FleetStrategy(ProcessDevice, CheckpointFolders, WorkerExchange, ParallelStrategy):  # type: ignore[misc]
    """Trains a LightningModule in a job: alone, under `fleetrun --server_num S --worker_num W`, or as ranks.

    `settings`: "sync", "half_async", "async", "geo" or "hybrid", or a DistributedStrategy, whose collective fields
    apply under `fleetrun --nproc_per_node N`. `sparse`: which embeddings go to the servers, as in
    fleet.distributed_model; a collective job has no servers and refuses it.

    The process's role comes from the environment. Each worker is a rank of the Trainer and gets its share of the
    samples. On a server, `fit`, `validate`, `test` and `predict` serve until all workers have stopped, and then end the
    script. The first of these calls starts the job. It ends with the script or with fleet.stop_worker().
    """

    strategy_name = "fleet"
    precision_plugin: Any  # defined by Lightning's class
    _next_report = 0.0

    def __init__(self, settings: str | DistributedStrategy = "sync", sparse: str | int | None = None) -> None:
        super().__init__()
        self._settings, self._sparse = _settings_of(settings), sparse
        self._is_collective = is_collective_job()
        self._info = PaddleCloudRoleMaker(self._is_collective).read()
        self._begun: LightningModule | None = None  # the module of the current job
        self._kept: tuple[Any, list[Any], list[Any]] = (None, [], [])  # its model, optimizers and schedulers
        self.set_world_ranks()

    # Identity of this process

    def set_world_ranks(self) -> None:
        rank_zero_only.rank = self.global_rank

    @property
    def global_rank(self) -> int:
        """The index of the worker; servers are numbered after all workers."""
        is_server = self._info.role == SERVER
        return self._info.num_workers + self._info.server_index if is_server else self._info.worker_index

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return self._info.num_workers

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning gives its loaders a DistributedSampler."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        index, number = fleet.data_shard()
        return {"num_replicas": number, "rank": index}

    # Start of the job

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._folder = None  # set by an earlier call

    def setup_environment(self) -> None:
        self.check_devices()
        if self.world_size > 1:
            self._refuse_prepare_data()
        if self._info.role != SERVER:  # a server uses no GPU
            super().setup_environment()

    def _refuse_prepare_data(self) -> None:
        """Refuse prepare_data: one worker would prepare the data, and the others would not wait for it."""
        module = self.lightning_module
        assert module is not None
        data = module.trainer.datamodule
        if is_overridden("prepare_data", module) or (data is not None and is_overridden("prepare_data", data)):
            raise ModelError(
                "FleetStrategy: prepare_data would be called by one worker while the others go on without waiting: "
                "prepare the data before the job, or in setup()"
            )

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        self._refuse_twice(trainer)
        if process_role.is_under_way() and module is self._begun:
            self.model, self.optimizers, self.lr_scheduler_configs = self._kept
        else:
            self._begin(trainer, module)
        self.setup_precision_plugin()

    def _begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Distribute model and optimizer, then start the servers, workers or ranks."""
        if process_role.is_under_way():
            raise FleetError(
                "FleetStrategy: a job is under way with another module: call fleet.stop_worker() at its end, or "
                "fleet.reset() to give it up"
            )
        is_own = not process_role.is_set_up()
        if is_own:
            fleet.init(is_collective=self._is_collective, strategy=self._settings)
        try:
            self._distribute(trainer, module)
        except Exception:
            if is_own:
                fleet.reset()  # so that a notebook cell can be run again
            raise

    def _distribute(self, trainer: Trainer, module: LightningModule) -> None:
        module = self.precision_plugin.convert_module(module)
        self.model = module
        self.model_to_device()
        self.model = fleet.distributed_model(module, self._settings, self._sparse)
        self.setup_optimizers(trainer)
        start(self.folder_to_load())
        self._begun = module
        self._kept = self.model, self.optimizers, self.lr_scheduler_configs

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        made = self.optimizers
        if not made or not all(optimizer.param_groups for optimizer in made):
            raise ModelError("FleetStrategy: expected an optimizer of configure_optimizers, found none")
        self.optimizers = [fleet.distributed_optimizer(optimizer) for optimizer in made]
        for config in self.lr_scheduler_configs:
            if config.interval == "step":
                config.scheduler = fleet.distributed_scheduler(config.scheduler)

    def _refuse_twice(self, trainer: Trainer) -> None:
        """Refuse features that Lightning and the collective strategies would both apply."""
        if not self._is_collective:
            return
        for name, reason in _OWN_CALLS.items():
            if getattr(self._settings, name):
                raise StrategyError(
                    f"DistributedStrategy({name}=True) and Lightning: {reason}. Write the loop yourself "
                    f"({page(f'collective/{name}')}), or leave it out."
                )
        if trainer.accumulate_grad_batches > 1:
            raise StrategyError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): the ranks would exchange every "
                "batch. Leave it at 1, and give FleetStrategy a DistributedStrategy(gradient_merge=True, "
                f"gradient_merge_configs={{'k_steps': {trainer.accumulate_grad_batches}}})."
            )
        if self._settings.amp and trainer.precision != "32-true":
            raise StrategyError(
                f"Trainer(precision={trainer.precision!r}) and DistributedStrategy(amp=True) are both mixed precision: "
                "leave one of them out"
            )
        if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm not in (None, "norm"):
            raise StrategyError(
                f"Trainer(gradient_clip_algorithm={str(trainer.gradient_clip_algorithm)!r}): ranks clip by the norm of "
                "all gradients; say 'norm'"
            )
        if type(trainer.precision_plugin) is Precision:
            self.precision_plugin = _RankPrecision()

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # Values logged by the module (`self.log`), shown on the launcher's display

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if time.monotonic() >= self._next_report:
            self._report()

    def on_validation_end(self) -> None:
        self._report()

    def on_train_end(self) -> None:
        self._report()

    def _report(self) -> None:
        self._next_report = time.monotonic() + _PERIOD
        if not process_role.is_under_way() or self.lightning_module is None:
            return
        found = {name: float(value) for name, value in self.lightning_module.trainer.callback_metrics.items()}
        fleet.report(**{name: value for name, value in found.items() if math.isfinite(value)})


class _RankPrecision(Precision):  # type: ignore[misc]
    """Clips in the optimizer step, where the collective strategies have the gradients of all batches and ranks."""

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = None) -> None:
        if clip_val > 0:
            optimizer.clip_grad_norm_(float(clip_val))


def _settings_of(settings: str | DistributedStrategy) -> DistributedStrategy:
    if isinstance(settings, DistributedStrategy):
        return settings
    if settings not in _MODES:
        raise StrategyError(
            f"FleetStrategy({settings!r}): expected one of {', '.join(_MODES)}, or a DistributedStrategy"
        )
    return DistributedStrategy(**_MODES[settings])


for _mode in _MODES:
    StrategyRegistry.register(f"fleet_{_mode}", FleetStrategy, f"torchfleet, {_mode}", override=True, settings=_mode)
