"""Reads text as blocks of whole words, from one file or many, plain or compressed, with lines of any length."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import DataError
from torchfleet.base.monitor.progress import Progress
from torchfleet.data.reading import streams
from torchfleet.ps.kernels import words

MAX_WORD = 1 << 24  # bytes

Bytes = npt.NDArray[np.uint8]


def input_files(path: str) -> list[str]:
    """The file itself, or the files directly in a folder, by name. Names that begin with `_` or `.` are ignored."""
    if not streams.is_local(path):
        return [path]
    if not os.path.exists(path):
        raise DataError(f"no file or folder at {path}: expected a text or a folder of texts")
    if not os.path.isdir(path):
        return [path]
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_file() and entry.name[0] not in "_.")
    if not names:
        raise DataError(f"no files in the folder {path}: expected texts (names that begin with _ or . are left out)")
    return [os.path.join(path, name) for name in names]


def whole_words(chunks: Iterable[bytes], name: str, is_cut: Callable[[], bool] = lambda: False) -> Iterator[Bytes]:
    """Split the chunks between words, each with the padding that the kernels need.

    The last line always ends with a newline. `is_cut` is called at the end; if it returns True, the last word may be
    incomplete and is dropped.
    """
    rest: list[bytes] = []  # the beginning of an incomplete word
    size = 0
    for chunk in chunks:
        cut = int(words.behind_last_space(np.frombuffer(chunk, np.uint8)))
        if cut:
            yield padded(*rest, memoryview(chunk)[:cut])
            rest, size = [chunk[cut:]], len(chunk) - cut
            continue
        rest.append(chunk)
        size += len(chunk)
        if size > MAX_WORD:
            raise DataError(f"{name}: a word of more than {MAX_WORD:,} bytes; is this a text?")
    yield padded(*(() if is_cut() else rest), b"\n")


def padded(*parts: bytes | memoryview) -> Bytes:
    """A text with the padding that the kernels need."""
    return np.frombuffer(b"".join((*parts, words.PADDING)), np.uint8)


class Texts:
    """The texts of a corpus, read one after another, up to `max_bytes` in total. Shows its progress.

    Where the limit cuts a text, the text ends after the last white space before the cut.
    """

    def __init__(self, path: str, what: str, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise DataError(f"max_bytes must be at least 1, found {max_bytes}")
        self.path, self._paths, self._max_bytes = path, input_files(path), max_bytes
        self._num_bytes, self._is_cut = 0, False
        self._start, self._progress = time.monotonic(), Progress(what)

    def check_apart(self, *others: str) -> None:
        """Raise DataError if an output file would be read as a text the next time."""
        folder = os.path.realpath(self.path)
        for other in others:
            if os.path.realpath(os.path.dirname(other) or ".") == folder:
                raise DataError(
                    f"{other} lies among the texts in {self.path} and would be read as one: move it elsewhere"
                )

    def paths(self) -> Iterator[str]:
        """The files, until the limit is reached."""
        for path in self._paths:
            if self._max_bytes is not None and self._num_bytes >= self._max_bytes:
                break
            yield path
        self._progress.end(self._so_far())

    def pieces(self, path: str) -> Iterator[Bytes]:
        """A file's text in pieces of whole words, as in `whole_words`."""
        chunks = self._limited(streams.chunks(streams.open_file(path), path))
        for piece in whole_words(chunks, path, lambda: self._is_cut):
            yield piece
            self._progress.show(self._so_far())

    def _limited(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._num_bytes += len(chunk)
            too_many = 0 if self._max_bytes is None else self._num_bytes - self._max_bytes
            if too_many > 0:
                self._is_cut, self._num_bytes = True, self._num_bytes - too_many
                if too_many < len(chunk):
                    yield chunk[:-too_many]
                return
            yield chunk

    def _so_far(self) -> str:
        mega = self._num_bytes / 1e6
        return f"{mega:,.0f} MB, {mega / max(time.monotonic() - self._start, 1e-9):,.0f} MB/s"
