"""Pipeline parallelism: the layers of a model in stages on different ranks, through which micro-batches flow.

    strategy = fleet.DistributedStrategy(pipeline=True, pipeline_configs={"accumulate_steps": 8})
    loss = model.train_batch(inputs, target, loss_fn)      # the mean over the batch on the last stage, None elsewhere
    loss = model(inputs, target); loss.backward()          # a model that returns its loss: the mean, on every rank

A batch is cut into n = accumulate_steps equal micro-batches (or those of `micro_batch_size`). Stage s computes forward
and backward of one micro-batch while its neighbours compute others; gradients are those of the mean loss over the
micro-batches,

    g = (1/n) · Σ_{i=1..n} ∂ loss_i / ∂ w,

and equal those of the whole batch if the loss is a mean over samples (batch norm sees micro-batches). `schedule_mode`
sets the order of forward and backward passes, and `vpp_degree` the number of stages on each rank (orders.py).

Every rank of a pipeline reads the same batch: a sampler needs num_replicas = data × sharding degrees.
`fleet.device_guard` or `stages` sets the stages, or a dry step finds them (measured_cut.py); a Sequential without these
is split evenly (stages.py). A Sequential is split directly. Any other model is traced by torch.export for each shape of
micro-batch (traced.py), and then returns its outputs as a tensor or a flat tuple. After the split a rank has only the
parameters of its own stages, under their original names.

Source: Huang et al. 2019, GPipe; Narayanan et al. 2019, PipeDream (1F1B). Composes with amp, recompute, gradient_merge,
lars, lamb, sharding (from stage 2 on every micro-batch exchanges its gradients, and a traced stage is gathered as a
whole), tensor_parallel and data parallelism, whose all-reduce runs during the backward pass of the last micro-batch
(gradient_average.py). To clip by the norm over all stages, call optimizer.clip_grad_norm_.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.gradient_average import GradientAverage
from torchfleet.collective.pipeline import orders, stages
from torchfleet.collective.pipeline.exploring import explore
from torchfleet.collective.pipeline.flow import Call, Schedule
from torchfleet.collective.pipeline.measured_cut import MeasuredCut
from torchfleet.collective.pipeline.micro_batches import (
    MicroBatches,
    batch_size_of,
    num_micro_batches,
    own_loss,
    signature,
)
from torchfleet.collective.pipeline.shapes import Wire
from torchfleet.collective.pipeline.stage_ties import StageTies, ties
from torchfleet.collective.pipeline.traced import TracedStage, Tracer
from torchfleet.collective.strategies.recomputation.offload import Offload
from torchfleet.collective.strategies.recomputation.recompute import chosen
from torchfleet.collective.strategy import JobView, LossFn, Runner, Strategy
from torchfleet.collective.world import World

_NUM_KEPT = 8  # batch shapes whose schedule and trace are kept


class Pipeline(Strategy):
    field = "pipeline"
    owns_gradients = True
    accepts_local_parameters = False

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        _check(settings)
        self._axis = world.axis("pipe")
        self._mode, self._vpp_degree = settings.pipeline_configs.schedule_mode, settings.pipeline_configs.vpp_degree
        # A model of several stages can be tried out in one process: it is then one stage.
        self._rank_of = [0]
        if self._axis.size > 1:
            self._rank_of = orders.ranks_of_stages(self._mode, self._axis.size, self._vpp_degree)
            self._wire = Wire(self._axis, world.device)
        self._own = [stage for stage, rank in enumerate(self._rank_of) if rank == self._axis.rank]
        self._stage = self._own[-1]  # the stage that runs now
        self.wants_batch = settings.pipeline_configs.cut == "measured"
        self._average = GradientAverage(settings, world, ends_itself=False)
        self._exchanging = True
        self._schedules: OrderedDict[Any, Schedule] = OrderedDict()
        self._tied = StageTies([], world)
        self._tracer: Tracer | None = None
        self._parts: dict[int, list[torch.nn.Module]] = {}  # of a Sequential with several stages on a rank
        self._recomputed: list[str] = []
        # From stage 2 on, sharding puts gathered parameters into the model for the duration of a call.
        self._is_gathered = settings.sharding and settings.sharding_configs.stage > 1

    @property
    def is_last(self) -> bool:
        """Whether one of this rank's stages computes the model's outputs."""
        return self._rank_of[-1] == self._axis.rank

    @property
    def is_at_outputs(self) -> bool:
        return self._stage == len(self._rank_of) - 1

    @property
    def refusal(self) -> str:
        if self._axis.size == 1 or self._tracer is not None:
            return ""
        return (
            "under pipeline=True the stages of a Sequential run together, and it does not return a loss: use "
            "model.train_batch(inputs, target, loss_fn) to train and model.eval_batch(inputs) to predict"
        )

    # The model

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Remove everything from the model that does not belong to this rank's stages. Names do not change."""
        if self._axis.size == 1:
            return model
        if self.settings.recompute:
            again = {id(module) for module in chosen(model, self.settings.recompute_configs.checkpoints)}
            self._recomputed = [name for name, module in model.named_modules() if id(module) in again]
        first = self._starts(model)
        stage_of = stages.stage_of_modules(model, first)
        rank_of = {name: self._rank_of[stage] for name, stage in stage_of.items()}
        found = ties(model, rank_of)
        self._tied = StageTies(found, self.world)
        others = [name for name, rank in rank_of.items() if rank != self._axis.rank]
        if stages.is_cut_in_chain(model, first):
            stages.drop_modules(model, [name for name in stages.chain(model) if name in others])
            if len(self._own) > 1:
                for name in stages.chain(model):
                    self._parts.setdefault(stage_of[name], []).append(model.get_submodule(name))
                model.forward = update_wrapper(partial(self._run_part), model.forward)
            return model
        self._tracer = Tracer(model, first, found, self._rank_of, self.world.device)
        self._buffers = dict(model.named_buffers())
        stages.drop_tensors(model, others)
        model.forward = update_wrapper(partial(self._run_traced), model.forward)
        vars(model)["fleet_traced"] = True  # its modules are never called themselves
        return model

    def _starts(self, model: torch.nn.Module) -> list[str]:
        """The names of the first modules of the second, third, ... stage."""
        if not self.wants_batch:
            return stages.starts(model, self.settings.pipeline_configs.stages, len(self._rank_of))
        stages.refuse_guards(model)
        batch, self.dry_batch = self.dry_batch, None
        return MeasuredCut(self.settings, self.world, self._rank_of).starts(model, batch, self._recomputed)

    def runner(self) -> Runner:
        return self

    def joined(self, job: JobView) -> None:
        self._model, self._forward = job.model, job.forward
        self._average.watch(job.model.parameters())
        self._tied.find(job.model)
        if self._axis.size > 1:  # all ranks of the group must have met before pairs of neighbours communicate
            dist.all_reduce(torch.zeros(1, device=self.world.device), group=self._axis.group)

    def begin_forward(self, exchanging: bool) -> None:
        self._exchanging = exchanging

    # A batch

    def train_batch(self, inputs: Any, target: Any, loss_fn: LossFn) -> torch.Tensor | None:
        """Run forward and backward of all micro-batches; gradients are added to .grad and averaged over the replicas.

        `inputs`: a tensor, or a tuple of arguments, or a dict of keyword arguments. `loss_fn(output, target)` is called
        on the last stage only, and returns a mean over samples. All ranks of the pipeline call it with the same batch.
        """
        size, configs = batch_size_of(inputs, target), self.settings.pipeline_configs
        num = num_micro_batches(size, configs.accumulate_steps, configs.micro_batch_size)
        batches = MicroBatches(inputs, target, num, loss_fn, self.world.device)
        self._average.begin(False)
        self._tied.begin()
        if self._axis.size == 1:
            for index in range(num):
                loss = batches.loss(self._call(0, None, (), batches.inputs_of(index)), index)
                if index == num - 1:
                    self._average.begin(self._exchanging)
                loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._schedule(batches).run(batches, lambda: self._average.begin(self._exchanging))
        self._average.finish()
        if self._exchanging:
            self._tied.sum_gradients()
        return torch.stack(batches.losses).mean() if self.is_last else None

    @torch.no_grad()
    def eval_batch(self, inputs: Any) -> Any:
        """The model's outputs for a batch, on the last stage; None elsewhere. A batch may have any size."""
        batches = self._outputs(inputs)
        return batches.joined() if self.is_last else None

    @torch.no_grad()
    def eval_loss(self, inputs: Any) -> torch.Tensor | None:
        """The loss that the model returns for a batch, the mean over micro-batches, on the last stage."""
        batches = self._outputs(inputs)
        return (
            torch.stack([own_loss(output).reshape(()) for output in batches.outputs]).mean() if self.is_last else None
        )

    own_loss = staticmethod(own_loss)

    def shared(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The loss of the last stage on every rank of the pipeline."""
        if self._axis.size == 1:
            assert loss is not None
            return loss
        wire = self._wire.device
        number = torch.zeros((), dtype=torch.float64, device=wire) if loss is None else loss.detach().double().to(wire)
        dist.broadcast(number, self._wire.global_rank(self._rank_of[-1]), self._axis.group)
        return number.float().to(self.world.device)

    def _outputs(self, inputs: Any) -> MicroBatches:
        """Run a batch forward; the outputs of its micro-batches are on the last stage."""
        size, configs = batch_size_of(inputs), self.settings.pipeline_configs
        most = min(size, max(size // (configs.micro_batch_size or size), configs.accumulate_steps))
        num = next(num for num in range(most, 0, -1) if size % num == 0)
        batches = MicroBatches(inputs, None, num, None, self.world.device)
        if self._axis.size == 1:
            batches.outputs = [self._call(0, None, (), batches.inputs_of(index)) for index in range(num)]
        else:
            self._schedule(batches).run(batches)
        return batches

    def _call(self, stage: int, traced: TracedStage | None, received: Sequence[torch.Tensor], inputs: Any) -> Any:
        """Run a stage of this rank on one micro-batch; returns the tensors for the next stage, or the outputs."""
        self._stage, (args, kwargs) = stage, inputs
        if traced is None:
            return self._forward(*received) if stage else self._forward(*args, **kwargs)
        self._traced, flat = traced, tree_leaves(inputs)
        outputs = self._forward(*traced.arguments(received, flat))
        outgoing = traced.outgoing(received, flat, outputs)
        return outgoing[0] if self.is_at_outputs and len(outgoing) == 1 else outgoing

    def _run_traced(self, *args: Any) -> Any:
        """The model's forward, which the other strategies wrap."""
        if self._is_gathered:
            self._traced.adopt(self._model, self._buffers)
        return self._traced.module(*args)

    def _run_part(self, input: Any) -> Any:
        """The forward of a Sequential that has several stages here."""
        for module in self._parts[self._stage]:
            input = module(input)
        return input

    # The schedule of batches of one shape

    def _schedule(self, batches: MicroBatches) -> Schedule:
        """The schedule for batches of this shape: made for the first such batch, and kept."""
        inputs = batches.inputs[0]
        key = (batches.has_loss, self._model.training, batches.num, signature(inputs))
        if key not in self._schedules:
            if batches.has_loss:
                every = orders.orders(self._mode, self._axis.size, self._vpp_degree, batches.num)
            else:
                every = orders.forwards(self._rank_of, batches.num)
            actions = orders.with_receives(every, self._rank_of)[self._axis.rank]
            parts = explore(self._calls(*inputs), inputs, self._model, self._rank_of, self._wire)
            self._schedules[key] = Schedule(parts, actions, self._rank_of, self._axis.rank, self._wire)
            if len(self._schedules) > _NUM_KEPT:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Call]:
        """How each stage of this rank is called."""
        if self._tracer is None:
            return {stage: partial(self._call, stage, None) for stage in self._own}
        calls: dict[int, Call] = {}
        for stage, traced in self._tracer.trace(args, kwargs, self._model.training, self._own).items():
            if not self._is_gathered:
                traced.adopt(self._model, self._buffers)
            is_offloaded = self.settings.recompute_configs.enable_offload
            traced.recompute(self._recomputed, Offload(self.world.device) if is_offloaded else None)
            calls[stage] = partial(self._call, stage, traced)
        return calls


def _check(settings: DistributedStrategy) -> None:
    """Refuse settings that conflict with several stages on a rank, or with a backward pass in two parts."""
    configs, is_split = settings.pipeline_configs, settings.pipeline_configs.schedule_mode.endswith("ZeroBubble")
    mode = f"pipeline_configs['schedule_mode']={configs.schedule_mode!r}"
    stage = settings.sharding_configs.stage
    if settings.sharding and stage > 1 and (is_split or configs.vpp_degree > 1):
        raise StrategyError(
            f"{mode} and sharding (stage {stage}) cannot be used together: from stage 2 on the parameters of all "
            "stages of a rank would be gathered for each of them. Use sharding_configs={'stage': 1}, or 1F1B."
        )
    if is_split and settings.tensor_parallel:
        raise StrategyError(
            f"{mode} and tensor_parallel cannot be used together: the gradients of weights are computed later, without "
            "the hooks by which cut layers add theirs. Use Interleaved1F1B or 1F1B."
        )
    if is_split and settings.recompute:
        raise StrategyError(
            f"{mode} and recompute cannot be used together: the gradients of weights are computed one after another, "
            "and modules would be run again for each of them. Use Interleaved1F1B or 1F1B."
        )
