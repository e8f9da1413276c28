"""Files as streams of bytes: plain or compressed, local or in any file system of fsspec."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, cast

import fsspec

from torchfleet.base.errors import DataError
from torchfleet.data.reading.decompression import FORMATS, Decompressed

CHUNK = 1 << 20
_MAGIC = {
    ".gz": re.compile(rb"\x1f\x8b"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # or a skippable frame, as pzstd writes first
    ".xz": re.compile(rb"\xfd7zXZ\x00"),
    ".bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),  # "BZh" alone may begin a text
}


def is_local(path: str) -> bool:
    return ("://" not in path and "::" not in path) or os.path.exists(path)


def check_files(files: Sequence[str]) -> list[str]:
    """The paths as strings. Raises DataError unless `files` is a list of distinct paths, and local files exist."""
    if isinstance(files, (str, bytes, os.PathLike)):
        raise DataError(f"set_filelist: expected a list of paths, found the single {files!r}; write [{files!r}]")
    if not isinstance(files, Iterable):
        raise DataError(f"set_filelist: expected a list of paths, found {files!r}")
    paths = [os.fspath(path) if isinstance(path, os.PathLike) else path for path in files]
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
    with open_raw(path) as raw:
        head = raw.read(10)
    found = next((ending for ending, magic in _MAGIC.items() if magic.match(head)), "")
    named = next((ending for ending in _MAGIC if path.endswith(ending)), "")
    if named and found != named and head:
        raise DataError(f"{path}: named {named}, but its first bytes {head[:6]!r} are not those of such a file")
    return found


def open_file(path: str) -> BinaryIO:
    """The file's contents, decompressed."""
    ending = compression(path)
    raw = open_raw(path)
    return cast(BinaryIO, io.BufferedReader(Decompressed(raw, FORMATS[ending]), CHUNK)) if ending else raw


def chunks(stream: BinaryIO, path: str) -> Iterator[bytes]:
    """Yield the stream in chunks, then close it. Raises DataError if it cannot be read or decompressed."""
    num_read = 0
    try:
        while data := stream.read(CHUNK):
            num_read += len(data)
            yield data
    except Exception as error:  # a file system may raise anything
        raise DataError(
            f"{path}: cannot be read after {num_read:,} bytes of its contents ({type(error).__name__}: {error}); is it "
            "cut off or damaged?"
        ) from error
    finally:
        stream.close()


def open_raw(path: str) -> BinaryIO:
    """The file's bytes as they are."""
    try:
        if is_local(path):
            return cast(BinaryIO, open(path, "rb", buffering=0))
        return cast(BinaryIO, fsspec.open(path, "rb").open())
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{path}: cannot be opened ({type(error).__name__}: {error})") from error
