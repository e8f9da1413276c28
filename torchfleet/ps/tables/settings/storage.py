"""Where a table keeps its rows: all in memory, or those used last in memory and the others on disk."""

from __future__ import annotations

import os

import msgspec

from torchfleet.base.errors import TableError

FEWEST_BYTES = 64 << 20
MAX_PATH = 4096


class TierStorage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`memory`: bytes of memory on each server, for the rows used last and the directory of all; 0: all rows are in
    memory. `path`: a folder on a disk of each server.
    """

    memory: int = 0
    path: str = ""

    def __post_init__(self) -> None:
        if self.memory and self.memory < FEWEST_BYTES:
            raise TableError(f"storage.memory must be at least {FEWEST_BYTES:,} bytes (64MiB), found {self.memory:,}")
        if self.memory and not (0 < len(self.path) <= MAX_PATH and self.path.isprintable()):
            raise TableError(f"storage.path must be the path of a folder, found {self.path!r:.200}")
        if self.path and not self.memory:
            raise TableError("storage.path needs storage.memory: the bytes of memory for the rows used last")


IN_MEMORY = TierStorage()
VARIABLE = "FLEET_TABLE_PATH"


def table_roots() -> tuple[str, ...]:
    """The folders below which this process may keep cold rows (--table_path); none: see `checked_folder`."""
    return tuple(os.path.abspath(root) for root in os.environ.get(VARIABLE, "").split(",") if root.strip())


def checked_folder(path: str, roots: tuple[str, ...]) -> str:
    """The folder for a table's cold rows. The path may come by message: a server that was started with roots
    (--table_path) takes only folders below them, and a relative path is below the first of them. Without roots the
    folder must belong to this server's own user. Raises TableError.
    """
    place = os.path.realpath(os.path.join(roots[0], path) if roots else path)
    if roots and not any(os.path.commonpath([place, root]) == root for root in map(os.path.realpath, roots)):
        raise TableError(f"expected a folder below {', '.join(roots)} (--table_path) for cold rows, found {place}")
    if not roots and not os.path.isabs(path):
        raise TableError(f"expected an absolute path for cold rows, or a server with --table_path; found {path!r}")
    try:
        found = os.stat(place)
    except OSError as error:
        raise TableError(f"the folder {place} for cold rows cannot be used: {error.strerror}. Make it first.") from None
    if not os.path.isdir(place):
        raise TableError(f"expected a folder for cold rows, found {place}, which is none")
    if not roots and found.st_uid != os.getuid():
        raise TableError(f"the folder {place} for cold rows belongs to another user; name it with --table_path to use it")
    return place
