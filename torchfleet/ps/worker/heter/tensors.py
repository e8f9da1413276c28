"""Tensors as arrays of a message: their bytes, with dtype and shape in the message's body."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from torchfleet.base.errors import ModelError, WireError
from torchfleet.ps.net.wire import MAX_FRAME, Array
from torchfleet.ps.worker.heter.messages import TensorSpec

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
}


def spec_of(tensor: torch.Tensor, what: str) -> TensorSpec:
    """Describe a tensor. Raises ModelError, which names `what`, for one that cannot be sent."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided:
        kind = dtype if tensor.layout == torch.strided else str(tensor.layout)
        raise ModelError(
            f"{what} is a tensor of {kind}, and between CPU workers and heter workers travel plain tensors of "
            f"{', '.join(DTYPES)}: convert it, or move the layer out of device_guard('gpu')"
        )
    if isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        raise ModelError(f"{what} has no shape yet: call the model once, or give the layer its sizes, before this")
    if tensor.nbytes > MAX_FRAME:
        raise ModelError(f"{what} has {tensor.nbytes:,} bytes, and a message takes tensors of at most {MAX_FRAME:,}")
    return TensorSpec(dtype, tuple(tensor.shape))


def to_array(tensor: torch.Tensor) -> Array:
    """The bytes of a tensor that `spec_of` accepts. They may be the tensor's own memory."""
    plain = tensor.detach().cpu().resolve_neg().contiguous()
    return Array(0, plain.reshape(-1).view(torch.uint8).numpy())


def from_array(spec: TensorSpec, array: Array, device: torch.device) -> torch.Tensor:
    """A new tensor with these bytes. Raises WireError if the bytes do not fit `spec`."""
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise WireError(f"expected a tensor of {', '.join(DTYPES)}; found {spec.dtype!r:.40}")
    num = math.prod(spec.shape)
    bound = math.prod(size for size in spec.shape if size)  # torch refuses strides that are too large
    if array.data.dtype != np.uint8 or array.data.nbytes != num * dtype.itemsize or bound > MAX_FRAME:
        raise WireError(
            f"expected {num:,} elements of {spec.dtype} in shape {spec.shape}; found {array.data.nbytes:,} bytes of "
            f"{array.data.dtype}"
        )
    made = torch.empty(num, dtype=dtype)
    data = array.data.reshape(-1)
    made.view(torch.uint8).numpy()[:] = data != 0 if dtype == torch.bool else data  # a bool of 2 is undefined
    return made.view(spec.shape).to(device)


def from_arrays(specs: Sequence[TensorSpec], arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """As `from_array`, for arrays that must be as many as `specs`."""
    if len(specs) != len(arrays):
        raise WireError(f"expected {len(specs)} arrays of tensors, found {len(arrays)}")
    return [from_array(spec, array, device) for spec, array in zip(specs, arrays, strict=True)]
