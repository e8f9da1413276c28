"""A copy of the network for a worker that joins: parameters, buffers, and the optimizer's state, from another worker.

It travels through the servers as parcels (SEND, TAKE), of bytes and a MessagePack description of them. Any optimizer
whose state is tensors and numbers can be copied, also one whose state the servers cannot keep.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from torchfleet.base.errors import ModelError, WireError
from torchfleet.collective.collective_optimizer import CollectiveOptimizer
from torchfleet.collective.tensors.local_tensors import is_local
from torchfleet.ps.net.wire import MAX_FRAME, Array, pack, unpack
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.torch_states import counts_on_device

Bytes = npt.NDArray[np.uint8]

_PIECE = 1 << 22  # bytes of a parcel
_PAUSE = 0.005  # seconds between two polls
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class Entry(msgspec.Struct, array_like=True):
    """A tensor or a number. `key`: of the optimizer's state; "" for the parameter or buffer itself."""

    name: str
    key: str
    dtype: str = ""  # "": a number
    shape: list[int] = []
    number: float = 0.0


class CopyHead(msgspec.Struct):
    round: int  # the first round that the receiver takes part in
    workers: list[int]  # of that round
    num_steps: int
    num_bytes: int
    entries: list[Entry]


class NetworkCopy:
    """Reads and writes the network of one worker."""

    def __init__(self, model: torch.nn.Module, optimizer: CollectiveOptimizer) -> None:
        self._optimizer = optimizer
        own = {name: value for name, value in model.named_parameters() if not is_local(value)}
        self._parameters = own
        self._tensors: dict[str, torch.Tensor] = {**own, **dict(model.named_buffers())}

    def pieces(self, number: int, workers: list[int]) -> Iterator[list[Array]]:
        """The parcels of a copy: the head, then the bytes. `number`, `workers`: of the next round."""
        entries, blocks = [], []
        for name, key, value in self._values():
            if isinstance(value, torch.Tensor):
                entries.append(Entry(name, key, str(value.dtype), list(value.shape)))
                blocks.append(_bytes(value))
            else:
                entries.append(Entry(name, key, number=float(value)))
        data = _together(blocks)
        yield [pack(CopyHead(number, workers, self._optimizer.num_steps, len(data), entries))]
        for start in range(0, len(data), _PIECE):
            yield [Array(0, data[start : start + _PIECE])]

    def _values(self) -> Iterator[tuple[str, str, Any]]:
        for name, tensor in self._tensors.items():
            yield name, "", tensor.detach()
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for parameter, state in self._optimizer.inner.state.items():
            for key, value in state.items():
                if not isinstance(value, (torch.Tensor, int, float)):
                    raise ModelError(
                        f"a worker joins, and the optimizer's state '{key}' is a {type(value).__name__}: only tensors "
                        "and numbers can be sent to it. Use another optimizer, or a fixed number of workers."
                    )
                if id(parameter) in names:
                    yield names[id(parameter)], key, value

    def restore_pieces(self, pieces: list[Array]) -> None:
        """As `restore`, from all pieces in one message."""
        blocks = [piece.data.reshape(-1).view(np.uint8) for piece in pieces[1:]]
        self.restore(unpack(pieces[0], CopyHead, MAX_FRAME), _together(blocks))

    @torch.no_grad()
    def restore(self, head: CopyHead, data: Bytes) -> None:
        """Write a copy into the model and the optimizer. Raises WireError, and changes nothing, if it does not fit."""
        values, at = [], 0
        for entry in head.entries:
            value, at = self._read(entry, data, at)
            values.append((entry, value))
        state: dict[str, dict[str, Any]] = {}
        for entry, value in values:
            if entry.key:
                state.setdefault(entry.name, {})[entry.key] = value
            else:
                self._tensors[entry.name].copy_(value)
        inner, groups = self._optimizer.inner.state, self._groups()
        for name, parameter in self._parameters.items():
            inner.pop(parameter, None)
            if name in state:
                inner[parameter] = {
                    key: _placed(key, value, parameter, groups.get(parameter, {})) for key, value in state[name].items()
                }
        self._optimizer.num_steps = head.num_steps

    def _groups(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The param group of each parameter."""
        return {parameter: group for group in self._optimizer.inner.param_groups for parameter in group["params"]}

    def _read(self, entry: Entry, data: Bytes, at: int) -> tuple[Any, int]:
        own = self._tensors.get(entry.name)
        if own is None or (entry.key and entry.name not in self._parameters):
            raise WireError(f"a copy of the network has '{entry.name}', and this worker's model has not")
        if not entry.dtype:
            return entry.number, at
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None or any(size < 0 for size in entry.shape):
            raise WireError(f"a copy of the network has '{entry.name}' as {entry.dtype!r} of shape {entry.shape}")
        if not entry.key and (dtype, entry.shape) != (own.dtype, list(own.shape)):
            raise WireError(
                f"a copy of the network has '{entry.name}' of shape {entry.shape}, this worker {list(own.shape)}: all "
                "workers must run the same model"
            )
        end = at + int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
        if end > len(data):
            raise WireError(f"a copy of the network ends within '{entry.name}'")
        block = torch.from_numpy(data[at:end].copy()) if end > at else torch.empty(0, dtype=torch.uint8)
        return block.view(dtype).reshape(entry.shape), end


def send_copy(client: Client, to: int, topic: str, pieces: Iterator[list[Array]], seconds: float) -> bool:
    """Send a copy to a worker. Returns False if the servers have no room for `seconds`: the worker does not take it."""
    for number, piece in enumerate(pieces, start=1):
        deadline = time.monotonic() + seconds
        while not client.send(topic, to, number, piece):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
    return True


def receive_copy(client: Client, worker: int, topic: str, seconds: float) -> tuple[CopyHead, Bytes] | None:
    """The copy that another worker sends; None if it has not come within `seconds`."""
    head: CopyHead | None = None
    blocks: list[Bytes] = []
    received = num_bytes = 0
    deadline = time.monotonic() + seconds
    while head is None or num_bytes < head.num_bytes:
        parcels = client.take(topic, worker, received)
        for number, arrays in parcels:
            received = number
            if head is None:
                head = unpack(Array(0, arrays[0]), CopyHead, MAX_FRAME)
            else:
                blocks.append(arrays[0].reshape(-1).view(np.uint8))
                num_bytes += blocks[-1].nbytes
        if not parcels:
            if time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE)
    client.take(topic, worker, received)  # acknowledges the last parcel, so that the servers drop it
    return head, _together(blocks)


def _together(blocks: list[Bytes]) -> Bytes:
    return np.concatenate(blocks) if blocks else np.empty(0, np.uint8)


def _bytes(value: torch.Tensor) -> Bytes:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _placed(key: str, value: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """State where torch expects it: on the parameter's device, but most counts of steps in host memory."""
    if not isinstance(value, torch.Tensor) or (key == "step" and not counts_on_device(group)):
        return value
    return value.to(parameter.device)
