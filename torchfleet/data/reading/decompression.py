"""Compressed streams, decompressed a block at a time: what a few bytes stand for is never in memory as a whole."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import BinaryIO, Protocol

import zstandard

BLOCK = 1 << 20  # bytes that are decompressed at a time
_READ = 1 << 16
_MAX_MEMORY = 1 << 27  # bytes of a decompressor's own: dictionaries of xz, as zstd's are by default; `xz -9` needs half


class Decompressor(Protocol):
    """One member of a stream, as bz2 and lzma of the standard library do it."""

    @property
    def needs_input(self) -> bool: ...

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        found = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        # A full block may have left some inside zlib, also when all input has been taken.
        self.needs_input = not self._inner.unconsumed_tail and len(found) < max_length
        return found


class _Zstandard:
    """The library decompresses all that it is given. It is given few blocks of the format at a time, each of which
    stands for 128 KiB at most: RFC 8878 has the layout that is followed here."""

    _MOST = BLOCK >> 17

    def __init__(self) -> None:
        self._inner = zstandard.ZstdDecompressor().decompressobj()
        self._waiting = b""
        self._ahead: int | None = None  # bytes before the next block, or the frame's end; None: its header is not read
        self._has_checksum = self._is_last = False
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + self._waiting

    def decompress(self, data: bytes, max_length: int) -> bytes:
        self._waiting += data
        size = self._few_blocks()
        found = self._inner.decompress(self._waiting[:size]) if size else b""
        self._waiting = self._waiting[size:]
        self.needs_input = size == 0 or not self._waiting
        return found

    def _few_blocks(self) -> int:
        """Bytes of what waits that may be given to the library now: they begin a few blocks at most."""
        waiting = self._waiting
        if self._ahead is None:
            if len(waiting) < 5:
                return 0
            self._ahead = self._frame_header(waiting[4])
        num = 0
        while num < self._MOST and not self._is_last and self._ahead + 3 <= len(waiting):
            self._ahead += self._block(int.from_bytes(waiting[self._ahead : self._ahead + 3], "little"))
            num += 1
        size = min(len(waiting), self._ahead)
        self._ahead -= size
        return size

    def _frame_header(self, descriptor: int) -> int:
        is_single = bool(descriptor & 0x20)
        self._has_checksum = bool(descriptor & 0x04)
        content = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
        return 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3] + content

    def _block(self, header: int) -> int:
        """Bytes of the block with its header, and of the checksum if it is the last."""
        self._is_last = bool(header & 1)
        size = 1 if header >> 1 & 3 == 1 else header >> 3  # type 1: one byte, repeated
        return 3 + size + (4 if self._is_last and self._has_checksum else 0)


FORMATS: dict[str, Callable[[], Decompressor]] = {
    ".gz": _Gzip,
    ".zst": _Zstandard,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _MAX_MEMORY),
    ".bz2": bz2.BZ2Decompressor,
}


class Decompressed(io.RawIOBase):
    """Concatenated compressed members. A damaged or truncated member is an error, never an early end."""

    def __init__(self, raw: BinaryIO, make: Callable[[], Decompressor]) -> None:
        self._raw, self._make = raw, make
        self._decompressor: Decompressor | None = None
        self._rest, self._unused = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            if self._decompressor is None:
                data = self._begin()
                if not data:
                    return 0
                self._decompressor = self._make()
            elif not self._decompressor.needs_input:
                data = b""
            elif not (data := self._raw.read(_READ)):
                raise EOFError("it ends in the middle of a compressed part")
            self._rest = memoryview(self._decompressor.decompress(data, BLOCK))
            if self._decompressor.eof:
                self._unused, self._decompressor = self._decompressor.unused_data, None
        num = min(len(buffer), len(self._rest))
        buffer[:num] = self._rest[:num]
        self._rest = self._rest[num:]
        return num

    def _begin(self) -> bytes:
        """The first bytes of the next member; empty at the end. Members may be padded with zeros."""
        data, self._unused = self._unused.lstrip(b"\0"), b""
        while not data and (read := self._raw.read(_READ)):
            data = read.lstrip(b"\0")
        return data

    def close(self) -> None:
        self._raw.close()
        super().close()
