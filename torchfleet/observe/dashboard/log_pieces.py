"""Reads logs in bounded pieces: the end of a log, what precedes it, what was added since, lines that contain a text."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import IO, Any

from torchfleet.base.monitor.json_lines import readable
from torchfleet.base.monitor.log_file import before
from torchfleet.base.printable import bare, printable

PIECE = 64 << 10  # bytes of one piece
_SEARCHED = 16 << 20  # bytes from the end in which a text is looked for
_MOST_FOUND = 200  # lines
_MOST_LINE = 4000  # characters
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", re.ASCII)


def is_log_name(name: str) -> bool:
    """Whether this may be the name of a log: a plain name, which stays in its folder and is not hidden."""
    return _NAME.fullmatch(name) is not None


def read_piece(folder: Path, name: str, file_id: int = 0, start: int | None = None, end: int | None = None) -> Any:
    """Return a piece of a log with its position: from `start` on, or up to `end`, or the end of the log.

    A full log is rotated. `file_id`, from an earlier answer, selects one of the two files; if it is 0 or that file is
    gone, the current file is read. Returns None if there is no log.
    """
    for is_aside, path in enumerate((folder / name, before(folder / name))):
        opened = _open(path, name)
        if opened is None:
            continue
        with opened as file:
            about = os.fstat(file.fileno())
            if file_id in (0, about.st_ino):
                if file_id == 0:
                    start = end = None
                has_earlier = not is_aside and before(folder / name).is_file()
                found = _piece(file, about, start, end)
                return {**found, "has_earlier_file": has_earlier, "is_aside": bool(is_aside)}
    return read_piece(folder, name) if file_id else None


def read_before(folder: Path, name: str) -> Any:
    """Return the end of the rotated file; None if there is no rotated file."""
    opened = _open(before(folder / name), name)
    if opened is None:
        return None
    with opened as file:
        return {**_piece(file, os.fstat(file.fileno()), None, None), "has_earlier_file": False, "is_aside": True}


def find_lines(folder: Path, name: str, text: str) -> Any:
    """Return the last lines that contain a text, ignoring case, in the last megabytes of a log; None if there is no
    log."""
    opened = _open(folder / name, name)
    if opened is None:
        return None
    with opened as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - _SEARCHED)
        file.seek(begin)
        lines = file.read(_SEARCHED).decode("utf-8", "replace").split("\n")
    wanted = text.casefold()
    found = [line for line in lines if wanted in line.casefold()]
    last = [_shown(line) for line in found[-_MOST_FOUND:]]
    return {"lines": last, "num": len(found), "searched": size - begin, "size": size}


def _open(path: Path, name: str) -> IO[bytes] | None:
    """Open only regular files with plain names: no links out of the folder, no pipes that would block."""
    if not is_log_name(name):
        return None
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        return None
    return open(number, "rb")


def _piece(file: IO[bytes], about: os.stat_result, start: int | None, end: int | None) -> dict[str, Any]:
    size = about.st_size
    if start is None:
        end = size if end is None else max(0, min(end, size))
        start = max(0, end - PIECE)
    start = max(0, min(start, size))
    file.seek(start)
    data = file.read(min(PIECE, (size if end is None else end) - start))
    text = "\n".join(map(_shown, data.decode("utf-8", "replace").split("\n")))
    return {"file": str(about.st_ino), "start": start, "end": start + len(data), "size": size, "text": text}


def _shown(line: str) -> str:
    """Return a line as a terminal would show it, without colours; for a JSON line, its text."""
    return bare(printable(readable(line)))[:_MOST_LINE]
