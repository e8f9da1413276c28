"""Files as streams of bytes: plain or compressed, local or anywhere that fsspec reaches."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, cast

import fsspec
import zstandard

from torchfleet.errors import DataError

CHUNK = 1 << 20
_MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".xz": b"\xfd7zXZ\x00", ".bz2": b"BZh"}
_OPEN: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".zst": lambda raw: zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


def is_local(path: str) -> bool:
    return "://" not in path and "::" not in path


def check_files(files: Sequence[str]) -> list[str]:
    """The paths as a list of text. Raises DataError for what is no list of files that exist."""
    if isinstance(files, (str, bytes, os.PathLike)):
        raise DataError(f"set_filelist: expected a list of paths, found the single {files!r}; write [{files!r}]")
    paths = [os.fspath(path) for path in files]
    for path in paths:
        if not isinstance(path, str):
            raise DataError(f"set_filelist: expected paths as text, found {path!r}")
        if is_local(path) and os.path.isdir(path):
            raise DataError(f"'{path}' is a folder: list the files in it, for example sorted(glob.glob('{path}/*'))")
    missing = [path for path in paths if is_local(path) and not os.path.exists(path)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise DataError(f"no file at {', '.join(missing[:3])}{more} (of {len(paths)} in the list)")
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise DataError(f"'{twice}' is twice in the list: its samples would be read twice. Remove one.")
    return paths


def compression(path: str) -> str:
    """ ".gz", ".zst", ".xz", ".bz2" or "": by the file's first bytes, which must agree with its name."""
    with _open_raw(path) as raw:
        head = raw.read(6)
    found = next((ending for ending, magic in _MAGIC.items() if head.startswith(magic)), "")
    named = next((ending for ending in _MAGIC if path.endswith(ending)), "")
    if named and found != named and head:
        raise DataError(f"{path}: named {named}, but its first bytes {head!r} are not those of such a file")
    return found


def open_file(path: str) -> BinaryIO:
    """The file's contents, decompressed."""
    ending = compression(path)
    raw = _open_raw(path)
    return cast(BinaryIO, _OPEN[ending](raw)) if ending else raw


def chunks(stream: BinaryIO, path: str) -> Iterator[bytes]:
    """The stream in pieces. What cannot be read or decompressed is a DataError that names the file."""
    num_read = 0
    try:
        while data := stream.read(CHUNK):
            num_read += len(data)
            yield data
    except _BROKEN as error:
        raise DataError(
            f"{path}: cannot be read after {num_read:,} bytes of its contents ({type(error).__name__}: {error}); is it "
            "cut off or damaged?"
        ) from error
    finally:
        stream.close()


def _open_raw(path: str) -> BinaryIO:
    try:
        if is_local(path):
            return cast(BinaryIO, open(path, "rb", buffering=0))
        return cast(BinaryIO, fsspec.open(path, "rb").open())
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{path}: cannot be opened ({type(error).__name__}: {error})") from error
