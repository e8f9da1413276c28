"""zstd of the standard library, which is a package of its own before Python 3.14."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CompressionParameter, ZstdCompressor = zstd.CompressionParameter, zstd.ZstdCompressor
