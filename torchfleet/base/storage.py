"""A folder for saves, on this machine or on any fsspec file system."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import fsspec
import numpy as np
from fsspec.spec import AbstractBufferedFile

from torchfleet.base import removed_files
from torchfleet.base.direct_file import DirectFile
from torchfleet.base.errors import CheckpointError, FleetError

Buffer = Any  # bytes, or an array's memory

_MAX_WRITE = 1 << 24  # bytes per system call
_LARGE = 1 << 23  # bytes of a local file that is written past the page cache
# Stores that show an upload only when it is complete. They have no rename: fsspec's copies and deletes.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}


class Storage:
    """Reads and writes whole files. Names are relative to the folder. A file is complete or does not exist.

    Replacing a file is atomic on local file systems (rename) and object stores (one upload). On all other stores the
    old file is removed before the new one is renamed: a process that ends in between leaves neither.
    """

    def __init__(self, dirname: str) -> None:
        if not isinstance(dirname, (str, os.PathLike)) or not os.fspath(dirname):
            raise CheckpointError(f"expected the path of a folder, found {dirname!r}")
        self.path = os.fspath(dirname)
        for protocol in ("file://", "local://"):  # handled as plain local paths, whose files are replaced atomically
            self.path = self.path.removeprefix(protocol) if "::" not in self.path else self.path
        self.is_local = "://" not in self.path and "::" not in self.path
        if self.is_local:
            self.path = os.path.abspath(self.path)
        try:
            self._fs: Any = None if self.is_local else fsspec.core.url_to_fs(self.path)[0]
        except Exception as error:  # every file system raises its own
            raise CheckpointError(f"{self.path} cannot be opened: {type(error).__name__}: {error}") from error

    def write(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Write a file from these buffers. A local file is synced to disk before it is renamed."""
        self.write_made(name, buffers, sum(memoryview(buffer).nbytes for buffer in buffers))

    def write_made(self, name: str, buffers: Iterable[Buffer], num_bytes: int) -> None:
        """Write a file of `num_bytes` bytes from buffers that are made one at a time, just before each is written."""
        with self.writing(name, is_large=num_bytes >= _LARGE) as file:
            for buffer in buffers:
                view = memoryview(buffer)
                rest = view.cast("B") if view.nbytes else b""  # an empty block cannot be cast
                while len(rest):
                    rest = rest[file.write(rest[:_MAX_WRITE]) :]

    @contextlib.contextmanager
    def writing(self, name: str, is_large: bool = False) -> Iterator[Any]:
        """Open a new file for writing bytes. It appears when the block ends; if the block fails, it is removed.

        `is_large`: a local file is written past the page cache, and can only be appended to. Raises OSError if a local
        file cannot be written, and CheckpointError for a file elsewhere.
        """
        if self.is_local:
            if is_large:
                removed_files.wait_until_freed()
            with self._writing_here(self.place(name), DirectFile if is_large else _plain_file) as file:
                yield file
            return
        write_whole = self._uploading if self._is_object_store else self._renaming
        with self._telling(name, "written") as path, write_whole(path) as file:
            yield file

    @contextlib.contextmanager
    def _writing_here(self, place: str, make: Callable[[str], Any]) -> Iterator[Any]:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        try:
            with _new_file(f"{place}.tmp", make) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{place}.tmp", place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(f"{place}.tmp")
            raise
        self._sync_folder(os.path.dirname(place))

    @contextlib.contextmanager
    def _uploading(self, path: str) -> Iterator[Any]:
        file = self._fs.open(path, "wb")
        try:
            yield file
            file.close()
        except BaseException:
            # Closing the file here would upload the incomplete contents as if complete.
            if isinstance(file, AbstractBufferedFile) and not file.closed:
                file.closed = True
                with contextlib.suppress(Exception):  # clean up uploaded parts; the first error is the one to report
                    file.discard()
            raise

    @contextlib.contextmanager
    def _renaming(self, path: str) -> Iterator[Any]:
        unfinished = f"{path}.tmp"
        self._fs.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with self._fs.open(unfinished, "wb") as file:
                yield file
            if self._fs.exists(path):
                self._fs.rm_file(path)  # a rename on HDFS and others does not replace
            self._fs.mv(unfinished, path)
            if not self._fs.exists(path):  # HDFS reports no error for a failed rename
                raise OSError(f"{unfinished} could not be renamed to {path}")
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._fs.rm_file(unfinished)
            raise

    def read(self, name: str) -> bytes:
        """The current contents of a file. Raises CheckpointError if it is missing or cannot be read."""
        with self._reading(name):
            if not self.is_local:
                return self._read_there(name)
            with self._open_here(name) as file:
                return file.read()

    def read_buffer(self, name: str) -> memoryview:
        """As `read`, but into writable memory, over which torch can make tensors without a copy."""
        with self._reading(name):
            if not self.is_local:
                return memoryview(bytearray(self._read_there(name)))
            with self._open_here(name) as file:
                buffer, num = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data, 0
                while num < len(buffer) and (got := file.readinto(buffer[num:])):
                    num += got
                return buffer[:num]

    def _open_here(self, name: str) -> io.FileIO:
        file = open(self.place(name), "rb", buffering=0)  # noqa: SIM115  the caller closes it
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # read ahead the whole file
        return file

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise CheckpointError(f"{self.place(name)} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{self.place(name)} cannot be read: {error}") from error

    def _read_there(self, name: str) -> bytes:
        with self._telling(name, "read") as path:
            self._fs.invalidate_cache()  # sizes may have been listed before another process replaced the file
            return bytes(self._fs.cat_file(path))

    def exists(self, name: str) -> bool:
        if self.is_local:
            return os.path.exists(self.place(name))
        with self._telling(name, "looked for") as path:
            self._fs.invalidate_cache()
            return bool(self._fs.exists(path))

    def make_folder(self, name: str) -> bool:
        """Create a folder in this one; False if it exists. Remote stores have no folders: there, True means that
        nothing is listed under this name, and another process may get True as well.
        """
        if self.is_local:
            os.makedirs(self.path, exist_ok=True)
            try:
                os.mkdir(self.place(name))
            except FileExistsError:
                return False
            return True
        return name not in self.folders()

    def sizes(self, name: str) -> dict[str, int]:
        """The files of a subfolder with their sizes in bytes; empty if it does not exist."""
        if self.is_local:
            with contextlib.suppress(FileNotFoundError):
                names = os.listdir(self.place(name))
                return {file: os.path.getsize(self.place(f"{name}/{file}")) for file in names}
            return {}
        with contextlib.suppress(FileNotFoundError), self._telling(name, "listed") as path:
            self._fs.invalidate_cache()
            entries = self._fs.ls(path, detail=True)
            return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in entries}
        return {}

    def leads_outside(self, name: str) -> bool:
        """Whether a link on the path to a file leads to another folder."""
        if not self.is_local:
            return False
        folder = os.path.realpath(self.path)
        return os.path.commonpath([folder, os.path.realpath(os.path.join(self.path, name))]) != folder

    def check_own(self, name: str) -> None:
        """Raise CheckpointError if a link on the path to a file leads to another folder."""
        if self.leads_outside(name):
            raise CheckpointError(
                f"{self.place(name)} leads outside of {self.path}: a saved model has its files in its own folder. Copy "
                "the files that links lead to"
            )

    def folders(self) -> list[str]:
        """The names of the subfolders."""
        return self._names(is_folder=True)

    def files(self) -> list[str]:
        """The names of the files in the folder."""
        return self._names(is_folder=False)

    def _names(self, is_folder: bool) -> list[str]:
        if self.is_local:
            if not os.path.isdir(self.path):
                return []
            return [entry.name for entry in os.scandir(self.path) if entry.is_dir() == is_folder]
        with self._telling("", "listed"):
            self._fs.invalidate_cache()  # other processes also write there
            path = self._inner(self.path)
            entries = self._fs.ls(path, detail=True) if self._fs.exists(path) else []
        found = [entry["name"] for entry in entries if (entry["type"] == "directory") == is_folder]
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in found]

    def remove_folder(self, name: str) -> None:
        """Remove a subfolder. Does nothing if it does not exist."""
        if self.is_local:
            removed_files.remove_folder(self.place(name))
            return
        with contextlib.suppress(FileNotFoundError), self._telling(name, "removed") as path:
            self._fs.rm(path, recursive=True)

    def remove_file(self, name: str) -> None:
        """Remove a file. Does nothing if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            if self.is_local:
                os.remove(self.place(name))
                return
            with self._telling(name, "removed") as path:
                self._fs.rm_file(path)

    def place(self, name: str) -> str:
        """The path or URL of a file in the folder."""
        folder = self.path.rstrip("/")
        is_bare = not self.is_local and folder.endswith(":")  # memory://
        return f"{folder}//{name}" if is_bare else f"{folder}/{name}"

    @property
    def _is_object_store(self) -> bool:
        protocols = self._fs.protocol
        return not _OBJECT_STORES.isdisjoint([protocols] if isinstance(protocols, str) else protocols)

    @contextlib.contextmanager
    def _telling(self, name: str, what: str) -> Iterator[str]:
        """Yield the file system's own name of a file. Errors are reported with the file's path or URL."""
        try:
            yield self._inner(self.place(name))
        except FleetError:
            raise
        except Exception as error:  # every file system raises its own
            if isinstance(error, FileNotFoundError) and what != "written":
                raise
            raise CheckpointError(
                f"{self.place(name)} cannot be {what}: {type(error).__name__}: {error}. Is the place right, and may "
                "you use it?"
            ) from error

    def _inner(self, place: str) -> str:
        return str(self._fs._strip_protocol(place))

    @staticmethod
    def _sync_folder(path: str) -> None:
        """Sync a folder to disk, which makes a rename in it durable."""
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _plain_file(place: str) -> Any:
    return open(place, "xb")


def _new_file(place: str, make: Callable[[str], Any]) -> Any:
    """Create a new file by `make`. A link, or a file left by a killed process, is removed and not written to."""
    try:
        return make(place)
    except FileExistsError:
        os.remove(place)
        return make(place)


def split_place(path: str) -> tuple[str, str]:
    """The folder and the name of a file. `path` may be any path or URL that fsspec opens."""
    protocol, mark, rest = path.rpartition("://")
    folder, slash, name = rest.rpartition("/")
    if not name:
        raise CheckpointError(f"expected the path of a file, found {path!r}, which ends like a folder")
    return (f"{protocol}{mark}{folder or slash}" or "."), name
