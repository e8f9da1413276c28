"""fleet.util: reductions, gathers and barriers among workers, servers or all, file shards, printing on one worker.

`comm_world` says who takes part: "worker" (after fleet.init_worker), "server" (between fleet.init_server and
fleet.run_server), or "all" (both, under these conditions; workers come first in gathered results). All of them must
call the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api import process_role, training_passes
from torchfleet.base.errors import FleetError
from torchfleet.base.prepared_types import prepared

_WORLDS = ("worker", "server", "all")
_MODES = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def get_file_shard(files: Sequence[str]) -> list[str]:
    """This worker's files. Each file goes to exactly one worker; the numbers of files differ by at most one."""
    return training_passes.split_files(files)


def all_reduce(input: Any, mode: str = "sum", comm_world: str = "worker") -> Any:
    """The elementwise sum, maximum or minimum over `comm_world`. `input` is a number, an array or a tensor, and the
    result is of the same kind.
    """
    _check_world(comm_world)
    if mode not in _MODES:
        raise FleetError(f"all_reduce: mode must be one of {', '.join(_MODES)}, found {mode!r}")
    array = as_array(input)
    if array.dtype.kind not in "iufb":
        raise FleetError(f"all_reduce: expected numbers, found {array.dtype}")
    if mode == "sum" and array.dtype.kind == "b":
        raise FleetError("all_reduce: give numbers to sum up, not True and False: int(flag)")
    total = reduced("all_reduce", array, mode, comm_world)
    if isinstance(input, torch.Tensor):
        return torch.from_numpy(total).to(input.dtype)
    return total if isinstance(input, np.ndarray) else total.tolist()


def reduced(what: str, array: npt.NDArray[Any], mode: str, comm_world: str) -> npt.NDArray[Any]:
    """Combine the arrays of all processes in `comm_world`, in their order, so that the result is bitwise equal on all.
    Raises FleetError if they differ in mode, type or shape. `what`: the name of the call, in its messages.
    """
    own = msgspec.msgpack.encode([mode, array.dtype.str, list(array.shape), array.tobytes()])
    brought = process_role.gather(what, own, comm_world)
    parts = [msgspec.msgpack.decode(part, type=tuple[str, str, list[int], bytes]) for part in brought]
    if any(part[:3] != parts[0][:3] for part in parts):
        found = [part[:3] for part in parts]
        raise FleetError(f"{what}: all processes must pass the same mode, dtype and shape; found {found}")
    total = np.frombuffer(parts[0][3], array.dtype)
    for part in parts[1:]:
        total = _MODES[mode](total, np.frombuffer(part[3], array.dtype))
    return np.array(total.reshape(array.shape))


def all_gather(input: Any, comm_world: str = "worker") -> list[Any]:
    """The inputs of all processes in `comm_world`, in their order: numbers, text, lists and dicts of them, or arrays
    and tensors of numbers, whose types and shapes may differ. Tensors arrive on the CPU.
    """
    _check_world(comm_world)
    try:
        if isinstance(input, (torch.Tensor, np.ndarray)):
            sent = _Gathered(array=_sent_array(input))
        else:
            _check_plain(input)
            sent = _Gathered(plain=input)
        own = msgspec.msgpack.encode(sent)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise FleetError(
            f"all_gather: numbers, text, lists and dicts can be sent, and arrays and tensors of numbers; {error}"
        ) from None
    return [_received(part) for part in process_role.gather("all_gather", own, comm_world)]


class _SentArray(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data: bytes
    tensor: str = ""  # the tensor's type; "": a numpy array


class _Gathered(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    plain: Any = None
    array: _SentArray | None = None


def _sent_array(value: torch.Tensor | npt.NDArray[Any]) -> _SentArray:
    array = as_array(value)
    if array.dtype.kind not in "iufb":
        raise TypeError(f"found {array.dtype}")
    tensor = str(value.dtype) if isinstance(value, torch.Tensor) else ""
    return _SentArray(array.dtype.str, list(array.shape), array.tobytes(), tensor)


def _received(part: bytes) -> Any:
    found = msgspec.msgpack.decode(part, type=prepared(_Gathered))
    if found.array is None:
        return found.plain
    array = np.frombuffer(found.array.data, np.dtype(found.array.dtype)).reshape(found.array.shape).copy()
    if not found.array.tensor:
        return array
    tensor = torch.from_numpy(array)
    return tensor.bfloat16() if found.array.tensor == str(torch.bfloat16) else tensor


def barrier(comm_world: str = "worker") -> None:
    """Wait for all other processes in `comm_world`."""
    _check_world(comm_world)
    if comm_world == "worker":
        process_role.barrier_worker()
    else:
        process_role.gather("barrier", b"", comm_world)


def print_on_rank(message: str, rank_id: int) -> None:
    """Print `message` on worker `rank_id` only."""
    if process_role.is_worker() and process_role.worker_index() == rank_id:
        print(message, flush=True)


def _check_world(comm_world: str) -> None:
    if comm_world not in _WORLDS:
        raise FleetError(f"comm_world must be one of {', '.join(map(repr, _WORLDS))}, found {comm_world!r}")


def as_array(value: Any) -> npt.NDArray[Any]:
    """Convert numbers, arrays and tensors of any kind to a numpy array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # numpy has no bfloat16
    return np.asarray(value)


def _check_plain(value: Any) -> None:
    """Raise TypeError for values that cannot be sent. Others arrive unchanged, but tuples arrive as lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key)
            _check_plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item)
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise TypeError(f"found {type(value).__name__}")
