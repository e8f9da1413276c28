"""Write access to a folder of saves: one process at a time replaces its manifest, and each save has its own folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from types import TracebackType

import msgspec

from torchfleet.base.errors import CheckpointError
from torchfleet.base.prepared_types import prepared
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest_file import has_manifest, read_body

RESERVED = "reserved.json"  # in the folder of a save while it is being made
_SAVE = re.compile(r"save-[0-9]{1,18}")  # other folders are not touched
_COMPACTED = re.compile(r"save-[0-9]{12}")
_LEASE = 86_400.0  # seconds after which a save counts as abandoned on stores without locks
_MAX_BYTES = 1 << 10  # bytes of a reservation
_MAX_TRIES = 100


class _Mark(msgspec.Struct, frozen=True):
    """The contents of a reservation."""

    token: int


class _Chain(msgspec.Struct):
    """The folders that every manifest names."""

    save: str
    base: list[_Chain] = []


@contextlib.contextmanager
def alone(storage: Storage) -> Iterator[None]:
    """Hold the lock of a folder of saves; other processes block. Callers hold it from reading the manifest until they
    have removed the folders that the new manifest does not name.

    Only for folders on this machine: other stores have no locks. The lock is released when its process ends.
    """
    if not storage.is_local or not os.path.isdir(storage.path):
        yield
        return
    folder = os.open(storage.path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # network file systems may not lock folders
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


class Reservation:
    """The folder of one save, which belongs to that save from `reserve` to `release`.

    On this machine, a failed save leaves nothing in it, and a lock on its file shows that the process that makes the
    save is alive.
    """

    def __init__(self, storage: Storage, number: int, folder: str, token: int) -> None:
        self.number, self.folder = number, folder
        self._storage, self._file = storage, -1
        if not storage.is_local:
            storage.write(f"{folder}/{RESERVED}", [msgspec.json.encode(_Mark(token))])
            return
        place = storage.place(f"{folder}/{RESERVED}")
        self._file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with contextlib.suppress(OSError):  # without locks, the time of the file counts
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._file, msgspec.json.encode(_Mark(token)))

    def release(self) -> None:
        """Keep the folder: the save is committed."""
        self._storage.remove_file(f"{self.folder}/{RESERVED}")
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._storage.is_local:
            with contextlib.suppress(CheckpointError, OSError):  # the first error is the one to report
                kept = kept_folders(self._storage)
                if kept is not None and self.folder not in kept:
                    self._storage.remove_folder(self.folder)
        self._close()


def reserve(storage: Storage, first: int, token: int) -> Reservation:
    """Reserve the folder of a new save: save-NUMBER, with the first unused number from `first` on.

    On this machine no other process gets the same folder. The remains of failed saves are removed first, to free space.
    Raises CheckpointError if the folder cannot be created.
    """
    try:
        if storage.is_local:
            os.makedirs(storage.path, exist_ok=True)
        with alone(storage):
            if storage.is_local:
                remove_abandoned(storage)
            for number in range(first, first + _MAX_TRIES):
                folder = f"save-{number:06}"
                if storage.make_folder(folder):
                    return Reservation(storage, number, folder, token)
    except OSError as error:
        raise CheckpointError(f"cannot save to {storage.path}: {type(error).__name__}: {error}") from error
    last = first + _MAX_TRIES - 1
    raise CheckpointError(
        f"cannot save to {storage.path}: the folders save-{first:06} to save-{last:06} all exist already"
    )


def check_reserved(storage: Storage, folder: str, token: int, by_own_user: bool = False) -> None:
    """Raise CheckpointError unless this folder exists and is reserved for the save `token`.

    `by_own_user`: also require, on this machine, that this process's user created it.
    """
    found = reserved_for(storage, folder)
    is_own = not by_own_user or not storage.is_local or os.geteuid() in _owners(storage, folder)
    if found != token or not is_own:
        what = "is reserved for another save" if found is not None else f"has no {RESERVED} of this save"
        what = what if is_own or found != token else "belongs to another user than this server's"
        raise CheckpointError(
            f"{storage.place(folder)} {what}: worker 0 makes the folder of a save before it asks the servers. "
            f"Is {storage.path} the same place for worker 0 and for this server?"
        )


def reserved_for(storage: Storage, folder: str) -> int | None:
    """The token of the save that holds this folder; None if it is not reserved."""
    name = f"{folder}/{RESERVED}"
    try:
        data = _head(storage.place(name)) if storage.is_local else storage.read(name)
        return msgspec.json.decode(data, type=prepared(_Mark)).token
    except (CheckpointError, OSError, ValueError, msgspec.MsgspecError):
        return None


def _owners(storage: Storage, folder: str) -> set[int]:
    """The user that owns both a reserved folder and its reservation; empty if their owners differ."""
    places = storage.place(folder), storage.place(f"{folder}/{RESERVED}")
    owners = {os.lstat(place).st_uid for place in places if os.path.lexists(place)}
    return owners if len(owners) == 1 else set()


def _head(place: str) -> bytes:
    file = os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        return os.read(file, _MAX_BYTES)
    finally:
        os.close(file)


def remove_abandoned(storage: Storage) -> None:
    """Remove the folders of failed saves: not part of the model, and not held by a live process. Keeps compactions."""
    kept = kept_folders(storage)
    if kept is not None:
        remove_all_but(storage, kept | {name for name in storage.folders() if _COMPACTED.fullmatch(name)})


def remove_all_but(storage: Storage, kept: set[str]) -> None:
    """Remove folders of saves outside the chain and of unfinished saves, except those that another process of this
    machine is writing to.
    """
    for name in storage.folders():
        if _SAVE.fullmatch(name) and name not in kept and not is_held(storage, name):
            storage.remove_folder(name)


def is_held(storage: Storage, folder: str) -> bool:
    """Whether a process of this machine is making this save. False on other stores, where that cannot be known."""
    if not storage.is_local:
        return False
    place = storage.place(f"{folder}/{RESERVED}")
    try:
        file = os.open(place, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return time.time() - os.fstat(file).st_mtime < _LEASE
    finally:
        os.close(file)


def kept_folders(storage: Storage) -> set[str] | None:
    """The folders that the manifest names; None if the manifest exists but cannot be read."""
    if not has_manifest(storage):
        return set()
    try:
        newest = msgspec.json.decode(read_body(storage), type=prepared(_Chain))
    except (CheckpointError, msgspec.MsgspecError):
        return None
    return {newest.save, *(link.save for link in newest.base)}


def check_written(storage: Storage, folder: str, expected: Mapping[str, int]) -> None:
    """Raise CheckpointError, which names the file, unless all files of a save exist with their sizes."""
    found = storage.sizes(folder)
    for name, size in expected.items():
        place = storage.place(f"{folder}/{name}")
        if name not in found:
            raise CheckpointError(f"{place} is missing. Does another job save to the same folder?")
        if found[name] != size:
            raise CheckpointError(f"{place} is damaged: {found[name]:,} bytes, and {size:,} were saved")
