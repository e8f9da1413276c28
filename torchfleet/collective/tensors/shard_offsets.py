"""Where in a whole tensor this rank's shard of it lies."""

from __future__ import annotations

from typing import Any

from torchfleet.base.errors import CheckpointError
from torchfleet.collective.tensors.local_tensors import local


def offset_of(tensor: Any) -> tuple[int, ...]:
    """The offset of this rank's shard of a DTensor along each dimension."""
    mesh, offset, shape = tensor.device_mesh, [0] * tensor.dim(), list(tensor.shape)
    cuts = [
        (placement, *place)
        for placement, *place in zip(tensor.placements, mesh.get_coordinate(), mesh.shape, strict=True)
    ]
    # The first dimension of the mesh cuts first; a strided placement cuts what later dimensions have left.
    strided = [cut for cut in cuts if hasattr(cut[0], "split_factor")]
    plain = [cut for cut in cuts if hasattr(cut[0], "dim") and not hasattr(cut[0], "split_factor")]
    for placement, index, count in [*plain, *reversed(strided)]:
        length = -(-shape[placement.dim] // count)  # as torch.chunk: equal lengths, the last ones shorter or empty
        start = min(index * length, shape[placement.dim])
        offset[placement.dim] += start
        shape[placement.dim] = min(length, shape[placement.dim] - start)
    mine = local(tensor)
    if tuple(shape) != tuple(mine.shape):
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} cut as {tensor.placements}: expected a piece of shape "
            f"{tuple(shape)}, found {tuple(mine.shape)}"
        )
    return tuple(offset)
