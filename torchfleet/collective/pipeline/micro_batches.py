"""Splits a batch into the micro-batches of a pipeline, and joins their losses or outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.collective.strategy import CallArguments, LossFn


class MicroBatches:
    """`num` micro-batches of equal size, on the device; collects their losses or outputs.

    `inputs`: a tensor, a tuple or list of arguments, a dict of keyword arguments, or CallArguments.
    """

    def __init__(self, inputs: Any, target: Any, num: int, loss_fn: LossFn | None, device: torch.device) -> None:
        self.num, self._loss_fn, self._device = num, loss_fn, device
        self.inputs = [_arguments(micro_batch) for micro_batch in cut_batch(inputs, num)]
        self._targets = cut_batch(target, num)
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []

    @property
    def has_loss(self) -> bool:
        return self._loss_fn is not None

    def inputs_of(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._here(self.inputs[index])  # type: ignore[no-any-return]

    def loss(self, outputs: Any, index: int) -> torch.Tensor:
        """The tensor to call backward on: the share that micro-batch `index` has in the mean loss of the batch."""
        assert self._loss_fn is not None
        loss = self._loss_fn(outputs, self._here(self._targets[index]))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ModelError(f"train_batch: loss_fn must return one number, the mean over samples; found {found}")
        self.losses.append(loss.detach().reshape(()))
        return loss.reshape(()) / self.num

    def joined(self) -> Any:
        """The outputs of all micro-batches, joined along the first dimension, in the model's structure of outputs."""
        flat = [tree_flatten(output)[0] for output in self.outputs]
        structure = tree_flatten(self.outputs[0])[1]
        return tree_unflatten([_join(leaves) for leaves in zip(*flat, strict=True)], structure)

    def _here(self, micro_batch: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), micro_batch)


def own_loss(output: Any, _: Any = None) -> torch.Tensor:
    """The loss that a model returns: its output, the first of its outputs, or the one with the name `loss`."""
    found = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(found, dict):
        found = found.get("loss")
    found = getattr(found, "loss", found)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        kind = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ModelError(
            f"under pipeline=True a model that is called must return its loss, one number; found {kind}. Compute the "
            "loss in its forward, or use model.train_batch(inputs, target, loss_fn) and model.eval_batch(inputs)."
        )
    return found


def _join(leaves: tuple[Any, ...]) -> Any:
    if not isinstance(leaves[0], torch.Tensor):
        return leaves[0]
    return torch.cat(leaves) if leaves[0].dim() else torch.stack(leaves)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, CallArguments):
        return inputs.args, inputs.kwargs
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def num_micro_batches(batch_size: int, accumulate_steps: int, micro_batch_size: int) -> int:
    """The number of micro-batches by pipeline_configs. Raises StrategyError if the batch cannot be split that way."""
    if not micro_batch_size:
        if batch_size % accumulate_steps:
            raise StrategyError(
                f"pipeline_configs['accumulate_steps']={accumulate_steps} does not divide the batch of {batch_size} "
                "samples into equal parts: change one of them (a loader's drop_last=True leaves the last batch out)"
            )
        return accumulate_steps
    num, rest = divmod(batch_size, micro_batch_size)
    if rest or not num:
        raise StrategyError(
            f"pipeline_configs['micro_batch_size']={micro_batch_size} does not divide the batch of {batch_size} "
            "samples: change one of them (a loader's drop_last=True leaves the last batch out)"
        )
    if accumulate_steps not in (1, num):
        raise StrategyError(
            f"pipeline_configs: micro_batch_size={micro_batch_size} and accumulate_steps={accumulate_steps} contradict "
            f"each other for a batch of {batch_size} samples, which has {num} micro-batches: give one of them"
        )
    return num


def batch_size_of(*trees: Any) -> int:
    """The first size of every tensor in the trees, which must be equal."""
    tensors = [
        leaf for tree in trees for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ModelError(
            "pipeline: all tensors of a batch must have its samples along their first dimension, found shapes "
            f"{shapes or '()'}"
        )
    return sizes.pop()


def cut_batch(tree: Any, num: int) -> list[Any]:
    """`num` micro-batches: every tensor is split along the first dimension; everything else is in all of them."""
    leaves, structure = tree_flatten(tree)
    chunks = [leaf.chunk(num) if isinstance(leaf, torch.Tensor) and leaf.dim() else [leaf] * num for leaf in leaves]
    return [tree_unflatten([of_leaf[index] for of_leaf in chunks], structure) for index in range(num)]


def signature(tree: Any) -> tuple[Any, ...]:
    """Equal for batches that can share a schedule: structure, shapes and dtypes."""
    leaves, structure = tree_flatten(tree)
    kinds = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return (str(structure), *kinds)
