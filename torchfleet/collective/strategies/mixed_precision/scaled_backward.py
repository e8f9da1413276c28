"""The backward pass of a model with scaled gradients: a separate pass inside the one that the user starts.

    loss.backward()                      true gradients: of the loss, of a penalty on weights, of what made the inputs
    └ _Boundary.backward                 the true gradients of the model's outputs, in float32
      ├ begin                            what .grad holds already is multiplied by the scale
      ├ torch.autograd.backward          from the outputs, times the scale, to parameters and inputs of the model alone
      └ end                              .grad / scale
      gradients of the inputs / scale    go on to whatever made them

Nothing outside of the model ever sees the scale. torch.autograd.grad with respect to inputs is correct too. A graph of
the gradients (create_graph) would contain the scale, and raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import Function, Variable
from torch.nn.parallel import DistributedDataParallel

from torchfleet.base.errors import ModelError
from torchfleet.collective.strategy import Forward
from torchfleet.collective.tensors.local_tensors import is_local
from torchfleet.collective.tensors.outputs import map_tensors, tensors

Gradients = Sequence[torch.Tensor | None]


class Pass(NamedTuple):
    """A call of the model, up to its backward pass."""

    outputs: list[torch.Tensor]  # as the model returned them; cleared when the graph is freed
    inputs: list[torch.Tensor]  # leaves that replace the inputs that need gradients
    exchanging: bool  # whether the backward pass exchanges gradients


class ScaledBackward:
    """Calls a model so that its backward pass is separate and scaled by `scale()`, between `begin` and `end`.

    `parallel`, if set, is prepared right before the backward pass: gradients that other terms of the loss have added to
    .grad by then are averaged with the rest. Those added later in the user's backward pass are averaged at its end.
    """

    def __init__(self, scale: Callable[[], float], end: Callable[[], None]) -> None:
        self._scale, self._end = scale, end
        self.begin: Callable[[], None] = lambda: None
        self.parallel: DistributedDataParallel | None = None
        self._averaged: list[torch.nn.Parameter] = []
        self._versions: list[int | None] = []  # versions of the gradients after the model's backward pass

    def use(self, parallel: DistributedDataParallel) -> None:
        """From now on, average gradients over the ranks of `parallel`."""
        self.parallel = parallel
        self._averaged = [p for p in parallel.parameters() if p.requires_grad and not is_local(p)]

    def call(self, call: Forward, args: Any, kwargs: Any) -> Any:
        """Call the model; its outputs get gradients through the boundary."""
        given = _needing_gradients([args, kwargs])
        leaves = {id(tensor): tensor.detach().requires_grad_() for tensor in given}
        if given:
            args, kwargs = map_tensors(lambda tensor: leaves.get(id(tensor), tensor), [args, kwargs])
        parallel = self.parallel
        exchanging = parallel is not None and parallel.require_backward_grad_sync
        if parallel is not None:
            parallel.require_backward_grad_sync = False
        try:
            outputs = call(*args, **kwargs)
        finally:
            if parallel is not None:
                parallel.require_backward_grad_sync = parallel.require_forward_param_sync = exchanging
        inner = _needing_gradients(outputs)
        begun = Pass(inner, list(leaves.values()), exchanging)
        if not inner:
            self._expect_exchange(begun)  # as without amp: no output needs gradients
            return outputs
        anchor = torch.empty(0, requires_grad=True)  # makes the outputs need gradients, whatever the inputs are
        outer = _Boundary.apply(anchor, self, begun, *given)  # type: ignore[no-untyped-call]
        seen = {id(tensor): made for tensor, made in zip(inner, outer, strict=True)}
        return map_tensors(lambda tensor: seen.get(id(tensor), tensor), outputs)

    def backward(self, begun: Pass, gradients: Gradients) -> Gradients:
        """The gradients of the inputs; those of parameters are in .grad, unless only inputs were requested."""
        if torch.is_grad_enabled():
            raise ModelError(
                "amp in float16: create_graph=True through the model's outputs, and a graph of scaled gradients would "
                "not be of their true size. Use amp_configs={'dtype': 'bfloat16'}, which has no scale."
            )
        keep, scale = torch._C._autograd._get_current_graph_task_keep_graph(), self._scale()
        pairs = [
            (output, gradient * scale)
            for output, gradient in zip(begun.outputs, gradients, strict=True)
            if gradient is not None
        ]
        from_outputs, scaled = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        found: Gradients
        if Variable._execution_engine.is_checkpoint_valid():
            self._backward_to_all(begun, from_outputs, scaled, keep)
            found = [leaf.grad for leaf in begun.inputs]
            for leaf in begun.inputs:
                leaf.grad = None
        else:  # torch.autograd.grad, or backward(inputs=...)
            found = torch.autograd.grad(from_outputs, begun.inputs, scaled, retain_graph=keep, allow_unused=True)
        if not keep:
            begun.outputs.clear()
        return [gradient if gradient is None else _divided(gradient, scale) for gradient in found]

    def _backward_to_all(
        self, begun: Pass, outputs: list[torch.Tensor], gradients: list[torch.Tensor], keep: bool
    ) -> None:
        self.begin()
        self._expect_exchange(begun)
        torch.autograd.backward(outputs, gradients, retain_graph=keep)
        if begun.exchanging and self.parallel is not None:
            # torch does it in the next forward pass. Another backward pass may come before that; and `_end` notes the
            # gradients, which are replaced.
            self.parallel.reducer._rebuild_buckets()
        self._end()
        if begun.exchanging and self.parallel is not None:
            self._versions = [p.grad if p.grad is None else p.grad._version for p in self._averaged]
            Variable._execution_engine.queue_callback(self._average_changed)

    @torch.no_grad()
    def _average_changed(self) -> None:
        """At the end of the user's backward pass, average gradients that have changed since the model's pass.

        The mean of the averaged gradients and of each rank's additions to them is the mean of everything.
        """
        assert self.parallel is not None
        group, pairs = self.parallel.process_group, zip(self._averaged, self._versions, strict=False)
        for gradient in [p.grad for p, version in pairs if p.grad is not None and p.grad._version != version]:
            dist.all_reduce(gradient.div_(group.size()), group=group)
        self._versions = []  # one callback serves several calls of the model

    def _expect_exchange(self, begun: Pass) -> None:
        """Prepare the exchange, as DistributedDataParallel does at the end of its forward."""
        if begun.exchanging and self.parallel is not None:
            looked_at = begun.outputs if self.parallel.find_unused_parameters else []
            self.parallel.reducer.prepare_for_backward(list(looked_at))


class _Boundary(Function):
    """The model's outputs, detached from the graph that computes them. `inputs`: the model's that need gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, owner: ScaledBackward, begun: Pass, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.owner, ctx.begun = owner, begun
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in begun.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if not ctx.begun.outputs:
            raise ModelError(
                "amp in float16: backward a second time through the outputs of one call of the model. Give the first "
                "one retain_graph=True."
            )
        return (None, None, None, *ctx.owner.backward(ctx.begun, gradients))


def _needing_gradients(tree: Any) -> list[torch.Tensor]:
    """The tensors that need gradients, each once."""
    return list({id(tensor): tensor for tensor in tensors(tree) if tensor.requires_grad}.values())


def _divided(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    return (gradient.float() / scale).to(gradient.dtype)
