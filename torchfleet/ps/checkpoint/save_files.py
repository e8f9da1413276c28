"""Files of a save beside the parts of its tables. They are in its folder before the commit, which is therefore theirs,
too: of a save that is refused, or killed, a reader sees none of them.

One of them is serving.json, what `fleet serve` needs to know of a model besides its tables and parameters
(api/serving/description.py): every save has its own. The one beside the manifest is a copy, for earlier releases, which
read no other. They wrote no other either, so it describes the saves that have none of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Manifest, read_manifest
from torchfleet.ps.checkpoint.part_writer import write_file

SERVING = "serving.json"
SERVING_FORMAT, SERVING_VERSION = "torchfleet serving", 2
_TRIES = 20


class SaveFiles(Protocol):
    """Adds files to a save."""

    def write(self, storage: Storage, folder: str, token: int) -> Mapping[str, int]:
        """Write files into `folder` of the save `token`, which is not committed yet. Returns their sizes in bytes, by
        name in that folder. An error drops the whole save.
        """


class GivenFiles:
    """SaveFiles with known contents, by name."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def write(self, storage: Storage, folder: str, token: int) -> Mapping[str, int]:
        for name, data in self._contents.items():
            write_file(storage, f"{folder}/{name}", [data])
        return {name: len(data) for name, data in self._contents.items()}


class NotDescribed(msgspec.Struct):
    """The serving.json of a save that cannot be served, and why."""

    missing: str = ""
    format: str = SERVING_FORMAT
    version: int = SERVING_VERSION


def undescribed(reason: str) -> bytes:
    """The serving.json of a save that has no description."""
    return msgspec.json.encode(NotDescribed(reason))


def serving_of(storage: Storage, folder: str) -> bytes | None:
    """The serving.json of the newest save, which is in `folder`; None if it was never written. Raises CheckpointError
    for one that cannot be read, or is a link out of the folder.
    """
    for name in (f"{folder}/{SERVING}", SERVING):
        if storage.exists(name):
            storage.check_own(name)
            return storage.read(name)
    return None


def read_model(storage: Storage) -> tuple[Manifest, bytes | None]:
    """The manifest and the serving.json of one save, also if another one is committed meanwhile.

    Raises CheckpointError as read_manifest does, and if one save after the other is committed meanwhile.
    """
    manifest = read_manifest(storage)
    for _ in range(_TRIES):
        found, failed = None, None
        try:
            found = serving_of(storage, manifest.save)
        except CheckpointError as error:  # perhaps the save was replaced, and its folder removed
            failed = error
        now = read_manifest(storage)
        if now == manifest and failed is None:
            return manifest, found
        if now == manifest and failed is not None:
            raise failed
        manifest = now
    raise CheckpointError(f"{storage.path} was saved to {_TRIES} times while it was read: read it again")


def copy_beside_manifest(storage: Storage, described: bytes | None) -> None:
    """Make serving.json beside the manifest a copy of the newest save's. None: that save has none, and no other one may
    pass for it.
    """
    if described is None:
        storage.remove_file(SERVING)
    elif not (storage.is_local and storage.exists(SERVING) and storage.read(SERVING) == described):
        write_file(storage, SERVING, [described])
