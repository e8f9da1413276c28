"""The manifest of a saved collective model: every tensor, its pieces, and the files they are in. No torch.

A piece is a box of a whole tensor (offset and shape): what one rank wrote of it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from torchfleet.checkpoint.manifest import next_save
from torchfleet.checkpoint.manifest_file import FILE, read_body, write_body
from torchfleet.errors import CheckpointError
from torchfleet.storage import Storage

FORMAT = "torchfleet collective checkpoint"
VERSION = 1
_FOLDER = re.compile(r"save-[0-9]{1,18}")  # other folders are not ours

# model      a parameter or persistent buffer, by its name
# master     the copy in higher precision that the optimizer has of a parameter
# optimizer  a state of a parameter, as "parameter.key"
# part       a tensor of a strategy that is equal on all ranks, as "field.key"
# rank       a tensor of a strategy that differs from rank to rank, stacked along a first dimension
Kind = Literal["model", "master", "optimizer", "part", "rank"]


class SavedPiece(msgspec.Struct, frozen=True):
    """A box of a tensor: bytes start … start + number of bytes of a file."""

    file: str
    offset: list[int]  # of its first element in the whole tensor
    shape: list[int]
    start: int
    bytes: int
    crc32: int


class SavedTensor(msgspec.Struct, frozen=True):
    name: str
    kind: Kind
    dtype: str  # as safetensors has it
    shape: list[int]
    pieces: list[SavedPiece]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


class SavedGroup(msgspec.Struct):
    """A param group: its options (learning rate, ...), and the names of its parameters."""

    options: dict[str, Any]
    parameters: list[str]


class CollectiveManifest(msgspec.Struct, frozen=True):
    save: str  # the folder with the files
    number: int
    num_ranks: int
    tensors: list[SavedTensor]
    optimizer: str  # its class; "": none was saved
    groups: list[SavedGroup]
    values: dict[str, dict[str, Any]]  # parameter → states that are no tensors
    tied: dict[str, str]  # other names of parameters → the name that they are saved by
    strategy: dict[str, Any]  # settings that were not the default, for the reader
    extra: dict[str, Any]
    time: float = 0.0
    format: str = FORMAT
    version: int = VERSION

    def of_kind(self, kind: Kind) -> dict[str, SavedTensor]:
        return {tensor.name: tensor for tensor in self.tensors if tensor.kind == kind}


class _Head(msgspec.Struct):
    format: str = ""


def is_collective(dirname: str) -> bool:
    """Whether what is saved there is a collective model. Raises CheckpointError if nothing whole is saved there."""
    return _head(read_body(Storage(dirname))).format == FORMAT


def write(storage: Storage, manifest: CollectiveManifest) -> None:
    """The last act of saving: from here on the new model is the model."""
    write_body(storage, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read(storage: Storage) -> CollectiveManifest:
    """Raises CheckpointError if there is no complete model, or one of parameter servers, or a damaged manifest."""
    body, place = read_body(storage), storage.place(FILE)
    found = _head(body)
    if found.format != FORMAT:
        raise CheckpointError(
            f"{place}: expected a {FORMAT}, found a {found.format or 'file without a format'}. A model of parameter "
            "servers is loaded by a job that has some."
        )
    try:
        manifest = msgspec.json.decode(body, type=CollectiveManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{place} is not a manifest of this version: {error}") from None
    if manifest.version != VERSION:
        raise CheckpointError(f"{place}: expected {FORMAT} version {VERSION}, found version {manifest.version}")
    return manifest


def _head(body: bytes) -> _Head:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(body, type=_Head)
    return _Head()


def next_number(storage: Storage) -> int:
    """Above those of all saves that are or were being made here."""
    with contextlib.suppress(CheckpointError):
        return max(next_save(storage), read(storage).number + 1)
    return next_save(storage)


def remove_others(storage: Storage, kept: str) -> None:
    """Folders of saves before, and of those that never came to an end."""
    for name in list(storage.folders()):
        if _FOLDER.fullmatch(name) and name != kept:
            storage.remove_folder(name)


def num_elements(shape: Sequence[int]) -> int:
    return math.prod(shape)
