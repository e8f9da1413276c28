"""The file `start` of a log folder: which segments are needed, and the run that they belong to."""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec

from torchfleet.base.errors import LogError
from torchfleet.ps.server.log.log_files import read_file, replace_file

START = "start"
_MAX_BYTES = 1 << 16


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file."""

    first: int  # number of the first segment that is needed, which begins with a whole copy; 0: no copy is whole yet
    last: int  # number of the last segment that may have entries
    run: str  # names the launcher's run whose workers are in the log


def write_start(folder: Path, start: Start) -> None:
    """Replace the file, durably and atomically. Raises OSError."""
    body = msgspec.json.encode(start)
    replace_file(folder / START, b"%s %08x\n" % (body, zlib.crc32(body)))


def read_start(folder: Path) -> Start:
    """Read the file. Raises LogError if it is damaged or cannot be read."""
    data = read_file(folder / START, _MAX_BYTES)
    body, _, check = data.rpartition(b" ")
    try:
        start = msgspec.json.decode(body, type=Start)
    except msgspec.MsgspecError:
        start = Start(-1, -1, "")
    if check != b"%08x\n" % zlib.crc32(body) or not 0 <= start.first <= start.last:
        raise LogError(
            f"{folder / START} is damaged, or of another version of torchfleet: expected the numbers of segments, a "
            f"run and their checksum, found {data!r:.80}. The log is not used. Go on from the last checkpoint, with "
            "another folder for the log."
        )
    return start
