"""The manifest of a saved collective model: every tensor, its pieces, and the files they are in. No torch.

A piece is a box of a whole tensor (offset and shape): the part that one rank wrote.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import msgspec

from torchfleet.base.errors import CheckpointError
from torchfleet.base.prepared_types import prepared
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import remove_all_but
from torchfleet.ps.checkpoint.manifest import folder_of, next_save
from torchfleet.ps.checkpoint.manifest_file import FILE, has_manifest, read_body, write_body
from torchfleet.ps.checkpoint.part_file import ITEM_BYTES

FORMAT = "torchfleet collective checkpoint"
VERSION = 1

_FOLDER = re.compile(r"save-[0-9]{1,18}")
_TABLES = re.compile(r"tables-([0-9]{6,18})")
_FILE = re.compile(r"rank-([0-9]{5,7})-of-([0-9]{5,7})\.safetensors")

# model      a parameter or persistent buffer, by its name
# master     the copy in higher precision that the optimizer has of a parameter
# optimizer  a state of a parameter, as "parameter.key"
# part       a tensor of a strategy that is equal on all ranks, as "field.key"
# rank       a tensor of a strategy that differs from rank to rank, stacked along a first dimension
Kind = Literal["model", "master", "optimizer", "part", "rank"]


class SavedPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor: `bytes` bytes of a file, from byte `start` on."""

    file: str
    offset: list[int]  # of its first element in the whole tensor
    shape: list[int]
    start: int
    bytes: int
    crc32: int


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    kind: Kind
    dtype: str  # as safetensors names it
    shape: list[int]
    pieces: list[SavedPiece]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


class SavedGroup(msgspec.Struct, forbid_unknown_fields=True):
    """A param group: its options (learning rate, ...), and the names of its parameters."""

    options: dict[str, Any]
    parameters: list[str]


class CollectiveManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    save: str  # the folder with the files
    number: int
    num_ranks: int
    tensors: list[SavedTensor]
    optimizer: str  # its class; "": none was saved
    groups: list[SavedGroup]
    values: dict[str, dict[str, Any]]  # parameter → states that are not tensors
    tied: dict[str, str]  # other names of parameters → the name under which they are saved
    strategy: dict[str, Any]  # settings that differ from the default, for information
    extra: dict[str, Any]
    time: float = 0.0
    format: str = FORMAT
    version: int = VERSION
    features: list[dict[str, Any]] = []  # that belong to the model: data/model_features.py

    def of_kind(self, kind: Kind) -> dict[str, SavedTensor]:
        return {tensor.name: tensor for tensor in self.tensors if tensor.kind == kind}


class _Head(msgspec.Struct):
    format: str = ""
    features: list[dict[str, Any]] = []


def is_collective(dirname: str) -> bool:
    """Whether the folder holds a saved collective model. Raises CheckpointError if it holds no complete save."""
    return _head(read_body(Storage(dirname))).format == FORMAT


def features_of(dirname: str) -> list[dict[str, Any]]:
    """The features of the model in the folder, which ranks or servers have saved; none without a complete save."""
    storage = Storage(dirname)
    return _head(read_body(storage)).features if has_manifest(storage) else []


