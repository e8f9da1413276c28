"""The strategy `context_parallel`: each rank has a part of every sequence, and the whole model.

    context_parallel=True, context_parallel_configs={"context_parallel_degree": 4}

The ranks of a group read the same samples. A call of the model cuts its inputs along their second dimension, the
tokens; attention sees the tokens of all ranks (gathered_attention.py on CPUs, torch's ring attention on GPUs), every
other layer those of its rank. Activations of a rank are 1/n of those of the sequence. To the other strategies, ranks of
a group are replicas: their gradients are averaged.

Source: Liu et al. 2023, Ring Attention; the parts are those of torch's context_parallel. Composes with sharding, amp,
recompute, gradient_merge, tensor_parallel and every way to exchange gradients.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from torchfleet.base.errors import ModelError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.sequence.cut_attention import Attention, CutAttention
from torchfleet.collective.sequence.gathered_attention import GatheredAttention
from torchfleet.collective.sequence.sequence_inputs import SequenceInputs
from torchfleet.collective.sequence.sequence_outputs import joined
from torchfleet.collective.strategy import Forward, Strategy
from torchfleet.collective.world import Axis, World


class ContextParallel(Strategy):
    field = "context_parallel"
    accepts_local_parameters = False

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        self._axis = world.context
        self._attention = None if self._axis.size == 1 else attention_on(world.device, self._axis)
        self._inputs: SequenceInputs | None = None

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        name = self.settings.context_parallel_configs.position_argument
        if name and name not in inspect.signature(model.forward).parameters:
            raise ModelError(
                f"context_parallel: {type(model).__name__}.forward has no argument '{name}', through which the model "
                "learns the positions of this rank's tokens: add it, a tensor of shape (1, tokens); or, for a model "
                "that has no positions, set context_parallel_configs={'position_argument': ''}"
            )
        self._inputs = SequenceInputs(model, self._axis, name)
        return model

    def wrap_forward(self, forward: Forward) -> Forward:
        if self._attention is None:
            return forward
        return partial(self._cut_forward, self._attention, forward)

    def _cut_forward(self, attention: Attention, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        assert self._inputs is not None
        cut = self._inputs.cut(args, kwargs)
        with CutAttention(attention, cut.length) as mode:
            outputs = forward(*cut.args, **cut.kwargs)
        if not mode.num_calls:
            raise ModelError(
                "context_parallel: the model called no torch.nn.functional.scaled_dot_product_attention, the one form "
                "of attention that is cut: use it; a model of transformers does with attn_implementation='sdpa'"
            )
        return joined(outputs, cut, self._axis)


def attention_on(device: torch.device, axis: Axis) -> Attention:
    """Attention over the tokens of all ranks, on this device."""
    if device.type == "cpu":
        return lambda query, key, value, is_causal, scale: GatheredAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, is_causal, scale, axis
        )
    from torchfleet.collective.sequence.ring_attention import RingAttention

    return RingAttention(axis, device)
