"""A module run in slices of its batch, so that backward has the activations of one slice at a time.

Recomputation of a block restores all its activations for the whole batch: in large batches these take most of the
memory, not the kept inputs. With slices the block's inputs stay whole, and its activations are those of a few samples.
Samples must not depend on each other inside the module: batch norms are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchfleet.base.errors import ModelError

_WAY_OUT = "Set recompute_configs['slices']=1, or leave the module out of 'checkpoints'."


def check_sliceable(module: torch.nn.Module) -> None:
    """Refuse batch norms, which compute with all samples together."""
    norm = next((inside for inside in module.modules() if isinstance(inside, _BatchNorm)), None)
    if norm is not None:
        raise ModelError(
            f"recompute_configs['slices'] runs a module with some samples of the batch at a time, and a "
            f"{type(norm).__name__} in {type(module).__name__} needs them all. {_WAY_OUT}"
        )


def in_slices(call: Callable[..., Any], num: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `call` returns for the whole batch, joined from `num` calls, or fewer if there are fewer samples.

    Tensors with the first tensor's first size are split along it; scalars and tensors of size 1 are passed whole.
    """
    leaves, structure = tree_flatten((args, kwargs))
    pieces = [_cut(leaf, _batch_size(leaves), num) for leaf in leaves]
    num_calls = max((len(piece) for piece in pieces if piece is not None), default=1)
    found = []
    with _casts_of_their_own():
        for number in range(num_calls):
            own = [leaf if piece is None else piece[number] for leaf, piece in zip(leaves, pieces, strict=True)]
            own_args, own_kwargs = tree_unflatten(own, structure)
            found.append(call(*own_args, **own_kwargs))
            _check_output(found[-1], own, pieces)
    outputs, form = tree_flatten(found[0])
    of_slices = [tree_flatten(output)[0] for output in found]
    whole = [_joined([output[i] for output in of_slices]) for i in range(len(outputs))]
    return tree_unflatten(whole, form)


def _batch_size(leaves: Sequence[Any]) -> int:
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)


def _cut(leaf: Any, size: int, num: int) -> Sequence[torch.Tensor] | None:
    """The slices of an argument; None: every call gets it as it is."""
    if not isinstance(leaf, torch.Tensor) or not leaf.dim() or (leaf.shape[0] == 1 and size > 1):
        return None
    if leaf.shape[0] != size:
        raise ModelError(
            f"recompute_configs['slices'] cuts the inputs of a module along their first dimension, which must be the "
            f"batch: expected {size}, as the first of them has, found a tensor of shape {tuple(leaf.shape)}. {_WAY_OUT}"
        )
    return leaf.chunk(num)


def _check_output(output: Any, own: Sequence[Any], pieces: Sequence[Any]) -> None:
    size = next((len(leaf) for leaf, piece in zip(own, pieces, strict=True) if piece is not None), None)
    for leaf in tree_flatten(output)[0]:
        if size is not None and isinstance(leaf, torch.Tensor) and (not leaf.dim() or len(leaf) != size):
            raise ModelError(
                f"recompute_configs['slices'] puts the outputs of a module together along their first dimension, which "
                f"must be the batch: expected {size}, found a tensor of shape {tuple(leaf.shape)}. {_WAY_OUT}"
            )


def _joined(outputs: Sequence[Any]) -> Any:
    return torch.cat(list(outputs)) if isinstance(outputs[0], torch.Tensor) else outputs[0]


@contextlib.contextmanager
def _casts_of_their_own() -> Iterator[None]:
    """Let every slice cast the weights under amp: with one shared cast, gradients would be summed in half precision."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
