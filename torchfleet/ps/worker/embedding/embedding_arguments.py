"""The arguments of a call of an embedding: ids in their forms, and weights of samples."""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.base.errors import ModelError, WrongIds
from torchfleet.ps.worker.batch.string_ids import with_hashed

Ids = Any  # a tensor or strings, a slot (values, offsets), or a list of slots


def hashed_ids(table: str | None, num_embeddings: int | None, ids: Ids) -> Ids:
    """The same ids, with strings replaced by tensors of their ids. Raises WrongIds for strings if it has a size."""
    found = with_hashed(ids)
    if found is not ids and num_embeddings is not None:
        raise WrongIds(
            f"table '{table}' has the ids from 0 up to {num_embeddings:,}, and was given strings, whose "
            f"ids are 64-bit hashes: leave num_embeddings out, or give fleet.hash_strings(strings, "
            f"size={num_embeddings})"
        )
    return found


def check_weights(path: str, pooling: str, weights: torch.Tensor | None, ids: torch.Tensor | None) -> None:
    """Raise ModelError unless there are no weights or, as in torch.nn.EmbeddingBag, the pooling is a sum with one float
    per id. `path`: of the embedding in its model. `ids`: the ids of its bags; None if the call gives no single list of
    ids.
    """
    if weights is None:
        return
    if pooling != "sum":
        raise ModelError(f"'{path}': per_sample_weights go with sums, found pooling '{pooling}'")
    if ids is None or weights.shape != ids.shape or not weights.is_floating_point():
        found = f"{tuple(weights.shape)} {weights.dtype}"
        bags = "bags" if ids is None else f"ids of shape {tuple(ids.shape)}"
        raise ModelError(f"'{path}': expected a float for each id of {bags} as per_sample_weights, found {found}")


def bag_arguments(
    path: str, ids: Ids, offsets: torch.Tensor | None, include_last_offset: bool
) -> tuple[Ids, torch.Tensor | None]:
    """(ids, offsets of the bags), checked as torch.nn.EmbeddingBag does. Offsets are None for two-dimensional ids.
    Slots, which have their own offsets, are returned as they are, with `offsets`.
    """
    if not isinstance(ids, torch.Tensor):
        return ids, offsets
    if ids.dim() == 2:
        if offsets is not None:
            raise ModelError("EmbeddingBag: offsets go with one-dimensional ids; two-dimensional ids are bags already")
    elif offsets is None:
        raise ModelError("EmbeddingBag: one-dimensional ids need offsets")
    elif include_last_offset:
        if not len(offsets) or int(offsets[-1]) != len(ids):
            raise ModelError(
                f"'{path}': include_last_offset=True: the last offset must be the number of ids, {len(ids)}; "
                f"found {offsets.tolist()[-1:]}"
            )
        offsets = offsets[:-1]
    return ids, offsets
