"""The folder that the writer of versions shares with their readers: its files, the current version, and kept versions.

current.json          the description of the current version, replaced in one step
version-000007.json   the descriptions of the versions that one can go back to
level-*, network-*    the files of these versions
model-*               the serving.json of these versions: features and graph
status                the writer's state and troubles, for metrics; of fixed size, so that a full disk can be reported
command.json          what a user asks for: to go back, or to go on
writer.lock           locked by the writer; readers.lock: locked by each reader

Files that no description names are removed at once. A reader that has mapped such a file can still read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from torchfleet.apps.serve.versions.level_file import Level
from torchfleet.apps.serve.versions.version_description import (
    CURRENT,
    DescribedModel,
    Description,
    Network,
    read_current,
)
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.checkpoint.manifest_parts import Parameter
from torchfleet.ps.tables.settings.spec import Floats

_DATA = re.compile(r"(level|network|model)-([0-9]{9})")
_VERSION = re.compile(r"version-([0-9]{6,18})\.json")
_STATUS, _COMMAND = "status", "command.json"
_STATUS_BYTES = 4096
MOST_KEPT = 2  # bytes of versions to go back to, as a multiple of the current version's
SMALL_MODEL = 64 << 20  # bytes; a smaller one counts as this large
_LONGEST = 600  # characters of a text in the status


class Status(msgspec.Struct):
    """The writer's state, and the troubles that it has met. Counts are since it began."""

    state: str = "starting"
    pid: int = 0
    source: str = ""  # where the newest version comes from
    trouble: str = ""  # what keeps newer versions from being taken over; "": nothing
    failed: str = ""  # why there is no version at all
    num_gaps: int = 0  # saves that could not be applied, so that the chain broke
    num_resyncs: int = 0  # times that all rows were read from the servers
    num_disk_full: int = 0
    pinned: int = 0  # the version that a user went back to; 0: the newest is current
    checked: float = 0.0  # when the writer last looked for changes


class Wanted(msgspec.Struct):
    """What a user asked for last."""

    pin: int = 0  # the version to go back to; 0: follow the newest


class VersionStore:
    """The writer's side. Belongs to one thread. Raises OSError if something cannot be written; the current version
    stays.
    """

    def __init__(self, folder: Path, keep: int = 8, spacing: float = 60.0) -> None:
        """`keep`: how many versions one can go back to, at least 1. `spacing`: least seconds between two of them,
        except between the last two versions.
        """
        self.folder, self._keep, self._spacing = folder, keep, spacing
        self.status = Status(pid=os.getpid())
        current = read_current(folder)
        self.current = current
        self._kept = [version for version in read_versions(folder) if self._has_files(version)]
        self._number = 0 if current is None else current.number
        self._remove_unnamed(_VERSION)

    def _has_files(self, version: Description) -> bool:
        return all((self.folder / file).exists() for file in version.files)

    def next_file(self) -> int:
        """A number above the numbers of all existing files."""
        found = (_DATA.fullmatch(name) for name in os.listdir(self.folder))
        return 1 + max((int(match[2]) for match in found if match), default=0)

    def write_network(self, number: int, parameters: Sequence[Parameter], values: Floats) -> Network:
        """Write the numbers of the network to a file of their own."""
        file = f"network-{number:09}"
        self._write(file, np.ascontiguousarray(values, np.float32).tobytes() or b"\0" * 4)
        return Network(file, len(values), list(parameters))

    def write_model(self, number: int, body: bytes) -> DescribedModel:
        """Write a serving.json to a file of its own."""
        file = f"model-{number:09}"
        self._write(file, body)
        return DescribedModel(file, hashlib.sha256(body).hexdigest())

    def publish(
        self,
        levels: Sequence[Level],
        tables: dict[str, int],
        network: Network,
        created: float,
        source: str,
        restored: int = 0,
        model: DescribedModel | None = None,
    ) -> Description:
        """Make this the current version, in one step."""
        made = Description(self._number + 1, created, source, tables, list(levels), network, restored, model)
        body = msgspec.json.encode(made)
        self._write(_name(made.number), body)
        self._write(CURRENT, body)
        self._number, self.current = made.number, made
        self._kept = self._bounded([*self._thinned(), made][-self._keep :])
        return made

    def kept(self, number: int) -> Description | None:
        """The version with this number, if one can go back to it."""
        return next((version for version in self._kept if version.number == number), None)

    @property
    def numbers(self) -> list[int]:
        return [version.number for version in self._kept]

    def remove_unused(self, in_use: set[str]) -> None:
        """Remove files that neither a kept version nor `in_use` names."""
        self._remove_unnamed(_VERSION)
        named = in_use.union(*(version.files for version in self._kept))
        for name in os.listdir(self.folder):
            if _DATA.fullmatch(name) and name not in named:
                self._remove(name)

    def write_status(self) -> None:
        """Overwrite the status in place. A failed write is ignored."""
        self.status.checked = time.time()
        for field in ("source", "trouble", "failed"):
            setattr(self.status, field, getattr(self.status, field)[:_LONGEST])
        body = msgspec.json.encode(self.status).ljust(_STATUS_BYTES)
        with contextlib.suppress(OSError):
            file = os.open(self.folder / _STATUS, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, body, 0)
            finally:
                os.close(file)

    def wanted(self) -> Wanted:
        """What a user asked for last."""
        return read_wanted(self.folder)

    def _thinned(self) -> list[Description]:
        """The kept versions: the last one, and older ones at least `spacing` apart."""
        kept: list[Description] = []
        for version in self._kept[:-1]:
            if not kept or version.created - kept[-1].created >= self._spacing:
                kept.append(version)
        return [*kept, *self._kept[-1:]]

    def _bounded(self, kept: list[Description]) -> list[Description]:
        """Drop the oldest versions while the files that only older versions need are larger than MOST_KEPT times the
        current version's files.
        """
        sizes = {file: os.path.getsize(self.folder / file) for version in kept for file in version.files}
        most = (1 + MOST_KEPT) * max(SMALL_MODEL, sum(sizes[file] for file in kept[-1].files))
        while len(kept) > 1 and sum(sizes[file] for file in set().union(*(each.files for each in kept))) > most:
            kept = kept[1:]
        return kept

    def _remove_unnamed(self, pattern: re.Pattern[str]) -> None:
        names = {_name(version.number) for version in self._kept}
        for name in os.listdir(self.folder):
            if pattern.fullmatch(name) and name not in names:
                self._remove(name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.folder / name)

    def _write(self, name: str, data: bytes) -> None:
        write_whole(self.folder / name, data)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step. An error leaves the old one."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read_status(folder: Path) -> Status:
    """The writer's status; a new Status if the writer has not written one yet."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / _STATUS).read_bytes(), type=prepared(Status))
    return Status()


def read_wanted(folder: Path) -> Wanted:
    """What a user asked for last."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / _COMMAND).read_bytes(), type=prepared(Wanted))
    return Wanted()


def write_wanted(folder: Path, wanted: Wanted) -> None:
    """Ask the writer for this."""
    write_whole(folder / _COMMAND, msgspec.json.encode(wanted))


def read_versions(folder: Path) -> list[Description]:
    """The versions that one can go back to, oldest first."""
    found = []
    for path in folder.glob("version-*.json"):
        if _VERSION.fullmatch(path.name):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                found.append(msgspec.json.decode(path.read_bytes(), type=prepared(Description)))
    return sorted(found, key=lambda version: version.number)


def _name(number: int) -> str:
    return f"version-{number:06}.json"
