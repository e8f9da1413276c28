"""safetensors files, written tensor by tensor and read piece by piece, each with a checksum. No torch.

The header of a file also stores the offset of each piece in the whole tensor, as torch.distributed.checkpoint does. Its
HuggingFaceStorageReader can read the folder of a save.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import CheckpointError
from torchfleet.base.prepared_types import prepared
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.collective_manifest import (
    CollectiveManifest,
    Kind,
    SavedPiece,
    SavedTensor,
    num_elements,
)
from torchfleet.ps.checkpoint.part_file import ITEM_BYTES, TensorEntry

_MAX_HEADER = 100_000_000  # bytes: the limit of safetensors

Bytes = npt.NDArray[np.uint8]


class Buffers:
    """The contents of a file: a header, then each tensor's bytes.

    A thread makes the bytes and the checksum of the next tensor while the current one is written: memory for two
    tensors is in use.
    """

    def __init__(self, header: bytes, makers: Sequence[Callable[[], Bytes]], show: Callable[[int], None]) -> None:
        self._header, self._makers, self._show = header, makers, show
        self.checksums: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        yield self._header
        with ThreadPoolExecutor(1, thread_name_prefix="save") as thread:
            ahead = [thread.submit(_made, maker) for maker in self._makers[:1]]
            for number in range(1, len(self._makers) + 1):
                data, checksum = ahead.pop().result()
                ahead += [thread.submit(_made, maker) for maker in self._makers[number : number + 1]]
                self.checksums.append(checksum)
                self._show(len(data))
                yield data.data


def _made(maker: Callable[[], Bytes]) -> tuple[Bytes, int]:
    data = maker()
    return data, zlib.crc32(data.data)


def file_key(kind: Kind, name: str) -> str:
    """The key of a tensor in a file; a tensor of the model has its name in the model."""
    return name if kind == "model" else f"{kind}.{name}"


def offsets_metadata(offsets: dict[str, list[int]]) -> dict[str, str]:
    """The offsets of pieces in their tensors, in the format of torch.distributed.checkpoint."""
    places = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": msgspec.json.encode(places).decode()}


class Reader:
    """Reads pieces of one save. An error names the file that is missing, truncated or corrupt."""

    def __init__(self, storage: Storage, manifest: CollectiveManifest) -> None:
        self._storage, self._folder = storage, manifest.save
        self._name = ""
        self._file: Any = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def check(self, tensors: Iterable[SavedTensor]) -> None:
        """Check that the files contain the pieces with the name, dtype and shape of the manifest.

        Raises CheckpointError, which names the file. Values are not read."""
        headers: dict[str, dict[str, TensorEntry]] = {}
        for tensor, piece in in_file_order(list(tensors)):
            place = self._storage.place(f"{self._folder}/{piece.file}")
            if piece.file not in headers:
                headers = {piece.file: self._header(piece.file, place)}
            found = headers[piece.file].get(file_key(tensor.kind, tensor.name))
            if found is None or (found.dtype, found.shape) != (tensor.dtype, piece.shape) or not _is_at(found, piece):
                there = "nothing" if found is None else f"{found.dtype} {found.shape} at {found.data_offsets}"
                raise CheckpointError(
                    f"{place}: expected '{tensor.name}' of {tensor.dtype} {piece.shape} at {piece.start:,}, found "
                    f"{there}"
                )

    def _header(self, name: str, place: str) -> dict[str, TensorEntry]:
        """The file's header, with offsets from the start of the file."""
        size = int.from_bytes(self._bytes(name, place, 0, 8), "little")
        if size > _MAX_HEADER:
            raise CheckpointError(f"{place}: expected a safetensors header, found one of {size:,} bytes")
        try:
            found = msgspec.json.decode(self._bytes(name, place, 8, size), type=dict[str, Any])
            found.pop("__metadata__", None)
            entries = msgspec.convert(found, prepared(dict[str, TensorEntry]))
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise CheckpointError(f"{place}: its safetensors header is damaged: {error}") from None
        shift = 8 + size
        return {
            key: msgspec.structs.replace(entry, data_offsets=tuple(shift + offset for offset in entry.data_offsets))
            for key, entry in entries.items()
        }

    def read(self, tensor: SavedTensor, piece: SavedPiece) -> bytearray:
        """The bytes of a piece, in a new buffer."""
        place = self._storage.place(f"{self._folder}/{piece.file}")
        data = self._bytes(piece.file, place, piece.start, piece.bytes)
        if len(data) != piece.bytes:
            raise CheckpointError(
                f"{place} is cut off: expected {piece.bytes:,} bytes of '{tensor.name}' at {piece.start:,}, found "
                f"{len(data):,}"
            )
        if zlib.crc32(data) != piece.crc32:
            raise CheckpointError(
                f"{place} is damaged: the checksum of '{tensor.name}' is not the one that was saved. Load another save."
            )
        return data

    def whole(self, tensor: SavedTensor) -> Bytes:
        """A whole tensor, assembled from its pieces."""
        if len(tensor.pieces) == 1 and tensor.pieces[0].shape == tensor.shape:
            return np.frombuffer(self.read(tensor, tensor.pieces[0]), np.uint8)
        item = np.dtype((np.void, ITEM_BYTES[tensor.dtype]))
        made = np.empty(tensor.shape, item)
        for piece in tensor.pieces:
            data = np.frombuffer(self.read(tensor, piece), item).reshape(piece.shape)
            made[box(piece.offset, piece.shape)] = data
        return made.reshape(-1).view(np.uint8)

    def _bytes(self, name: str, place: str, start: int, size: int) -> bytearray:
        """Read `size` bytes of a file, or fewer if the file ends."""
        try:
            file = self._open(name, place)
            file.seek(start)
            data = bytearray(size)
            view, at = memoryview(data), 0
            while at < len(data):
                num = file.readinto(view[at:])
                if not num:
                    return data[:at]
                at += num
            return data
        except FileNotFoundError:
            raise CheckpointError(f"{place} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{place} cannot be read: {error}") from error

    def _open(self, name: str, place: str) -> Any:
        self._storage.check_own(f"{self._folder}/{name}")
        if self._file is None or self._name != name:
            if self._file is not None:
                self._file.close()
            here = self._storage.is_local
            self._file = open(place, "rb", buffering=0) if here else fsspec.open(place, "rb").open()  # noqa: SIM115
            self._name = name
        return self._file


def _is_at(entry: TensorEntry, piece: SavedPiece) -> bool:
    return not num_elements(piece.shape) or entry.data_offsets == (piece.start, piece.start + piece.bytes)


def box(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The intersection of two boxes, as slices of each; None if it is empty."""
    own, others = [], []
    for start, length, other, other_length in zip(offset, shape, other_offset, other_shape, strict=True):
        first, last = max(start, other), min(start + length, other + other_length)
        if first >= last:
            return None
        own.append(slice(first - start, last - start))
        others.append(slice(first - other, last - other))
    return tuple(own), tuple(others)


def check_files(reader: Reader, manifest: CollectiveManifest, show: Callable[[str], None]) -> int:
    """Read every piece and verify its checksum; returns the number of pieces."""
    num = 0
    reader.check(manifest.tensors)
    for tensor, piece in in_file_order(manifest.tensors):
        reader.read(tensor, piece)
        num += 1
        show(f"{num:,} pieces read")
    return num


def in_file_order(tensors: Sequence[SavedTensor]) -> Iterator[tuple[SavedTensor, SavedPiece]]:
    every = [(tensor, piece) for tensor in tensors for piece in tensor.pieces]
    yield from sorted(every, key=lambda pair: (pair[1].file, pair[1].start))
