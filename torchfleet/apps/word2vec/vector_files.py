"""Reads and writes files of word vectors in word2vec's formats: text (`word v1 .. vD` lines) and binary."""

from __future__ import annotations

import contextlib
import mmap
import os
import string
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
import numpy.typing as npt

from torchfleet.apps.word2vec.decimals import lines_of
from torchfleet.apps.word2vec.vocabulary import decoded, encoded
from torchfleet.base.errors import DataError

Vectors = npt.NDArray[np.float32]

_VALUES = 1 << 16  # numbers formatted at a time, which fit into the cache
_MAX_HEADER = 100
_MAX_WORD = 1 << 16  # bytes; a longer one means that this is not a file of words
_PRINTABLE = string.printable.encode()


def write_text(path: str, words: Sequence[str], vectors: Vectors) -> None:
    """Write atomically: the file appears when complete. Reading it returns the same float32 numbers."""
    num, dim = vectors.shape
    step = max(1, _VALUES // dim)
    with _new_file(path) as file:
        file.write(b"%d %d\n" % (num, dim))
        for at in range(0, num, step):
            lines = lines_of(vectors[at : at + step])
            file.writelines(b"%b %b\n" % pair for pair in zip(map(encoded, words[at : at + step]), lines, strict=True))


def write_binary(path: str, words: Sequence[str], vectors: Vectors) -> None:
    """Write atomically: the file appears when complete."""
    num, dim = vectors.shape
    with _new_file(path) as file:
        file.write(b"%d %d\n" % (num, dim))
        for word, row in zip(words, vectors.astype("<f4", copy=False), strict=True):
            file.write(b"%b %b\n" % (encoded(word), row.tobytes()))


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[IO[bytes]]:
    unfinished = f"{path}.tmp"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(unfinished)


def read_vectors(path: str) -> tuple[list[str], Vectors]:
    """Words and vectors of a file; its content shows which format it has. Raises DataError for a damaged file."""
    if os.path.isdir(path):
        raise DataError(f"{path} is a folder: expected a file of word vectors. Is it a saved model?")
    try:
        with open(path, "rb") as file:
            header = file.readline(_MAX_HEADER)
            num, dim = _sizes(path, header)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if dim > len(data):
                    raise DataError(
                        f"{path}, line 1: expected words of at most {len(data):,} numbers, as the file has no more "
                        f"bytes, found {dim:,}. Is it cut off?"
                    )
                if _is_text(data, len(header), dim):
                    return _read_text(path, file, num, dim, len(data))
                return _read_binary(path, data, len(header), num, dim)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _sizes(path: str, header: bytes) -> tuple[int, int]:
    fields = header.split()
    if not header.endswith(b"\n") or len(fields) != 2 or not all(field.isdigit() for field in fields):
        shown = decoded(header[:40].rstrip(b"\n"))
        raise DataError(
            f"{path}, line 1: expected the number of words and their dimension, as in `71290 100`, found {shown!r}. "
            "Is it a file of word vectors?"
        )
    num, dim = map(int, fields)
    if not num or not dim:
        raise DataError(f"{path}, line 1: {num} words of {dim} numbers: expected at least one of each")
    return num, dim


def _is_text(data: mmap.mmap, at: int, dim: int) -> bool:
    """Whether the bytes where the first vector would be are printable.

    Few float32 numbers consist of four printable bytes; `dim` of them in a row do not happen.
    """
    first = data.find(b" ", at, at + _MAX_WORD) + 1
    line = data[first : first + 4 * dim]
    end = line.find(b"\n")  # a text of short numbers: the next line may begin with any letters
    if end > 0 and len(line[:end].split()) == dim:
        line = line[:end]
    return not line.translate(None, _PRINTABLE)


def _read_text(path: str, file: IO[bytes], num: int, dim: int, size: int) -> tuple[list[str], Vectors]:
    words: list[str] = []
    vectors = np.empty((min(num, size // (2 * dim)), dim), np.float32)  # a number and a blank: two bytes at least
    number = 1
    for number, line in enumerate(file, 2):
        word, _, rest = line.partition(b" ")
        if len(words) == num:
            if line.strip():
                raise DataError(
                    f"{path}, line {number}: expected the end, after the {num:,} words that line 1 tells of"
                )
            continue
        fields = rest.split()
        try:
            if not word or len(fields) != dim:
                raise ValueError(f"found {len(fields)} numbers behind '{decoded(word.strip())}'")
            with np.errstate(over="ignore"):  # becomes infinite, which WordVectors reports
                vectors[len(words)] = np.array(fields, np.float32)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: expected a word and {dim} numbers: {error}") from None
        words.append(decoded(word))
    if len(words) < num:
        raise DataError(
            f"{path}, line {number}: the file ends after {len(words):,} words, and its header tells of {num:,}. "
            "Was it cut off?"
        )
    return words, vectors


def _read_binary(path: str, data: mmap.mmap, at: int, num: int, dim: int) -> tuple[list[str], Vectors]:
    size = 4 * dim
    words: list[str] = []
    vectors = np.empty((min(num, len(data) // size), dim), np.float32)
    for i in range(num):
        stop = data.find(b" ", at, at + _MAX_WORD)
        word = decoded(data[at : max(at, stop)].lstrip(b"\n"))  # some programs write a newline after each vector
        place = f"{path} (binary), word {i + 1:,} of {num:,}"
        if stop < 0 or not word:
            raise DataError(f"{place}: expected a word and a blank at byte {at:,} of {len(data):,}. Was it cut off?")
        at = stop + 1 + size
        if at > len(data):
            found = len(data) - stop - 1
            raise DataError(f"{place}, '{word}': expected {size:,} bytes, found {found:,}. Was it cut off?")
        words.append(word)
        vectors[i] = np.frombuffer(data[stop + 1 : at], "<f4")
    if data[at : at + _MAX_WORD].strip():
        raise DataError(
            f"{path} (binary): expected the end at byte {at:,}, after {num:,} words, of {len(data):,} bytes"
        )
    return words, vectors
