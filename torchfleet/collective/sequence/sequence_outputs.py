"""Turns the outputs of a model for the tokens of one rank into outputs for the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchfleet.base.errors import ModelError
from torchfleet.collective.sequence.parts import WholeOutput
from torchfleet.collective.sequence.sequence_inputs import CutInputs
from torchfleet.collective.tensors.outputs import map_tensors, tensors
from torchfleet.collective.world import Axis


def joined(outputs: Any, cut: CutInputs, axis: Axis) -> Any:
    """The loss is that of all tokens; outputs of each token are gathered, unless the model has computed its loss for
    training: gradients then begin there, and other outputs stay those of this rank's tokens.
    """
    found = list(tensors(outputs))
    losses = [tensor for tensor in found if not tensor.dim() and tensor.is_floating_point()]
    of_tokens = [tensor for tensor in found if _is_of_tokens(tensor, cut.length)]
    if (losses and not cut.has_labels) or not (losses or of_tokens):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in found)
        raise ModelError(
            "context_parallel: the model must return its loss, the mean over tokens that have labels, or outputs of "
            f"shape (batch, {cut.length}, ...) for the tokens of a rank; found shapes {shapes} for inputs "
            f"{'with' if cut.has_labels else 'without'} labels of each token"
        )
    is_trained = bool(losses) and torch.is_grad_enabled()

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() and tensor.is_floating_point():
            return _whole_loss(tensor, cut.loss_factor, axis)
        if is_trained or not _is_of_tokens(tensor, cut.length):
            return tensor
        gathered: torch.Tensor = WholeOutput.apply(tensor, axis)  # type: ignore[no-untyped-call]
        return gathered

    return map_tensors(whole, outputs)


def _is_of_tokens(tensor: torch.Tensor, length: int) -> bool:
    return tensor.dim() > 2 and tensor.shape[1] == length


def _whole_loss(loss: torch.Tensor, factor: float, axis: Axis) -> torch.Tensor:
    """The mean of the ranks' losses, with the gradient of this rank's own: gradients are averaged later."""
    own = loss * factor
    mean = own.detach().clone()
    dist.all_reduce(mean, group=axis.group)
    return own + (mean / axis.size - own.detach())
