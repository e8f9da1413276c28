"""Entries as records of a file: a prefix with a checksum of its own, then the frames, with one over all of them.

A record that was never finished is known by its length: the file ends inside it. That is what a server leaves that is
killed while it writes, and what was whole before it is good. Everything else that is wrong is damage, and is refused:
what was promised is not to vanish behind a flipped bit.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

from torchfleet.errors import LogError
from torchfleet.net.wire import Frame
from torchfleet.server.log.log_entry import lengths_in

MAGIC = b"TFL1"
_FIELDS = struct.Struct("<4sIQI")  # magic, checksum of the frames, their bytes, bytes of the first
_CHECK = struct.Struct("<I")  # of the fields
PREFIX = _FIELDS.size + _CHECK.size
ALIGNED = 8  # bytes: numbers in frames lie where kernels can read them
SECTOR = 512  # bytes that a disk writes whole or not at all


def record_of(entry: Sequence[Frame]) -> list[Frame]:
    """The buffers of a record, to be written one after the other. The frames are not copied."""
    buffers: list[Frame] = [b""]
    crc = length = 0
    for frame in entry:
        data = memoryview(frame).cast("B") if memoryview(frame).nbytes else memoryview(b"")
        padding = bytes(-data.nbytes % ALIGNED)
        crc = zlib.crc32(padding, zlib.crc32(data, crc))
        length += data.nbytes + len(padding)
        buffers += [data, padding] if padding else [data]
    fields = _FIELDS.pack(MAGIC, crc, length, memoryview(entry[0]).nbytes)
    buffers[0] = fields + _CHECK.pack(zlib.crc32(fields))
    return buffers


class Records:
    """The entries in the bytes of a file, over their memory. Iterating raises LogError where something is damaged."""

    def __init__(self, data: memoryview, place: str) -> None:
        """`place`: the file, for errors."""
        self._data, self._place = data, place
        self.end = 0  # bytes of whole records so far
        self.is_torn = False  # what is behind them was never finished

    def __iter__(self) -> Iterator[list[Frame]]:
        while not self.is_torn and self.end < len(self._data):
            entry = self._next(self.end)
            if entry is not None:
                yield entry

    def _next(self, at: int) -> list[Frame] | None:
        """The entry at this place, and `end` behind it; None: it was never finished."""
        left = len(self._data) - at
        prefix = bytes(self._data[at : at + PREFIX])
        if left < PREFIX or not any(prefix):
            self._check_torn(at, prefix)
            return None
        magic, crc, length, num_first = _FIELDS.unpack_from(prefix)
        if magic != MAGIC or _CHECK.unpack_from(prefix, _FIELDS.size)[0] != zlib.crc32(prefix[: _FIELDS.size]):
            raise self._damaged(at, "its prefix is not one that was written")
        if left < PREFIX + length:
            self.is_torn = True
            return None
        content = self._data[at + PREFIX : at + PREFIX + length]
        if zlib.crc32(content) != crc:
            if self._lost_power(at, length):
                self.is_torn = True
                return None
            raise self._damaged(at, "its checksum is wrong")
        self.end = at + PREFIX + length
        try:
            return _split(content, num_first)
        except LogError as error:
            raise self._damaged(at, str(error)) from None

    def _check_torn(self, at: int, prefix: bytes) -> None:
        """Less than a prefix, or nothing at all where the file system has made room and power went."""
        if any(prefix) and not _could_begin(prefix):
            raise self._damaged(at, "its prefix is not one that was written")
        if len(self._data) - at > len(prefix) and not _is_blank(self._data[at + len(prefix) :]):
            raise self._damaged(at, "zeros, and something behind them")
        self.is_torn = True

    def _lost_power(self, at: int, length: int) -> bool:
        """Whether this is the last record, and sectors of it were never written: they read as zeros."""
        if at + PREFIX + length < len(self._data):
            return False
        first = -(-(at + PREFIX) // SECTOR) * SECTOR
        stops = range(first + SECTOR, at + PREFIX + length + 1, SECTOR)
        return any(_is_blank(self._data[stop - SECTOR : stop]) for stop in stops)

    def _damaged(self, at: int, why: str) -> LogError:
        return LogError(
            f"{self._place}: the record at byte {at:,} is damaged: {why}. What was promised is in it or behind it, so "
            "the log is not used. Go on from the last checkpoint, with another folder for the log."
        )


def _is_blank(data: memoryview) -> bool:
    return data.tobytes().count(0) == len(data)


def _could_begin(prefix: bytes) -> bool:
    return MAGIC.startswith(prefix[: len(MAGIC)])


def _split(content: memoryview, num_first: int) -> list[Frame]:
    frames: list[Frame] = [content[:num_first]]
    at = num_first + -num_first % ALIGNED
    for length in lengths_in(frames[0]):
        frames.append(content[at : at + length])
        at += length + -length % ALIGNED
    if at != len(content) or len(frames[0]) != num_first:
        raise LogError(f"its frames have {at:,} bytes, and the record {len(content):,}")
    return frames
