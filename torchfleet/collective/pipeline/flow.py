"""Carries out the order of a rank's actions for one batch: computes its stages, sends and receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchfleet.base.errors import ModelError
from torchfleet.collective.pipeline.micro_batches import MicroBatches
from torchfleet.collective.pipeline.orders import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    Action,
)
from torchfleet.collective.pipeline.shapes import Shape, Transfer, Wire, as_tuple, shape_of
from torchfleet.collective.pipeline.split_backward import SplitBackward

Call = Callable[[Sequence[torch.Tensor], Any], Any]


class Part(NamedTuple):
    """A stage of this rank, for batches of one shape."""

    call: Call  # computes the stage for one micro-batch
    incoming: Sequence[Shape]
    outgoing: Sequence[Shape]
    weights: Sequence[torch.nn.Parameter]


class Schedule:
    """What this rank does for batches of one shape."""

    def __init__(
        self, parts: Mapping[int, Part], actions: Sequence[Action], rank_of: Sequence[int], rank: int, wire: Wire
    ) -> None:
        """`parts`: the rank's stages by number; `actions`: its order, with receives (orders.py)."""
        self._parts, self._actions = parts, actions
        self._rank_of, self._rank, self._wire = rank_of, rank, wire
        self._last = len(rank_of) - 1
        ends = [place for place, action in enumerate(actions) if action.kind in (BACKWARD, BACKWARD_WEIGHT)]
        self._end = ends[-1] if ends else -1  # the action that completes the gradients
        self._clear()

    def _clear(self) -> None:
        self._sends: deque[Transfer] = deque()
        self._arriving: dict[Action, Transfer | list[torch.Tensor]] = {}  # or tensors from a stage of this rank
        self._kept: dict[tuple[int, int], tuple[Sequence[torch.Tensor], tuple[Any, ...]]] = {}  # for backward
        self._split: dict[tuple[int, int], SplitBackward] = {}  # between the two parts of a backward pass

    def run(self, batches: MicroBatches, before_last: Callable[[], object] = lambda: None) -> None:
        """Run all micro-batches. Ranks of the pipeline call it together.

        `before_last` is called before the last backward pass, which completes the gradients.
        """
        self._clear()  # of an aborted batch
        for place, action in enumerate(self._actions):
            if place == self._end:
                before_last()
            self._do(action, batches)
        while self._sends:
            self._sends.popleft().wait()

    def _do(self, action: Action, batches: MicroBatches) -> None:
        kind, stage, index = action
        if kind == FORWARD:
            self._forward(stage, index, batches)
        elif kind == RECEIVE_FORWARD:
            self._arriving[action] = self._wire.irecv(
                self._parts[stage].incoming, self._rank_of[stage - 1], _tag(action)
            )
        elif kind == RECEIVE_BACKWARD:
            shapes = _differentiable(self._parts[stage].outgoing)
            self._arriving[action] = self._wire.irecv(shapes, self._rank_of[stage + 1], _tag(action))
        elif kind == BACKWARD_WEIGHT:
            self._split.pop((stage, index)).finish()
        else:
            self._backward(stage, index, kind == BACKWARD_INPUT)

    def _forward(self, stage: int, index: int, batches: MicroBatches) -> None:
        received = self._take(Action(RECEIVE_FORWARD, stage, index)) if stage else []
        for tensor in received:
            tensor.requires_grad_(batches.has_loss and tensor.is_floating_point())
        outputs = self._parts[stage].call(received, batches.inputs_of(index))
        if stage == self._last:
            if batches.has_loss:
                self._kept[stage, index] = received, (batches.loss(outputs, index),)
            else:
                batches.outputs.append(outputs)
            return
        sent = as_tuple(outputs)
        self._check(stage, sent)
        if batches.has_loss:
            self._kept[stage, index] = received, sent
        self._give(Action(RECEIVE_FORWARD, stage + 1, index), sent)

    def _backward(self, stage: int, index: int, is_split: bool) -> None:
        received, outputs = self._kept.pop((stage, index))
        gradients: Sequence[torch.Tensor | None] = [None]
        if stage < self._last:
            gradients = self._take(Action(RECEIVE_BACKWARD, stage, index))
            outputs = tuple(output for output in outputs if output.is_floating_point())
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        needing, given = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        received = [tensor for tensor in received if tensor.is_floating_point()]
        if is_split:
            split = SplitBackward(needing, given, received, self._parts[stage].weights)
            self._split[stage, index], back = split, split.input_gradients
        else:
            if pairs:
                torch.autograd.backward(needing, given)
            back = [tensor.grad for tensor in received]
        if stage:
            found = [torch.zeros_like(t) if g is None else g for t, g in zip(received, back, strict=True)]
            self._give(Action(RECEIVE_BACKWARD, stage - 1, index), found)

    def _take(self, receive: Action) -> list[torch.Tensor]:
        arriving = self._arriving.pop(receive)
        return self._wire.arrived(arriving) if isinstance(arriving, Transfer) else arriving

    def _give(self, receive: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Hand tensors to another stage: on this rank, or by a message, which need not have arrived on return."""
        rank = self._rank_of[receive.stage]
        if rank == self._rank:
            self._arriving[receive] = [tensor.detach() for tensor in tensors]
            return
        self._sends.append(self._wire.isend(tensors, rank, _tag(receive)))
        if len(self._sends) > len(self._rank_of):  # as many as activations that 1F1B keeps
            self._sends.popleft().wait()

    def _check(self, stage: int, outputs: tuple[Any, ...]) -> None:
        found, outgoing = [shape_of(output) for output in outputs], list(self._parts[stage].outgoing)
        if found != outgoing:
            raise ModelError(
                f"pipeline: stage {stage} returned {[tuple(shape.sizes) for shape in outgoing]} for one micro-batch "
                f"and {[tuple(shape.sizes) for shape in found]} for another of the same shape"
            )


def _differentiable(shapes: Sequence[Shape]) -> list[Shape]:
    return [shape for shape in shapes if shape.dtype.is_floating_point]


def _tag(receive: Action) -> int:
    """The tag of the message for this receive, different from the tags of all other messages under way."""
    kind, stage, micro_batch = receive
    return (stage % 1023 * 4096 + micro_batch % 4096) * 2 + (kind == RECEIVE_BACKWARD)
