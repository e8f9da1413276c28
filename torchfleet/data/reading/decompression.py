"""Compressed streams, decompressed a block at a time, so that a small file cannot fill the memory."""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from typing import BinaryIO, Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK = 1 << 20  # bytes decompressed at a time
_READ = 1 << 16
_MAX_WINDOW_LOG = 27  # of a zstd window: zstd's own default limit, and more than `zstd -19` writes
_MAX_MEMORY = 1 << _MAX_WINDOW_LOG  # bytes of xz's dictionary; `xz -9` needs half


class Decompressor(Protocol):
    """Decompresses one member of a stream; the interface of bz2, lzma and compression.zstd in the standard library."""

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
        # After a full block zlib may hold more output, even if it has taken all input.
        self.needs_input = not self._inner.unconsumed_tail and len(found) < max_length
        return found


FORMATS: dict[str, Callable[[], Decompressor]] = {
    ".gz": _Gzip,
    ".zst": lambda: zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}),
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
        """The first bytes of the next member; empty at the end. Members may be followed by zeros."""
        data, self._unused = self._unused.lstrip(b"\0"), b""
        while not data and (read := self._raw.read(_READ)):
            data = read.lstrip(b"\0")
        return data

    def close(self) -> None:
        self._raw.close()
        super().close()
