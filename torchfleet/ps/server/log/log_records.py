"""Entries as records of a file. A record is a prefix with its own checksum, then the frames with a common checksum.

An unfinished record is left out, together with all bytes behind it. The whole records before it are used. There are two
causes of unfinished records. If a server is killed while it writes, the file ends inside a record. If the machine loses
power, sectors that were not synced read as zeros. Every record says how many bytes of the file were synced when it was
written: zeros among those bytes are damage. Every other error is damage too, and raises LogError, so that no
acknowledged change is lost silently because of a flipped bit.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Sequence

import google_crc32c
import numpy as np

from torchfleet.base.errors import LogError
from torchfleet.ps.kernels.checksum import HAS_INSTRUCTION, WORD, crc32c_of_words
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.log.log_entry import lengths_in

MAGIC = b"TFL4"  # the last character is the version of the format
_FIELDS = struct.Struct("<4sIQQI")  # magic, checksum of the frames, their bytes, bytes synced, bytes of frame 0
_CHECK = struct.Struct("<I")  # checksum of the fields
_SALT = struct.Struct("<Q")  # a secret of the log: no client can send bytes that look like a prefix
_CHECKED = _FIELDS.size + _CHECK.size
PREFIX = _CHECKED + _SALT.size
ALIGNED = 8  # bytes: frames begin at multiples of it, so that kernels can read numbers in them
SECTOR = 512  # bytes that a disk writes completely or not at all
_SMALL = 1 << 12  # bytes; smaller frames are copied together, which costs less than a buffer for each
LONG = 1 << 14  # bytes; the checksum of fewer takes no longer than to release the interpreter's lock and take it again


def crc32c(data: Frame, crc: int = 0) -> int:
    """The CRC-32C of `data`. `crc`: the CRC-32C of the bytes before it. Other threads run while it is computed, unless
    it is short, or the processor has no instruction for it."""
    if isinstance(data, bytes) and len(data) < LONG:
        return int(google_crc32c.extend(crc, data))
    array = np.frombuffer(data, np.uint8)  # google_crc32c does not accept a memoryview
    if len(array) >= LONG and HAS_INSTRUCTION:
        num_words = len(array) // WORD
        crc = crc32c_of_words(array.ctypes.data, num_words, crc)
        array = array[num_words * WORD :]
    return int(google_crc32c.extend(crc, array))


def record_of(entry: Sequence[Frame], num_synced: int, salt: int = 0) -> list[Frame]:
    """The buffers of a record, in the order in which they must be written. Large frames are not copied.
    `num_synced`: bytes of the file that are synced to the disk. `salt`: that of the log."""
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
    return [fields + _CHECK.pack(zlib.crc32(fields)) + _SALT.pack(salt), *buffers]


class Records:
    """Iterates over the entries of a file, in order, without copying. Raises LogError at a damaged record."""

    def __init__(self, data: memoryview, place: str, is_synced: bool = False, salt: int = 0) -> None:
        """`place`: the file's path, for errors. `is_synced`: the whole file was synced, so zeros are damage.
        `salt`: that of the log."""
        self._data, self._place, self._is_synced, self._salt = data, place, is_synced, _SALT.pack(salt)
        self.end = 0  # position behind the last whole record so far
        self.is_torn = False  # whether an unfinished record begins at `end`

    def __iter__(self) -> Iterator[list[Frame]]:
        while not self.is_torn and self.end < len(self._data):
            entry = self._next(self.end)
            if entry is not None:
                yield entry

    def _next(self, at: int) -> list[Frame] | None:
        """The entry of the record at byte `at`; moves `end` behind it. None if it is unfinished. Raises LogError."""
        start = at + PREFIX
        self._refuse_other_version(self._data[at:start])
        fields = self._fields(self._data[at:start])
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
        """Treat the record at `at` as unfinished. Raises LogError if neither a kill nor a loss of power explains it."""
        is_cut = len(self._data) < at + PREFIX and MAGIC.startswith(bytes(self._data[at : at + len(MAGIC)]))
        if self._is_synced or not (is_cut or self._is_lost(at, stop)):
            raise self._damaged(at, why)
        if self._was_synced(at):
            raise self._damaged(at, f"{why}, and a later record says that it was on the disk")
        self.is_torn = True

    def _is_lost(self, at: int, stop: int) -> bool:
        """Whether the bytes from `at` to the end of its sector, or any later sector before `stop`, are all zeros."""
        size = len(self._data)
        first = min(-(-(at + 1) // SECTOR) * SECTOR, size)
        starts = range(first, min(stop, size), SECTOR)
        return _is_blank(self._data[at:first]) or any(_is_blank(self._data[i : i + SECTOR]) for i in starts)

    def _was_synced(self, at: int) -> bool:
        """Whether a prefix behind byte `at` says that this byte was synced."""
        rest = self._data[at:]
        starts = (found.start() for found in re.finditer(re.escape(MAGIC), rest))
        prefixes = (self._fields(rest[start : start + PREFIX]) for start in starts)
        return any(fields is not None and fields[2] > at for fields in prefixes)

    def _fields(self, prefix: memoryview) -> tuple[int, int, int, int] | None:
        """Checksum and bytes of the frames, bytes synced, bytes of the first frame; None if the prefix is not valid."""
        if not _is_whole(prefix) or prefix[_CHECKED:] != self._salt:
            return None
        magic, crc, length, num_synced, num_first = _FIELDS.unpack_from(prefix)
        return (crc, length, num_synced, num_first) if magic == MAGIC else None

    def _damaged(self, at: int, why: str) -> LogError:
        return LogError(
            f"{self._place}: the record at byte {at:,} is damaged: {why}. Acknowledged changes may be in this record "
            "or behind it, so the log is not used. Go on from the last checkpoint, with another folder for the log."
        )


def _is_whole(prefix: memoryview) -> bool:
    """Whether the checksum of the prefix is right. Its position is the same in every version of the format."""
    return len(prefix) >= _CHECKED and _CHECK.unpack_from(prefix, _FIELDS.size)[0] == zlib.crc32(prefix[: _FIELDS.size])


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
