"""pipeline_configs["cut"] = "measured": a dry step measures the modules of a model (dry_step.py), which are then cut.

All ranks measure, because layers may communicate, and exchange the results: the median of the times and the largest
number of bytes count. So all ranks find the same cut (stage_cuts.py).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchfleet.base.errors import ModelError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.pipeline import orders, stages
from torchfleet.collective.pipeline.dry_step import DryStep, Inputs, ModelPart
from torchfleet.collective.pipeline.micro_batches import MicroBatches, batch_size_of, num_micro_batches
from torchfleet.collective.pipeline.stage_cuts import Cutting, Stages, Unit, megabytes
from torchfleet.collective.pipeline.stage_ties import by_name, ties
from torchfleet.collective.pipeline.traced import TracedStage, Tracer, strays
from torchfleet.collective.strategies.mixed_precision.precision import precision
from torchfleet.collective.world import World

_OF_A_GPU = 0.9  # the share of its memory that a rank may take: an allocator keeps some in reserve
_ADAM = 2  # values of optimizer state for each value of a parameter, as in Adam: the optimizer is not known yet


class MeasuredCut:
    """Finds where the stages of a model begin. All ranks create and call it together."""

    def __init__(self, settings: DistributedStrategy, world: World, rank_of: Sequence[int]) -> None:
        self._settings, self._world, self._rank_of = settings, world, rank_of
        self._configs = settings.pipeline_configs

    def starts(self, model: torch.nn.Module, batch: Any, recomputed: Sequence[str]) -> list[str]:
        """The names of the first modules of the second, third, ... stage. `batch`: like the inputs of train_batch.

        `recomputed`: the modules that keep only their inputs, if the model is traced.
        """
        num = num_micro_batches(batch_size_of(batch), self._configs.accumulate_steps, self._configs.micro_batch_size)
        inputs = MicroBatches(batch, None, num, None, self._world.device).inputs_of(0)
        units, bound = agreed(self._world, partial(self._measure, model, inputs, recomputed), self._bound())
        every = orders.orders(self._configs.schedule_mode, max(self._rank_of) + 1, self._configs.vpp_degree, num)
        cutting = Cutting(units, Stages(self._rank_of, orders.num_kept(every, len(self._rank_of)), bound))
        cuts = cutting.fastest()
        if self._world.rank == 0:
            print("\n".join(self._lines(units, cutting, cuts)), flush=True)
        return [units[first].name for first in cuts]

    def _measure(self, model: torch.nn.Module, inputs: Inputs, recomputed: Sequence[str]) -> list[Unit]:
        dtype = precision(self._settings.amp_configs)[0] if self._settings.amp else None
        parts = list(self._chained(model) if stages.chain(model) else self._traced(model, inputs, recomputed))
        return DryStep(self._world.device, dtype).measure(parts, inputs)

    def _chained(self, model: torch.nn.Module) -> Iterator[ModelPart]:
        for place, name in enumerate(stages.chain(model)):
            module = model.get_submodule(name)
            call = partial(_call_next if place else _call_first, module)
            yield ModelPart(name, module, self._state(module), call)

    def _traced(self, model: torch.nn.Module, inputs: Inputs, recomputed: Sequence[str]) -> Iterator[ModelPart]:
        device, is_training = self._world.device, model.training
        called = Tracer(model, [], [], [0], device).called(*inputs)
        names = stages.in_call_order(stages.blocks(model), called, [name for name, _ in model.named_modules()])
        if not names:
            raise ModelError(
                f"pipeline_configs['cut']='measured': {type(model).__name__} calls no module of its own exactly once: "
                "say where stages begin with pipeline_configs['stages']"
            )
        every = Tracer(model, names[1:], [], [0] * len(names), device).trace(*inputs, is_training, range(len(names)))
        inner = _not_to_cut(model, names, [traced.module for traced in every.values()])
        for place, traced in every.items():
            traced.recompute(recomputed, None)
            call, state = partial(_call_traced, traced), self._state(traced.module)
            yield ModelPart(names[place], traced.module, state, call, is_start=place not in inner)

    def _state(self, module: torch.nn.Module) -> float:
        """Bytes of a rank for the module's parameters, their gradients, and what Adam keeps of them."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        own = sum(_size(tensor) for tensor in (*module.parameters(), *module.buffers()))
        gradients = sum(_size(parameter) for parameter in trained)
        # Parameters in half precision have a copy in float32, which Adam's state belongs to.
        kept = sum(p.numel() * max(4, p.itemsize) * (_ADAM + (p.itemsize < 4)) for p in trained)
        stage = self._settings.sharding_configs.stage if self._settings.sharding else 0
        num = self._world.degrees["sharding"]
        if stage < 2:
            return own + gradients + kept / num
        return own + (own + gradients + kept) / num  # the stage is gathered as a whole, at times

    def _bound(self) -> float:
        if self._configs.memory_MB:
            return float(self._configs.memory_MB * (1 << 20))
        if self._world.device.type != "cuda":
            return math.inf
        return _OF_A_GPU * torch.cuda.get_device_properties(self._world.device).total_memory

    def _lines(self, units: Sequence[Unit], cutting: Cutting, cuts: Sequence[int]) -> Iterator[str]:
        yield f"pipeline: {len(units)} modules, measured in a dry step, in {len(self._rank_of)} stages"
        for stage, (first, end) in enumerate(cutting.spans(cuts)):
            names = units[first].name if end == first + 1 else f"{units[first].name} … {units[end - 1].name}"
            yield (
                f"  stage {stage} on rank {self._rank_of[stage]}: {names}, {1e3 * cutting.seconds(first, end):.3g} ms "
                f"a micro-batch, {megabytes(cutting.bytes(stage, first, end))}"
            )


