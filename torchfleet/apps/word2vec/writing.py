"""Writes a folder of id files atomically: it is complete or does not exist."""

from __future__ import annotations

import contextlib
import os
import shutil
from types import TracebackType
from typing import BinaryIO

import msgspec
import numpy as np

from torchfleet.apps.word2vec.corpus import DESCRIPTION, UNFINISHED, Description, Ids
from torchfleet.base.errors import DataError
from torchfleet.ps.kernels import words

_BUFFER = 1 << 22  # bytes of text that are written at once


class NewCorpus:
    """A folder that gets its files when all are written. Until then it contains only a folder `_unfinished`.

    After an exception, the folder is unchanged. The next run removes what a killed run has left.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._unfinished, self._is_new = os.path.join(self.path, UNFINISHED), not os.path.exists(self.path)
        self._in_place: list[str] = []

    def __enter__(self) -> NewCorpus:
        try:
            names = [] if self._is_new else sorted(set(os.listdir(self.path)) - {UNFINISHED})
            if names:
                raise DataError(f"{self.path} holds files already ({names[0]}): expected an empty folder, or none")
            shutil.rmtree(self._unfinished, ignore_errors=True)
            os.makedirs(self._unfinished)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written to ({type(error).__name__}: {error})") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place in self._in_place if error is not None else ():
            with contextlib.suppress(OSError):
                os.remove(place)
        shutil.rmtree(self._unfinished, ignore_errors=True)
        if error is not None and self._is_new:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
        if isinstance(error, OSError):
            raise DataError(f"{self.path}: cannot be written to ({type(error).__name__}: {error})") from error

    def writer(self, name: str) -> IdWriter:
        return IdWriter(os.path.join(self._unfinished, name))

    def finish(self, description: Description) -> None:
        """Move all files to their final names, the description last."""
        with open(os.path.join(self._unfinished, DESCRIPTION), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(description), indent=2) + b"\n")
        for name in (*description.files, DESCRIPTION):
            self._in_place.append(os.path.join(self.path, name))
            os.replace(os.path.join(self._unfinished, name), self._in_place[-1])


class IdWriter:
    """A file of ids that is being written. `state` and `buffer` are for the kernels, which stop at a full buffer."""

    def __init__(self, path: str) -> None:
        self.state = np.zeros(words.WRITER_STATE_SIZE, np.int64)
        self.buffer = np.empty(_BUFFER, np.uint8)
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115  (closed by its own __exit__)

    def __enter__(self) -> IdWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the last line and close the file."""
        with self._file:
            if kind is None:
                self.make_room()
                self._file.write(b"\n" if self.state[words.OUT_OPEN] else b"")

    @property
    def num_words(self) -> int:
        return int(self.state[words.NUM_WRITTEN])

    def write(self, ids: Ids, begin: int, max_words: int) -> int:
        """Write ids[begin:], at most `max_words` words; returns the index after these and the line ends behind them."""
        at, before = begin, self.num_words
        while True:
            at = int(words.write_ids(ids, at, max_words - (self.num_words - before), self.buffer, self.state))
            if at == len(ids) or self.num_words - before == max_words:
                return at
            self.make_room()

    def make_room(self) -> None:
        rest = self.buffer[: self.state[words.OUT_USED]].data
        while rest:
            rest = rest[self._file.write(rest) :]
        self.state[words.OUT_USED] = 0