def write(storage: Storage, manifest: CollectiveManifest) -> None:
    """Write the manifest: the last step of a save, which makes the new model the current one."""
    write_body(storage, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read(storage: Storage) -> CollectiveManifest:
    """Raises CheckpointError if it finds no complete model, a model of parameter servers, or a damaged manifest."""
    body, place = read_body(storage), storage.place(FILE)
    found = _head(body)
    if found.format != FORMAT:
        raise CheckpointError(
            f"{place}: expected a {FORMAT}, found a {found.format or 'file without a format'}. A model of parameter "
            "servers is loaded by a job that has some."
        )
    try:
        manifest = msgspec.json.decode(body, type=prepared(CollectiveManifest))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{place} is not a manifest of this version: {error}") from None
    if manifest.version != VERSION:
        raise CheckpointError(f"{place}: expected {FORMAT} version {VERSION}, found version {manifest.version}")
    for wrong in _contradictions(manifest):
        raise CheckpointError(f"{place} is inconsistent: {wrong}. Load another save.")
    return manifest


def _contradictions(manifest: CollectiveManifest) -> Iterator[str]:
    """Yield each inconsistency of the manifest, which a valid checksum cannot rule out."""
    if not _FOLDER.fullmatch(manifest.save) or not 1 <= manifest.number < 10**18:
        yield f"expected a folder save-NUMBER, found {manifest.save!r:.100} and number {manifest.number}"
    if not 1 <= manifest.num_ranks < 10**6 or not 0 <= manifest.time < 1e12:
        yield f"expected ranks and a time, found num_ranks={manifest.num_ranks} and time={manifest.time}"
    names = {(tensor.kind, tensor.name) for tensor in manifest.tensors}
    if len(names) < len(manifest.tensors):
        yield "a tensor is in it twice"
    for tensor in manifest.tensors:
        yield from _wrong_pieces(tensor, manifest.num_ranks)
    for alias, first in manifest.tied.items():
        if ("model", first) not in names:
            yield f"'{alias:.200}' is another name of '{first:.200}', which is not in it"
    places = sorted(
        (piece.file, piece.start, piece.bytes) for tensor in manifest.tensors for piece in tensor.pieces if piece.bytes
    )
    for (file, start, size), (other, begin, _) in itertools.pairwise(places):
        if file == other and begin < start + size:
            yield f"two pieces overlap at byte {begin:,} of {file}"


def _wrong_pieces(tensor: SavedTensor, num_ranks: int) -> Iterator[str]:
    """Yield what is wrong with the pieces of a tensor: unknown file, outside of the tensor, overlapping, incomplete."""
    what = f"'{tensor.name:.200}'"
    item = ITEM_BYTES.get(tensor.dtype, 0)
    if not item or not _is_shape(tensor.shape):
        yield f"{what}: expected a type and a shape, found {tensor.dtype!r:.50} {tensor.shape!s:.100}"
        return
    for piece in tensor.pieces:
        rank = _FILE.fullmatch(piece.file)
        if rank is None or int(rank[1]) >= num_ranks or int(rank[2]) != num_ranks:
            yield f"{what}: expected the file of one of {num_ranks} ranks, found {piece.file!r:.200}"
        fits = len(piece.offset) == len(piece.shape) == len(tensor.shape) and _is_shape(piece.shape)
        boxes = zip(piece.offset, piece.shape, tensor.shape, strict=False)
        if not fits or not all(0 <= start <= start + length <= whole for start, length, whole in boxes):
            yield f"{what} of shape {tensor.shape}: a piece of {piece.shape!s:.100} at {piece.offset!s:.100} is outside"
        elif piece.bytes != (size := item * num_elements(piece.shape)) or not 0 <= piece.start < 1 << 60:
            yield (
                f"{what}: expected a piece of {piece.shape} {tensor.dtype} to take {size:,} bytes, found "
                f"{piece.bytes:,} bytes at offset {piece.start:,}"
            )
        elif not 0 <= piece.crc32 < 1 << 32:
            yield f"{what}: expected a CRC-32, found {piece.crc32}"
    total = sum(num_elements(piece.shape) for piece in tensor.pieces)
    if total != num_elements(tensor.shape) and (tensor.kind != "rank" or total > num_elements(tensor.shape)):
        yield f"{what}: its pieces have {total:,} of {num_elements(tensor.shape):,} elements"
    if _overlap(tensor.pieces):
        yield f"{what}: two of its pieces overlap, so other elements are missing"


def _is_shape(shape: Sequence[int]) -> bool:
    return len(shape) <= 64 and all(length >= 0 for length in shape) and num_elements(shape) < 1 << 56


def _overlap(pieces: Sequence[SavedPiece]) -> bool:
    """Whether two boxes share an element. They are sorted by their first dimension, so that few are compared."""
    boxes = sorted((p.offset, p.shape) for p in pieces if num_elements(p.shape) and len(p.offset) == len(p.shape))
    for i, (offset, shape) in enumerate(boxes):
        for other, lengths in boxes[i + 1 :]:
            if offset and other[0] >= offset[0] + shape[0]:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, shape, other, lengths, strict=False)):
                return True
    return False


def _head(body: bytes) -> _Head:
    with contextlib.suppress(msgspec.MsgspecError, RecursionError, ValueError):
        return msgspec.json.decode(body, type=prepared(_Head))
    return _Head()


def next_number(storage: Storage) -> int:
    """A number above those of all finished and unfinished saves in this folder."""
    with contextlib.suppress(CheckpointError):
        return max(next_save(storage), read(storage).number + 1)
    return next_save(storage)


def tables_of(number: int) -> str:
    """The folder, beside that of the save, with the tables on devices: a save in the format of servers."""
    return f"tables-{number:06}"


def remove_others(storage: Storage, number: int) -> None:
    """Remove the folders of earlier saves and of saves that were never completed, and their tables."""
    kept = folder_of(number)
    remove_all_but(storage, {kept})
    remove_tables(storage, {kept})


def remove_tables(storage: Storage, kept: Collection[str] = ()) -> None:
    """Remove the tables of saves that are gone. `kept`: folders of saves that count as there."""
    left = storage.folders()
    for name in left:
        tables = _TABLES.fullmatch(name)
        if tables is not None and f"save-{tables[1]}" not in {*kept, *left}:
            storage.remove_folder(name)


def num_elements(shape: Sequence[int]) -> int:
    return math.prod(shape)
