"""Checks of what users give to tables on devices, and the errors that say what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from torchfleet.base.errors import TableError, WrongIds


class Sized(Protocol):
    """What an error tells about a table."""

    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


def checked_device(device: torch.device | str, table: str) -> torch.device:
    """The device with its index. Raises TableError if this process cannot use it."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise TableError(f"table '{table}': device={device!r} is no device: {error}") from None
    if found.type == "cpu":
        return found
    if found.type != "cuda":
        raise TableError(f"table '{table}': expected device='cuda' or 'cpu', found {device!r}")
    if not torch.cuda.is_available():
        why = (
            "torch was built without CUDA"
            if torch.version.cuda is None
            else "torch sees no GPU (is the driver new enough?)"
        )
        raise TableError(
            f"table '{table}' has device={device!r}, and {why}. Use device='cpu' to try the script without a GPU, or "
            "leave device out to have the rows on servers."
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise TableError(f"table '{table}' has device={device!r}; this machine has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def checked_keys(keys: torch.Tensor, table: str, device: torch.device) -> torch.Tensor:
    """Keys as a flat int64 tensor. Raises WrongIds for a tensor of another type or on another device."""
    if (
        not isinstance(keys, torch.Tensor)
        or keys.dtype.is_floating_point
        or keys.dtype.is_complex
        or keys.dtype == torch.bool
    ):
        found = keys.dtype if isinstance(keys, torch.Tensor) else type(keys).__name__
        raise WrongIds(f"table '{table}' expects ids as a tensor of integers, found {found}: use ids.long()")
    if keys.device != device:
        raise WrongIds(f"table '{table}' is on {device}, the ids are on {keys.device}: use ids.to('{device}')")
    return keys.reshape(-1).to(torch.int64).contiguous()


def check_gradients(table: str, grads: torch.Tensor, num: int, dim: int) -> None:
    """Raise TableError if these are not `num` gradients of rows."""
    if grads.shape != (num, dim):
        raise TableError(f"table '{table}': expected gradients of shape {(num, dim)}, found {tuple(grads.shape)}")


@contextlib.contextmanager
def naming(table: Sized, num_rows: int) -> Iterator[None]:
    """Turn an error for lack of device memory into one that names the table. What was trained stays as it is."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise full(table, num_rows, str(error).split(". ")[0]) from None


def full(table: Sized, num_rows: int, reason: str = "") -> TableError:
    held = f"{table.capacity:,} rows in {table.num_bytes / 1e9:.2f} GB" if hasattr(table, "memory") else "no rows yet"
    return TableError(
        f"table '{table.name}' is full: it has {held}, and needs {num_rows:,} more. {reason + '. ' if reason else ''}"
        "Its rows can still be saved. Limit it with shrink=fleet.Shrink(max_rows=...), which evicts the rows used "
        "least recently, shard it over more GPUs, or leave out device= to have the rows on servers."
    )
