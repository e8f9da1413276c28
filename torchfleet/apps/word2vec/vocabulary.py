"""The vocabulary of a corpus: words, their counts and their ids."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import DataError
from torchfleet.data.reading import streams

UNKNOWN = "<UNK>"  # stands for all words that are too rare for an id of their own
_MAX_COUNT = 1 << 53


class Vocabulary:
    """A word's id is its index in `words`. Words that are not UTF-8 are kept with Python's surrogates."""

    def __init__(self, words: Sequence[str], counts: npt.ArrayLike) -> None:
        self.words = list(words)
        self.counts: npt.NDArray[np.int64] = np.array(counts, np.int64)
        self._ids = {word: number for number, word in enumerate(self.words)}
        if len(self.words) != len(self.counts) or len(self._ids) != len(self.words) or not self.words:
            raise DataError(
                f"a vocabulary needs words, all different, and a count for each; found {len(self.words)} words, "
                f"{len(self._ids)} of them different, and {len(self.counts)} counts"
            )
        if self.counts.min() < 1:
            raise DataError(f"a vocabulary needs counts of at least 1, found {self.counts.min()}")
        self.unknown: int | None = self._ids.get(UNKNOWN)
        self.total = sum(self.counts.tolist())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Load lines of `word count`, in any order. Any other line raises DataError with file and line."""
        path = os.fspath(path)
        lines = b"".join(streams.chunks(streams.open_file(path), path)).split(b"\n")
        if lines[-1] == b"":
            lines.pop()
        if not any(line.strip() for line in lines):
            raise DataError(f"{path} has no words: expected lines of `word count`")
        words: dict[str, int] = {}
        for number, line in enumerate(lines, 1):
            fields = line.split()
            if len(fields) != 2 or not fields[1].isdigit():
                raise DataError(f"{path}, line {number}: expected `word count`, found {_shown(line)}")
            word, count = decoded(fields[0]), int(fields[1]) if len(fields[1]) < 20 else _MAX_COUNT + 1
            if not 1 <= count <= _MAX_COUNT:
                raise DataError(f"{path}, line {number}: expected a count of at least 1, found {_shown(line)}")
            if word in words:
                raise DataError(f"{path}, line {number}: the word {_shown(fields[0])} is there twice; remove a line")
            words[word] = count
        return cls(list(words), list(words.values()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write lines of `word count`. The file appears when complete."""
        write_lines(path, self._lines())

    def save_ids(self, path: str | os.PathLike[str]) -> None:
        """Write lines of `word id`. The file appears when complete."""
        write_lines(path, (b"%b %d\n" % (word, number) for number, word in enumerate(self.encoded())))

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    def id_of(self, word: str) -> int | None:
        return self._ids.get(word)

    def encoded(self) -> Iterable[bytes]:
        """The words' bytes, as in the text."""
        return map(encoded, self.words)

    @cached_property
    def fingerprint(self) -> int:
        """CRC-32 of the lines of `word count`: equal for equal vocabularies."""
        return zlib.crc32(b"".join(self._lines()))

    def _lines(self) -> Iterable[bytes]:
        return (b"%b %d\n" % both for both in zip(self.encoded(), self.counts.tolist(), strict=True))


def write_lines(path: str | os.PathLike[str], lines: Iterable[bytes]) -> None:
    """Write to a temporary file and rename it: a file at `path` is always complete."""
    path = os.fspath(path)
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(f"{path}.tmp", "wb") as file:
            file.writelines(lines)
        os.replace(f"{path}.tmp", path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({type(error).__name__}: {error})") from error


def encoded(word: str) -> bytes:
    """The bytes of a word, usually UTF-8; other bytes are restored unchanged."""
    return word.encode(errors="surrogateescape")


def decoded(word: bytes) -> str:
    return word.decode(errors="surrogateescape")


def _shown(text: bytes) -> str:
    decoded = text.decode(errors="backslashreplace")
    return repr(decoded if len(decoded) <= 40 else decoded[:40] + "...")
