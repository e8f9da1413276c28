"""Hugging Face's Trainer with the model and the optimizer of a collective job."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from transformers import Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.utils import can_return_loss, find_labels

import torchfleet as fleet
from torchfleet.api import process_role
from torchfleet.api.prepare.prepare_job import follow, start
from torchfleet.base.errors import FleetError, ModelError, StrategyError
from torchfleet.base.pages import page
from torchfleet.base.role.role_makers import is_collective_job
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.collective_model import CollectiveModel
from torchfleet.collective.collective_optimizer import CollectiveOptimizer
from torchfleet.collective.tensors.whole_state import whole_state

_FOLDER = "fleet"  # within a checkpoint: the output of fleet.save
_SHARING = ("tensor_parallel", "context_parallel")  # their ranks train on the same samples


class FleetTrainerMixin:
    """Mixin for other Trainer classes: `class Mine(FleetTrainerMixin, Seq2SeqTrainer)`. See FleetTrainer."""

    # Attributes of the Trainer class.
    args: TrainingArguments
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    _save: Any
    push_to_hub: Any
    label_names: list[str]
    can_return_loss: bool
    _stepped: CollectiveOptimizer

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        args: TrainingArguments | None = None,
        *more: Any,
        strategy: DistributedStrategy | None = None,
        **options: Any,
    ) -> None:
        if model is None:
            raise ModelError("FleetTrainer: expected a model, found none; model_init is not supported")
        args = TrainingArguments() if args is None else args
        _begin(strategy)
        try:
            optimizer, schedule = options.pop("optimizers", (None, None))
            wrapped, optimizer = self._distributed(model, optimizer, args)
            super().__init__(wrapped, args, *more, optimizers=(optimizer, schedule), **options)  # type: ignore[call-arg]
            self._read_class(type(model), args)
        except BaseException:
            fleet.reset()  # so that a notebook cell can be run again
            raise

    def _distributed(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, args: TrainingArguments
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        before = dict(model.named_parameters(remove_duplicate=False))
        wrapped: Any = fleet.distributed_model(model)
        _refuse_twice(args, [strategy.field for strategy in wrapped.strategies])
        if optimizer is None:
            return wrapped, None
        follow(optimizer, before, dict(wrapped.named_parameters(remove_duplicate=False)))
        return wrapped, self._distribute(optimizer)

    def _read_class(self, kind: type[torch.nn.Module], args: TrainingArguments) -> None:
        """Set again what the Trainer read from the wrapper's class: now it comes from the class of the user's model."""
        if args.label_names is None:
            self.label_names = find_labels(kind)
        self.can_return_loss = can_return_loss(kind)

    def _distribute(self, optimizer: torch.optim.Optimizer) -> CollectiveOptimizer:
        made: Any = fleet.distributed_optimizer(optimizer)
        self._stepped = made
        start(None)
        return self._stepped

    # Training

    def get_train_dataloader(self) -> Any:
        """The Trainer's loader; ranks that share layers or sequences read the same samples."""
        return _shared(super().get_train_dataloader())  # type: ignore[misc]

    def evaluation_loop(self, *more: Any, **options: Any) -> Any:
        shared = _sharing([strategy.field for strategy in self.model.strategies])
        if shared:
            raise StrategyError(_no_evaluation(shared))
        return super().evaluation_loop(*more, **options)  # type: ignore[misc]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self._distribute(super().create_optimizer(model))  # type: ignore[misc]
        found: torch.optim.Optimizer = self.optimizer
        return found

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Select by the names of the user's own model."""
        inner = model.module if isinstance(model, CollectiveModel) else model
        names: list[str] = super().get_decay_parameter_names(inner)  # type: ignore[misc]
        return names

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        """Clip the gradients of all batches and ranks; with gradient_merge, returns the norm of the last update."""
        return self._stepped.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm that clipping found; None without clipping."""
        return grad_norm

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *more: Any, **options: Any) -> None:
        norm = grad_norm if self._stepped.num_steps else None  # gradient_merge: no update yet, and so no norm
        super()._maybe_log_save_evaluate(tr_loss, norm, *more, **options)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *more: Any) -> None:
        super().log(logs, *more)  # type: ignore[misc]
        numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        if process_role.is_under_way():
            fleet.report(**numbers)

    # Checkpoints: the model as transformers saves it, and beside it the state to continue training from

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, for from_pretrained. All ranks call it together."""
        wrapped = self.model
        self._stepped_or_refused("save_model")
        state = whole_state(wrapped.module)
        self.model = wrapped.module
        try:
            if self.args.should_save:
                self._save(output_dir, state_dict=state)
        finally:
            self.model = wrapped
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _stepped_or_refused(self, what: str) -> None:
        if not process_role.is_under_way():
            raise FleetError(
                f"FleetTrainer.{what}: the job is over, or has not begun: call it between train() and the "
                "end of the job"
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        fleet.save(os.path.join(output_dir, _FOLDER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing yet: model and optimizer are loaded together, once the optimizer exists."""
        _folder_of(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        fleet.load(_folder_of(checkpoint))
        schedule = os.path.join(checkpoint, SCHEDULER_NAME)
        self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))

    def _load_best_model(self) -> None:
        fleet.load(_folder_of(self.state.best_model_checkpoint))


class FleetTrainer(FleetTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers.Trainer as a rank of a collective job: alone, or under `fleetrun --nproc_per_node N`.

    `strategy`: a DistributedStrategy: amp, recompute, gradient_merge, sharding, tensor_parallel, localsgd and others.
    All other arguments are the Trainer's. It calls fleet.init unless it was called, and distributes the model and the
    optimizer, its own or the one in `optimizers`. A feature that both sides offer may be enabled on one side only: an
    error says which to use. With gradient_merge, a step of the Trainer is one batch, and every k-th step updates the
    model.

    A checkpoint has the whole model, for from_pretrained, and a folder `fleet`, from which
    train(resume_from_checkpoint=...) continues on any number of ranks. The job ends with the script or with
    fleet.stop_worker().
    """


def _begin(strategy: DistributedStrategy | None) -> None:
    if process_role.is_under_way():
        raise FleetError("FleetTrainer: a job is under way already: call fleet.stop_worker() or fleet.reset() first")
    if os.environ.get("FLEET_ROLE") and not is_collective_job():
        raise FleetError(
            "FleetTrainer is for ranks, and this is a process of a job with servers: start it with fleetrun "
            "--nproc_per_node; with servers use transformers.Trainer: "
            f"{page('torch')}"
        )
    if not process_role.is_set_up():
        fleet.init(is_collective=True, strategy=strategy)
    elif not process_role.is_collective() or strategy is not None:
        raise FleetError(
            "FleetTrainer: fleet.init was called before. Leave it out and give the strategy here, or call "
            "fleet.init(is_collective=True, strategy=...) and leave it out here."
        )


def _folder_of(checkpoint: str) -> str:
    """Return the folder that fleet.save wrote for a checkpoint. Raises FleetError if it is missing."""
    folder = os.path.join(checkpoint, _FOLDER)
    if fleet.saved_extra(folder) is None:
        raise FleetError(
            f"{checkpoint} has no folder '{_FOLDER}' that training could go on from: it was saved by another Trainer, "
            "or with save_only_model. Begin with its weights instead: from_pretrained."
        )
    return folder


def _refuse_twice(args: Any, strategies: Collection[str]) -> None:
    """Raise StrategyError for features that both TrainingArguments and the strategies would apply, and for features
    that the Trainer's loop does not support. The error names the settings and a solution. `strategies`: the enabled
    strategies.
    """
    for name in ("bf16", "fp16"):
        if getattr(args, name, False):
            raise StrategyError(
                f"TrainingArguments({name}=True) and FleetTrainer: mixed precision is the strategy's. Leave {name} "
                f"out, and give strategy=DistributedStrategy(amp=True){_dtype(name)}."
            )
    steps = args.gradient_accumulation_steps
    if steps > 1:
        raise StrategyError(
            f"TrainingArguments(gradient_accumulation_steps={steps}) and FleetTrainer: gradients are gathered by the "
            "strategy. Leave it at 1, and give strategy=DistributedStrategy(gradient_merge=True, "
            f"gradient_merge_configs={{'k_steps': {steps}}})."
        )
    if args.gradient_checkpointing and "recompute" in strategies:
        raise StrategyError(
            "TrainingArguments(gradient_checkpointing=True) and DistributedStrategy(recompute=True) are the same: "
            "leave one of them out"
        )
    if args.max_grad_norm > 0 and "dgc" in strategies:
        raise StrategyError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm}) and DistributedStrategy(dgc=True): what clipping "
            "takes from values that were exchanged already would be lost. Give max_grad_norm=0.0, and "
            f"dgc_configs={{'local_grad_clip_norm': {args.max_grad_norm}}} to clip before values are compressed."
        )
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise StrategyError(
                f"TrainingArguments({name}=...) and FleetTrainer: leave {name} out, and give "
                "strategy=DistributedStrategy(sharding=True, sharding_configs={'stage': 2})"
            )
    if "pipeline" in strategies:
        raise StrategyError(
            "DistributedStrategy(pipeline=True): the Trainer needs the outputs of the model on every rank, and "
            "those of a pipeline are on the last one. Write the loop yourself "
            f"({page('collective/pipeline')})."
        )
    shared = _sharing(strategies)
    if shared and str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
        raise StrategyError(_no_evaluation(shared))


def _sharing(strategies: Collection[str]) -> str:
    """The enabled strategy under which ranks train on the same samples, or ""."""
    return next((name for name in _SHARING if name in strategies), "")


def _no_evaluation(name: str) -> str:
    return (
        f"FleetTrainer does not evaluate under DistributedStrategy({name}=True): the Trainer would count the outputs "
        "of ranks that share samples several times. Leave eval_strategy out, and evaluate the saved model."
    )


def _shared(loader: Any) -> Any:
    """Make accelerate's loader, which divides batches among all ranks, give ranks sharing samples the same batches."""
    index, number = fleet.data_shard()
    if number == fleet.worker_num():
        return loader
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSamplerShard):
        raise StrategyError(
            f"FleetTrainer: ranks that share samples need a dataset with a length, found a loader with "
            f"{type(sampler).__name__}. Write the loop yourself ({page('collective/tensor_parallel')})."
        )
    sampler.process_index, sampler.num_processes = index, number
    return loader


def _dtype(name: str) -> str:
    return " with amp_configs={'dtype': 'bfloat16'}" if name == "bf16" else ""
