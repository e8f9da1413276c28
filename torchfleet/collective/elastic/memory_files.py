"""Files in the memory of the launcher, which outlive a killed rank. Each holds one copy of a rank's state.

    bytes 0 … 31            magic, step, bytes of tensors, bytes of the description
    bytes 4096 …            tensors, then the description

The first 32 bytes are written last: a file whose writer was killed has no copy. A rank has two files for its own copies
and two for those of its neighbour, so that one of each pair is complete at any time.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

import torch

VARIABLE = "FLEET_MEMORY_FILES"  # paths of a rank's files: own, own, kept, kept
NUM_FILES = 4
_HEAD = struct.Struct("<8sqQQ")
_MAGIC = b"rankcopy"
_START = 4096  # of the tensors: a page


class MemoryFile:
    """One file. It has a copy after `complete`, and none from `begin` on."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115  (for the life of the process)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        """Forget the copy that the file has."""
        os.pwrite(self._file.fileno(), bytes(_HEAD.size), 0)

    def grow(self, num_bytes: int) -> torch.Tensor:
        """Memory of `num_bytes` bytes, shared with the file. The file then has no copy."""
        self.begin()
        self._memory = self._mapped(num_bytes)
        return self._memory

    def complete(self, step: int, num_bytes: int, description: bytes) -> None:
        """Make the tensors, which are in the first `num_bytes` bytes of the memory, the copy of `step`."""
        os.pwrite(self._file.fileno(), description, _START + num_bytes)
        self.set_head(_HEAD.pack(_MAGIC, step, num_bytes, len(description)))

    @property
    def step(self) -> int:
        """The step after which the copy was made; -1 if the file has no copy."""
        head = self._read_head()
        return -1 if head is None else head.step

    def description(self) -> bytes:
        head = self._copied()
        return os.pread(self._file.fileno(), head.description, _START + head.tensors)

    def tensors(self) -> torch.Tensor:
        """The bytes of the tensors, shared with the file."""
        return self._mapped(self._copied().tensors)

    # A copy is sent to another rank as its head, followed by its body

    def head(self) -> bytes:
        self._copied()
        return os.pread(self._file.fileno(), _HEAD.size, 0)

    def set_head(self, head: bytes) -> None:
        os.pwrite(self._file.fileno(), head, 0)

    def body(self) -> torch.Tensor:
        head = self._copied()
        return self._mapped(head.tensors + head.description)

    def body_for(self, head: bytes) -> torch.Tensor:
        """Memory for the body of a copy with this head, which `set_head` completes."""
        _, _, tensors, description = _HEAD.unpack(head)
        return self.grow(tensors + description)

    def _mapped(self, num_bytes: int) -> torch.Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if os.fstat(self._file.fileno()).st_size < _START + num_bytes:
            os.ftruncate(self._file.fileno(), _START + num_bytes)
        return torch.frombuffer(mmap.mmap(self._file.fileno(), _START + num_bytes), dtype=torch.uint8, offset=_START)

    def _copied(self) -> _Head:
        head = self._read_head()
        assert head is not None, "the file has no copy"
        return head

    def _read_head(self) -> _Head | None:
        data = os.pread(self._file.fileno(), _HEAD.size, 0)
        if len(data) < _HEAD.size:
            return None
        magic, *numbers = _HEAD.unpack(data)
        return _Head(*numbers) if magic == _MAGIC else None


HEAD_BYTES = _HEAD.size


class _Head(NamedTuple):
    step: int
    tensors: int  # bytes
    description: int  # bytes


class MemoryFiles(NamedTuple):
    """The files of a rank."""

    own: list[MemoryFile]
    kept: list[MemoryFile]  # copies of a neighbour on another machine

    @classmethod
    def of_launcher(cls) -> MemoryFiles | None:
        """The files that the launcher keeps for this rank; None if it replaces no ranks."""
        if VARIABLE not in os.environ:
            return None
        files = [MemoryFile(path) for path in os.environ[VARIABLE].split(":")]
        assert len(files) == NUM_FILES
        return cls(files[:2], files[2:])
