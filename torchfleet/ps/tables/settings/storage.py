"""Where a table keeps its rows: all in memory, or those used last in memory and the others on disk."""

from __future__ import annotations

import os

import msgspec

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.table_size import parse_bytes

FEWEST_BYTES = 64 << 20
MAX_PATH = 4096


class TierStorage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`memory`: bytes of memory on each server, for the rows used last and the directory of all rows; 0: all rows are
    in memory. `path`: a folder on a disk of each server.
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


def Tiered(memory: str | int, path: str | os.PathLike[str]) -> TierStorage:
    """Rows in memory and on disk, for SparseEmbedding(storage=...).

    `memory`: on each server, such as "8GB": for the rows used last, and nine bytes for each row. `path`: a folder on a
    disk of each server; relative paths begin at the present folder. The folder is created if its parent exists.
    """
    num_bytes = (
        memory if isinstance(memory, int) and not isinstance(memory, bool) else parse_bytes(str(memory), "memory")
    )
    return TierStorage(num_bytes, os.path.abspath(path))


MEMORY, VARIABLE = "FLEET_TABLE_MEMORY", "FLEET_TABLE_PATH"


def default_storage() -> TierStorage:
    """The storage of tables whose description sets none: --table_memory and --table_path if given, else memory. Raises
    TableError if there is a memory without a path.
    """
    text, roots = os.environ.get(MEMORY), table_roots()
    if not text:
        return IN_MEMORY
    if not roots:
        raise TableError(f"{MEMORY} (--table_memory) needs a folder for cold rows: {VARIABLE} (--table_path)")
    return TierStorage(parse_bytes(text, MEMORY), roots[0])


def tier_variables(memory: str | None, path: str | None) -> dict[str, str]:
    """The environment variables for --table_memory and --table_path. Raises TableError if one of them is wrong, or the
    path is missing.
    """
    if memory is not None and path is None:
        raise TableError("--table_memory needs --table_path DIR, a folder for the rows that do not fit")
    if path is not None and ("," in path or not path.strip()):
        raise TableError(f"--table_path: expected a folder without a comma, found {path!r}")
    found = {} if path is None else {VARIABLE: os.path.abspath(path)}
    return found if memory is None else {**found, MEMORY: str(parse_bytes(memory, "--table_memory"))}


def table_roots() -> tuple[str, ...]:
    """The folders below which this process may keep cold rows (--table_path); without any: see `checked_folder`."""
    return tuple(os.path.abspath(root) for root in os.environ.get(VARIABLE, "").split(",") if root.strip())


def checked_folder(path: str, roots: tuple[str, ...]) -> str:
    """The folder for a table's cold rows, created if needed. Because the path may come by message, a server that was
    started with roots (--table_path) takes only folders below them; a relative path is below the first root. Without
    roots the folder must belong to this server's own user. Raises TableError.
    """
    place = os.path.realpath(os.path.join(roots[0], path) if roots else path)
    if roots and not any(os.path.commonpath([place, root]) == root for root in map(os.path.realpath, roots)):
        raise TableError(f"expected a folder below {', '.join(roots)} (--table_path) for cold rows, found {place}")
    if not roots and not os.path.isabs(path):
        raise TableError(f"expected an absolute path for cold rows, or a server with --table_path; found {path!r}")
    try:
        if not os.path.lexists(place) and (roots or os.stat(os.path.dirname(place)).st_uid == os.getuid()):
            os.makedirs(place, mode=0o700, exist_ok=True)
        found = os.stat(place)
    except OSError as error:
        raise TableError(f"the folder {place} for cold rows cannot be used: {error.strerror}") from None
    if not os.path.isdir(place):
        raise TableError(f"expected a folder for cold rows, found {place}, which is not a folder")
    if not roots and found.st_uid != os.getuid():
        raise TableError(
            f"the folder {place} for cold rows belongs to another user; name it with --table_path to use it"
        )
    return place
