"""The file `start` of a log folder: which segments are needed, and the run that they belong to."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import msgspec

from torchfleet.base.errors import LogError
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.server.log.log_files import read_file, replace_file

START = "start"
_MAX_BYTES = 1 << 16
NOT_IN_STEP = -1  # in the place of a term: the log of a backup that no view has named yet


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file."""

    first: int  # number of the first segment that is needed, which begins with a whole copy; 0: no copy is whole yet
    last: int  # number of the last segment that may have entries
    run: str  # names the launcher's run whose workers are in the log
    # Of a server with backups: the last term in which it was primary, or the backup that the view names. The log has
    # every change that was acknowledged up to then. Otherwise 0, or NOT_IN_STEP.
    term: int = 0
    salt: int = 0  # of the records in all segments (log_records.py)

    @property
    def is_whole(self) -> bool:
        """Whether a server can be restored from the log."""
        return self.first > 0


def write_start(folder: Path, start: Start) -> None:
    """Replace the file, durably and atomically. Raises OSError."""
    body = msgspec.json.encode(start)
    replace_file(folder / START, b"%s %08x\n" % (body, zlib.crc32(body)))


def find_start(folder: Path) -> Start | None:
    """As read_start; None if there is no log. The folder need not exist."""
    return read_start(folder) if os.path.lexists(folder / START) else None


def read_start(folder: Path) -> Start:
    """Read the file. Raises LogError if it is damaged or cannot be read."""
    data = read_file(folder / START, _MAX_BYTES)
    body, _, check = data.rpartition(b" ")
    try:
        start = msgspec.json.decode(body, type=prepared(Start))
    except msgspec.MsgspecError:
        start = Start(-1, -1, "")
    is_sound = 0 <= start.first <= start.last and start.term >= NOT_IN_STEP
    if check != b"%08x\n" % zlib.crc32(body) or not is_sound:
        raise LogError(
            f"{folder / START} is damaged, or of another version of torchfleet: expected the numbers of segments, a "
            f"run and their checksum, found {data!r:.80}. The log is not used. Go on from the last checkpoint, with "
            "another folder for the log."
        )
    return start