def _not_to_cut(model: torch.nn.Module, names: Sequence[str], modules: Sequence[torch.nn.Module]) -> set[int]:
    """Parts that no stage may begin with: the cut would separate a parameter from a part that uses it."""
    part_of = stages.stage_of_modules(model, names[1:])
    found = strays(modules, range(len(modules)), part_of, by_name(ties(model, part_of)))
    pairs = [sorted((part, owner)) for part, _, owner in found]
    return {place for first, last in pairs for place in range(first + 1, last + 1)}


def agreed(world: World, measure: Callable[[], list[Unit]], bound: float) -> tuple[list[Unit], float]:
    """The measurements of all ranks, merged, and their smallest bound. If it fails on one rank, all of them raise."""
    failure: Exception | None = None
    told: dict[str, Any] = {}
    try:
        told = {"units": [asdict(unit) for unit in measure()], "bound": bound}
    except Exception as error:
        failure, told = error, {"error": str(error)}
    every = [json.loads(message) for message in world.gather(json.dumps(told).encode())]
    if failure is not None:
        raise failure
    for rank, other in enumerate(every):
        if "error" in other:
            raise ModelError(f"rank {rank} failed: {other['error']}")
    rows = [[Unit(**unit) for unit in other["units"]] for other in every]
    if any([unit.name for unit in row] != [unit.name for unit in rows[0]] for row in rows):
        raise ModelError("pipeline_configs['cut']='measured': the ranks have models with different modules")
    return [_joined(unit) for unit in zip(*rows, strict=True)], min(other["bound"] for other in every)


def _joined(measured: Sequence[Unit]) -> Unit:
    """One unit, merged from the measurements of all ranks."""
    every = [asdict(unit) for unit in measured]
    most = {name: max(unit[name] for unit in every) for name in ("state", "inside", "entering", "joined", "leaving")}
    seconds = statistics.median(unit.seconds for unit in measured)
    return Unit(measured[0].name, seconds, is_start=all(unit.is_start for unit in measured), **most)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _call_first(module: torch.nn.Module, _: Any, inputs: Inputs) -> Any:
    return module(*inputs[0], **inputs[1])


def _call_next(module: torch.nn.Module, value: Any, _: Inputs) -> Any:
    return module(value)


def _call_traced(traced: TracedStage, received: Any, inputs: Inputs) -> Any:
    flat, values = tree_leaves(inputs), received or ()
    return traced.outgoing(values, flat, traced.module(*traced.arguments(values, flat)))
