"""Packs requests, arrays and answers into plain numbers, bytes and lists, for copies of a server's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchfleet.base import errors
from torchfleet.base.errors import FleetError
from torchfleet.ps.net.request import Request
from torchfleet.ps.net.wire import Array, decode, encode

PackedArray = tuple[int, str, int, int, bytes]  # number, dtype, rows, columns, data
PackedRequest = tuple[bytes, float, int, list[bytes]]  # peer, time of arrival, role, frames
PackedAnswer = list[PackedArray] | tuple[str, str] | None  # arrays; kind and text of an error; None: no answer yet
_AWAY = b"away:"
_DTYPES = {"|u1", "<u8", "<f4", "<f8"}


def pack_arrays(arrays: Sequence[Array]) -> list[PackedArray]:
    blocks = [array.data if array.data.ndim == 2 else array.data.reshape(-1, 1) for array in arrays]
    return [
        (array.number, block.dtype.str, block.shape[0], block.shape[1], block.tobytes())
        for array, block in zip(arrays, blocks, strict=True)
    ]


def unpack_arrays(packed: Sequence[Sequence[Any]]) -> list[Array]:
    """The inverse of pack_arrays. Raises ValueError if `packed` is malformed."""
    arrays = []
    for number, dtype, num_rows, num_columns, data in packed:
        if dtype not in _DTYPES:
            raise ValueError(f"expected one of the dtypes {sorted(_DTYPES)}, found {dtype!r}")
        arrays.append(Array(int(number), np.frombuffer(data, np.dtype(dtype)).reshape(num_rows, num_columns)))
    return arrays


def peer_bytes(peer: object) -> bytes:
    """The peer as bytes; empty for a client inside the process, which ends with it."""
    return peer.removeprefix(_AWAY) if isinstance(peer, bytes) else b""


def pack_request(request: Request) -> PackedRequest:
    frames = [memoryview(frame).cast("B").tobytes() if len(frame) else b"" for frame in encode(request.message)]
    return peer_bytes(request.peer), request.arrived, request.role, frames


def unpack_request(packed: Sequence[Any]) -> Request:
    """The inverse of pack_request. Raises WireError or ValueError if `packed` is malformed."""
    peer, arrived, role, frames = packed
    return Request(decode(frames), away(bytes(peer)), float(arrived), int(role), frames=frames)


def away(peer: bytes) -> bytes:
    """Mark a peer of another server's socket. No peer of this server equals it: those begin with a zero byte."""
    return _AWAY + peer


def pack_answer(answer: Sequence[Array] | FleetError | None) -> PackedAnswer:
    if isinstance(answer, FleetError):
        return type(answer).__name__, str(answer)
    return None if answer is None else pack_arrays(answer)


def unpack_answer(packed: Any) -> list[Array] | FleetError | None:
    """The inverse of pack_answer. Raises ValueError if `packed` is malformed."""
    if packed is None:
        return None
    if len(packed) == 2 and isinstance(packed[0], str):
        return error_of(packed[0], packed[1])
    return unpack_arrays(packed)


def error_of(kind: str, text: str) -> FleetError:
    """An error by the name of its class; FleetError if torchfleet has no such class."""
    found = getattr(errors, kind, FleetError)
    return found(text) if isinstance(found, type) and issubclass(found, FleetError) else FleetError(text)
