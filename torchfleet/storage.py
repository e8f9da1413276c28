"""A folder for saves, on this machine or on any fsspec file system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec

from torchfleet.errors import CheckpointError

Buffer = Any  # bytes, or an array's memory

_MAX_WRITE = 1 << 24  # bytes of one system call


class Storage:
    """Reads and writes whole files. Names are relative to the folder. A local file is complete or does not exist."""

    def __init__(self, dirname: str) -> None:
        if not isinstance(dirname, (str, os.PathLike)) or not os.fspath(dirname):
            raise CheckpointError(f"expected the path of a folder, found {dirname!r}")
        self.path = os.fspath(dirname)
        for protocol in ("file://", "local://"):  # as plain local paths, whose files are replaced in one step
            self.path = self.path.removeprefix(protocol) if "::" not in self.path else self.path
        self.is_local = "://" not in self.path and "::" not in self.path
        if self.is_local:
            self.path = os.path.abspath(self.path)
        try:
            self._fs: Any = None if self.is_local else fsspec.core.url_to_fs(self.path)[0]
        except Exception as error:  # every file system has its own
            raise CheckpointError(f"{self.path} cannot be opened: {type(error).__name__}: {error}") from error

    def write(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Write a file from these buffers. A local file is on disk before it gets its name."""
        place = self.place(name)
        if not self.is_local:
            self._fs.makedirs(self._inner(os.path.dirname(place)), exist_ok=True)
            with self._fs.open(self._inner(place), "wb") as file:
                for buffer in buffers:
                    file.write(buffer)
            return
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(f"{place}.tmp", "wb", buffering=0) as raw:
            for buffer in buffers:
                view = memoryview(buffer)
                rest = view.cast("B") if view.nbytes else b""  # an empty block cannot be cast
                while len(rest):
                    rest = rest[raw.write(rest[:_MAX_WRITE]) :]
            os.fsync(raw.fileno())
        os.replace(f"{place}.tmp", place)
        self._sync_folder(os.path.dirname(place))

    def read(self, name: str) -> bytes:
        """The contents of a file. Raises CheckpointError if it is missing or cannot be read."""
        try:
            if self.is_local:
                with open(self.place(name), "rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # read ahead the whole file
                    return file.read()
            with self._fs.open(self._inner(self.place(name)), "rb") as file:
                return bytes(file.read())
        except FileNotFoundError:
            raise CheckpointError(f"{self.place(name)} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{self.place(name)} cannot be read: {error}") from error

    def exists(self, name: str) -> bool:
        if self.is_local:
            return os.path.exists(self.place(name))
        return bool(self._fs.exists(self._inner(self.place(name))))

    def folders(self) -> Iterator[str]:
        """The names of the folders in it."""
        if self.is_local:
            if os.path.isdir(self.path):
                yield from (entry.name for entry in os.scandir(self.path) if entry.is_dir())
        elif self._fs.exists(self._inner(self.path)):
            for entry in self._fs.ls(self._inner(self.path), detail=True):
                if entry["type"] == "directory":
                    yield entry["name"].rstrip("/").rsplit("/", 1)[-1]

    def remove_folder(self, name: str) -> None:
        if self.is_local:
            shutil.rmtree(self.place(name), ignore_errors=True)
        else:
            self._fs.rm(self._inner(self.place(name)), recursive=True)

    def place(self, name: str) -> str:
        """The path or URL of a file in the folder."""
        return f"{self.path.rstrip('/')}/{name}"

    def _inner(self, place: str) -> str:
        return str(self._fs._strip_protocol(place))

    @staticmethod
    def _sync_folder(path: str) -> None:
        """Force a rename to disk: it is there when its folder is."""
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
