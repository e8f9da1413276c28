"""Entries as records of a file: a prefix with a checksum of its own, then the frames, with one over all of them.

A record that was never finished is left out, with all behind it; what was whole before it is good. It is known by its
length, if the file ends inside it: that is what a server leaves that is killed while it writes. A loss of power takes
sectors of all that was not synced, which read as zeros. Every record says how much of the file was synced when it was
written: zeros before that are damage. Everything else that is wrong is damage, and is refused: what was promised is not
to vanish behind a flipped bit.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Sequence

import google_crc32c
import numpy as np

from torchfleet.base.errors import LogError
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log.log_entry import lengths_in

MAGIC = b"TFL3"  # the last character is the version of the format
_FIELDS = struct.Struct("<4sIQQI")  # magic, checksum of the frames, their bytes, bytes synced, bytes of the first frame
_CHECK = struct.Struct("<I")  # of the fields
PREFIX = _FIELDS.size + _CHECK.size
ALIGNED = 8  # bytes: numbers in frames lie where kernels can read them
SECTOR = 512  # bytes that a disk writes whole or not at all
_SMALL = 1 << 12  # bytes of frames that are copied: a buffer of their own costs more
_SLICE = 1 << 20  # bytes of an array that are summed at a time: google_crc32c holds the interpreter's lock meanwhile


def crc32c(data: Frame, crc: int = 0) -> int:
    """The CRC-32C of these bytes. `crc`: of the bytes before them."""
    if isinstance(data, bytes):
        return int(google_crc32c.extend(crc, data))
    array = np.frombuffer(data, np.uint8)  # google_crc32c takes no memoryview
    for at in range(0, len(array), _SLICE):
        crc = google_crc32c.extend(crc, array[at : at + _SLICE])
    return crc


def record_of(entry: Sequence[Frame], num_synced: int) -> list[Frame]:
    """The buffers of a record, to be written one after the other. Large frames are not copied. `num_synced`: bytes of
    the file that are on the disk for good."""
    buffers: list[Frame] = []
    small: list[Frame] = []
    crc = length = 0
    for frame in entry:
        view = memoryview(frame)
        num_padding = -view.nbytes % ALIGNED
        length += view.nbytes + num_padding
        if view.nbytes < _SMALL:
            small += (view.tobytes(), bytes(num_padding))
            continue
        buffers += (b"".join(small), view)
        small = [bytes(num_padding)]
    buffers.append(b"".join(small))
    buffers = [buffer for buffer in buffers if len(buffer)]
    for buffer in buffers:
        crc = crc32c(buffer, crc)
    fields = _FIELDS.pack(MAGIC, crc, length, num_synced, memoryview(entry[0]).nbytes)
    return [fields + _CHECK.pack(zlib.crc32(fields)), *buffers]


class Records:
    """The entries in the bytes of a file, over their memory. Iterating raises LogError where something is damaged."""

    def __init__(self, data: memoryview, place: str, is_synced: bool = False) -> None:
        """`place`: the file, for errors. `is_synced`: all of it was brought to the disk."""
        self._data, self._place, self._is_synced = data, place, is_synced
        self.end = 0  # bytes of whole records so far
        self.is_torn = False  # what is behind them was never finished

    def __iter__(self) -> Iterator[list[Frame]]:
        while not self.is_torn and self.end < len(self._data):
            entry = self._next(self.end)
            if entry is not None:
                yield entry

    def _next(self, at: int) -> list[Frame] | None:
        """The entry at this place, and `end` behind it; None: it was never finished."""
        start = at + PREFIX
        self._refuse_other_version(self._data[at:start])
        fields = _fields(self._data[at:start])
        if fields is None:
            self._tear(at, start, "its prefix is not one that was written")
            return None
        crc, length, _, num_first = fields
        if len(self._data) < start + length:
            self.is_torn = True
            return None
        content = self._data[start : start + length]
        if crc32c(content) != crc:
            self._tear(at, start + length, "its checksum is wrong")
            return None
        self.end = start + length
        try:
            return _split(content, num_first)
        except LogError as error:
            raise self._damaged(at, str(error)) from None

    def _refuse_other_version(self, prefix: memoryview) -> None:
        if not _is_whole(prefix):
            return
        magic = bytes(prefix[: len(MAGIC)])
        if magic != MAGIC and magic.startswith(MAGIC[:-1]):
            raise LogError(
                f"{self._place} is a log of format {magic[-1:].decode('latin-1')}, and this torchfleet reads format "
                f"{MAGIC[-1:].decode()} only. Go on from the last checkpoint, with another folder for the log."
            )

    def _tear(self, at: int, stop: int, why: str) -> None:
        """The file is as if it ended here. Raises LogError if that is not what a kill or a loss of power leaves."""
        is_cut = len(self._data) < at + PREFIX and MAGIC.startswith(bytes(self._data[at : at + len(MAGIC)]))
        if self._is_synced or not (is_cut or self._is_lost(at, stop)):
            raise self._damaged(at, why)
        if self._was_synced(at):
            raise self._damaged(at, f"{why}, and a later record says that it was on the disk")
        self.is_torn = True

    def _is_lost(self, at: int, stop: int) -> bool:
        """Whether the disk has not got some sector of what is here, or of what was not there before."""
        size = len(self._data)
        first = min(-(-(at + 1) // SECTOR) * SECTOR, size)
        starts = range(first, min(stop, size), SECTOR)
        return _is_blank(self._data[at:first]) or any(_is_blank(self._data[i : i + SECTOR]) for i in starts)

    def _was_synced(self, at: int) -> bool:
        """Whether a record behind this place says that all up to it was on the disk."""
        rest = self._data[at:]
        starts = (found.start() for found in re.finditer(re.escape(MAGIC), rest))
        prefixes = (_fields(rest[start : start + PREFIX]) for start in starts)
        return any(fields is not None and fields[2] > at for fields in prefixes)

    def _damaged(self, at: int, why: str) -> LogError:
        return LogError(
            f"{self._place}: the record at byte {at:,} is damaged: {why}. What was promised is in it or behind it, so "
            "the log is not used. Go on from the last checkpoint, with another folder for the log."
        )


def _fields(prefix: memoryview) -> tuple[int, int, int, int] | None:
    """Checksum and bytes of the frames, bytes synced, bytes of the first frame; None: it was not written so."""
    if not _is_whole(prefix):
        return None
    magic, crc, length, num_synced, num_first = _FIELDS.unpack_from(prefix)
    return (crc, length, num_synced, num_first) if magic == MAGIC else None


def _is_whole(prefix: memoryview) -> bool:
    """Whether the prefix has the checksum of its fields. It lies at the same place in every version of the format."""
    return len(prefix) == PREFIX and _CHECK.unpack_from(prefix, _FIELDS.size)[0] == zlib.crc32(prefix[: _FIELDS.size])


def _is_blank(data: memoryview) -> bool:
    return data.tobytes().count(0) == len(data)


def _split(content: memoryview, num_first: int) -> list[Frame]:
    frames: list[Frame] = [content[:num_first]]
    at = num_first + -num_first % ALIGNED
    for length in lengths_in(frames[0]):
        frames.append(content[at : at + length])
        at += length + -length % ALIGNED
    if at != len(content) or len(frames[0]) != num_first:
        raise LogError(f"its frames have {at:,} bytes, and the record {len(content):,}")
    return frames
