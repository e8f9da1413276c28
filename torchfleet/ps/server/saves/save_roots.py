"""Where a server writes saves. The folder arrives by message, so the server checks it and does not trust it.

A server that was started with roots writes only below them. A server without roots writes only to a folder of this
machine that the client has made for this save: the folder belongs to the server's own user and holds the token of the
save. A client that cannot write to a place as that user cannot make the server write there.

A server connects to a store only if a root names its scheme and its host: a message cannot make it talk to an address.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torchfleet.base.errors import CheckpointError, RoleError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import check_reserved, reserved_for

VARIABLE = "FLEET_SAVE_ROOTS"
# Stores that only keep bytes under names. fsspec knows others, which execute what they read.
STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "webhdfs"})
_MEMORY = "memory"  # of this process: not reached over a network
_LOCAL = ("file", "local")
_MAX_LENGTH = 4096


class SaveFolder:
    """The checked folder of one save. It accepts files as long as it is reserved for this save."""

    def __init__(self, storage: Storage, name: str, token: int, by_own_user: bool) -> None:
        self.storage = storage
        self._name, self._token, self._by_own_user = name, token, by_own_user
        self._is_reserved = reserved_for(storage, name) is not None

    def write(self, name: str, buffers: Sequence[Any]) -> None:
        """Write a file. Raises CheckpointError if the folder is no longer reserved for this save."""
        if self._is_reserved:
            check_reserved(self.storage, self._name, self._token, self._by_own_user)
        self.storage.write(f"{self._name}/{name}", buffers)


def roots_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """The roots in `given`, or if it is None those in FLEET_SAVE_ROOTS, separated by commas. Local paths become
    absolute. Raises RoleError for a store without a host or bucket."""
    texts = os.environ.get(VARIABLE, "").split(",") if given is None else given
    roots = [text.strip() for text in texts if text.strip()]
    for root in roots:
        protocol, mark, rest = root.partition("://")
        if mark and protocol in STORES and not rest.partition("/")[0]:
            raise RoleError(
                f"--save_root, {VARIABLE}: expected a store with its host or bucket, such as {protocol}://name; found "
                f"{root!r}, which would let a message choose what the server connects to"
            )
    return tuple(root if "://" in root else os.path.abspath(root) for root in roots)


def open_folder(roots: Sequence[str], dirname: str, folder: str, token: int) -> SaveFolder:
    """The folder of a save that a message asks for. Raises CheckpointError if the server must not write to it. Blocks
    while the store does not answer."""
    place = _checked(dirname, roots)
    if roots and not any(_is_below(place, root) for root in roots):
        raise CheckpointError(
            f"expected a folder below {', '.join(roots)}, the roots that this server was started with (--save_root, "
            f"{VARIABLE}); found {place}"
        )
    storage = Storage(place)
    if storage.leads_outside(folder):
        raise CheckpointError(f"{storage.place(folder)} is a link that leads outside of {place}")
    if not roots or reserved_for(storage, folder) is not None:
        check_reserved(storage, folder, token, by_own_user=not roots)
    return SaveFolder(storage, folder, token, by_own_user=not roots)


def _checked(dirname: str, roots: Sequence[str]) -> str:
    """`dirname` as a local path without links, or as the URL of an allowed store. Raises CheckpointError otherwise."""
    if not 0 < len(dirname) <= _MAX_LENGTH or not dirname.isprintable():
        raise CheckpointError(f"expected the path of a folder, 1 to {_MAX_LENGTH:,} characters, found {dirname!r:.200}")
    if "::" in dirname:
        raise CheckpointError(f"expected a folder, found a chain of file systems (::) in {dirname!r}")
    protocol, mark, rest = dirname.partition("://")
    if not mark or protocol in _LOCAL:
        path = rest if mark else dirname
        if not os.path.isabs(path):
            raise CheckpointError(f"expected an absolute path, found {dirname!r}")
        return os.path.realpath(path)
    if protocol not in {_MEMORY, *(root.partition("://")[0] for root in roots if "://" in root)}:
        host = rest.partition("/")[0]
        raise CheckpointError(
            f"expected a local folder, or a store that this server was started with; found {dirname!r}. A server "
            f"connects to no address that comes by message. Name it when the servers are started: --save_root "
            f"{protocol}://{host}, or {VARIABLE}."
        )
    if ".." in rest.split("/"):
        raise CheckpointError(f"expected a URL without '..', found {dirname!r}")
    return dirname


def _is_below(place: str, root: str) -> bool:
    if ("://" in place) != ("://" in root):
        return False
    if "://" not in root:
        root = os.path.realpath(root)
        return os.path.commonpath([root, place]) == root
    return place.rstrip("/") == root.rstrip("/") or place.startswith(root if root.endswith("/") else f"{root}/")
