"""Cuts the arguments of a model along the sequence, and adds those that a part of a sequence needs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchfleet.base.errors import ModelError
from torchfleet.collective.sequence.parts import part
from torchfleet.collective.world import Axis

IGNORED = -100  # the label of tokens without a loss, in torch and transformers


class CutInputs(NamedTuple):
    """The arguments of a call for this rank's tokens."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    length: int  # tokens of a sequence on this rank
    has_labels: bool  # at least two arguments have a value for each token
    loss_factor: float  # the weight of this rank's loss in the mean over ranks


class SequenceInputs:
    """Cuts every tensor whose second dimension is as long as that of the first tensor that has one: the sequences."""

    def __init__(self, model: torch.nn.Module, axis: Axis, position_argument: str) -> None:
        self._signature = inspect.signature(model.forward)
        self._axis, self._positions = axis, position_argument
        loss = getattr(model, "loss_function", None)  # of a model of transformers
        self._shifts = getattr(loss, "__name__", "") == "ForCausalLMLoss"

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CutInputs:
        whole = next((leaf for leaf in tree_leaves((args, kwargs)) if _has_tokens(leaf)), None)
        if whole is None:
            raise ModelError("context_parallel: the model was called without a tensor of shape (batch, tokens, ...)")
        length = whole.shape[1]
        if length % (2 * self._axis.size):
            raise ModelError(
                f"context_parallel: sequences have {length} tokens, which {2 * self._axis.size}, twice the degree, "
                "does not divide: pad them, or cut the data to another length"
            )
        bound = self._signature.bind_partial(*args, **kwargs)
        named = {**bound.arguments, **kwargs}
        added = self._added(named, whole, length)
        labels = named.get("labels")
        factor = 1.0
        if isinstance(labels, torch.Tensor) and _has_tokens(labels, length):
            more, factor = self._of_labels(labels, named)
            added |= more

        def own(leaf: Any) -> Any:
            return part(leaf, self._axis) if _has_tokens(leaf, length) else leaf

        num_cut = sum(_has_tokens(leaf, length) for leaf in tree_leaves((args, kwargs)))
        has_mask = isinstance(named.get("attention_mask"), torch.Tensor)
        cut_args, cut_kwargs = tree_map(own, (args, dict(kwargs)))
        positional = list(self._signature.parameters)[: len(args)]
        more = {name: own(value) for name, value in added.items() if name not in positional}
        share = length // self._axis.size
        return CutInputs(cut_args, {**cut_kwargs, **more}, share, num_cut - has_mask > 1, factor)

    def _added(self, given: Mapping[str, Any], whole: torch.Tensor, length: int) -> dict[str, Any]:
        """Arguments to add that the model accepts, for whole sequences."""
        found: dict[str, Any] = {}
        if self._positions and given.get(self._positions) is None:
            found[self._positions] = torch.arange(length, device=whole.device).unsqueeze(0)
        if "attention_mask" in self._signature.parameters:
            mask = given.get("attention_mask")
            if mask is not None and not bool(mask.all()):
                raise ModelError(
                    "context_parallel: attention_mask hides some tokens, and attention to all tokens or causal "
                    "attention can be cut: join the texts of a batch to sequences without padding"
                )
            # Given as ones: without it, transformers would take the gap between two chunks for that between two texts.
            found["attention_mask"] = whole.new_ones(whole.shape[:2], dtype=torch.long) if mask is None else mask
        if "use_cache" in self._signature.parameters and given.get("use_cache") is None:
            found["use_cache"] = False  # keys of a part of the sequence are of no use to generate
        return found

    def _of_labels(self, labels: torch.Tensor, given: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """Arguments for the loss, and the factor of this rank's loss: tokens without a label do not count."""
        if self._shifts:
            shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            num = given.get("num_items_in_batch")
            num = (shifted != IGNORED).sum() if num is None else num
            return {"shift_labels": shifted, "num_items_in_batch": num / self._axis.size}, 1.0
        counts = [
            int((part(labels, self._axis._replace(rank=rank)) != IGNORED).sum()) for rank in range(self._axis.size)
        ]
        if not all(counts):
            raise ModelError(
                f"context_parallel: the parts of the sequences have {counts} labels, and each needs one: the model "
                "takes the mean over its own. Use longer sequences, or more of them."
            )
        return {}, counts[self._axis.rank] * self._axis.size / sum(counts)


def _has_tokens(leaf: Any, length: int | None = None) -> bool:
    is_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 1
    return is_batch and (length is None or leaf.shape[1] == length)
