"""Parsers: from a stream of bytes to rows. Malformed lines raise an error, or are skipped and counted."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import DataError
from torchfleet.data.sample_rows import SampleRows
from torchfleet.data.slots import SampleLayout
from torchfleet.ps.kernels import numerals, text

_TENS, _FIVES = numerals.powers_of_ten()
MAX_LINE = 1 << 28
_PADDING = bytes(8)  # the kernels read whole words
_SHOWN = 40
_END = re.compile(rb"[ \t\r\n]")
MARK = b"!bad "  # marks a bad line in the output of a generator script: "!bad 17: ValueError: ..."

Bytes = npt.NDArray[np.uint8]


@dataclass
class Skipped:
    """The skipped lines of one file: how many, and the reason of the first."""

    num: int = 0
    first: str = ""

    def add(self, reason: str) -> None:
        self.num += 1
        self.first = self.first or reason


@dataclass
class LineSource:
    """The file that lines come from, with its name for messages, and what to do with malformed lines."""

    name: str
    skip: bool = False
    skipped: Skipped = field(default_factory=Skipped)

    def refuse(self, line: int, reason: str) -> None:
        """Raise DataError for a malformed line, or count it if such lines are skipped."""
        message = f"{self.name}, line {line}{reason}"
        if not self.skip:
            raise DataError(message)
        self.skipped.add(message)


class Parser(ABC):
    """Turns chunks of text into rows. Used by one thread: its scratch memory is reused."""

    words_per_byte = 1  # upper bound: 32-bit words of a row per byte of text

    def __init__(self) -> None:
        self._words = np.empty(0, np.uint32)
        self._starts = np.empty(0, np.int64)
        self.result = np.zeros(text.RESULT_SIZE, np.int64)
        self._line = 1

    def read(self, chunks: Iterable[bytes], source: LineSource) -> Iterator[SampleRows]:
        """The rows of all lines; a chunk may end anywhere in a line."""
        self._line = 1
        rest: list[bytes] = []  # of an incomplete line
        size = 0
        try:
            for chunk in chunks:
                cut = chunk.rfind(b"\n") + 1
                if cut:
                    whole = b"".join((*rest, memoryview(chunk)[:cut], _PADDING))
                    rest, size = [chunk[cut:]], len(chunk) - cut
                    yield from self._parse(whole, source)
                    continue
                rest.append(chunk)
                size += len(chunk)
                if size > MAX_LINE:
                    raise DataError(
                        f"{source.name}, line {self._line}: longer than {MAX_LINE:,} bytes; is this a text file?"
                    )
            if size:
                yield from self._parse(b"".join((*rest, b"\n", _PADDING)), source)
        finally:  # end the command now: a stored error would keep this frame, and the command, alive
            close = getattr(chunks, "close", None)
            if close is not None:
                close()

    def _parse(self, data: bytes, source: LineSource) -> Iterator[SampleRows]:
        """The rows of whole lines, which are followed by padding. Malformed lines are passed to `source.refuse`."""
        array = np.frombuffer(data, np.uint8)
        end_of_text = len(data) - len(_PADDING)
        self._make_room(end_of_text)
        at = 0
        while at < end_of_text:
            num = self._parse_some(array, at, end_of_text)
            at = int(self.result[text.STOPPED_AT])
            self._line += num
            if num:
                yield SampleRows(self._words[: self.result[text.NUM_WORDS]].copy(), self._starts[: num + 1].copy())
            if self.result[text.REASON] != text.FINE:
                end = data.index(b"\n", at)
                if data.startswith(MARK, at):
                    source.refuse(self._line, ": " + data[at + len(MARK) : end].decode(errors="replace").strip())
                else:
                    source.refuse(self._line, self.reason(data[at:end], at))
                at = end + 1
                self._line += 1

    def _make_room(self, num_bytes: int) -> None:
        num_words = num_bytes * self.words_per_byte + 16
        if len(self._words) < num_words:
            self._words = np.empty(num_words, np.uint32)
            self._starts = np.empty(num_bytes // 2 + 3, np.int64)

    @abstractmethod
    def _parse_some(self, array: Bytes, at: int, end: int) -> int:
        """Parse from `at` to `end` into the scratch memory, up to a malformed line; returns the number of rows."""

    @abstractmethod
    def reason(self, line: bytes, begin: int) -> str:
        """Why the line that begins at byte `begin` was refused: ", slot 'a': expected ..., found ..."."""


class MultiSlotParser(Parser):
    """The multi-slot text format."""

    def __init__(self, layout: SampleLayout) -> None:
        super().__init__()
        self._layout = layout
        self._bits = np.zeros(1, np.uint64)
        self._hard = np.empty((1024, 5), np.int64)

    def _parse_some(self, array: Bytes, at: int, end: int) -> int:
        layout = self._layout
        while True:
            num = text.parse_slots(
                array, at, end, layout.is_float, layout.dims, _TENS, _FIVES, self._bits,
                self._bits.view(np.float64), self._words, self._words.view(np.float32), self._starts, self._hard,
                self.result,
            )  # fmt: skip
            if self.result[text.NUM_HARD] >= 0:
                break
            self._hard = np.empty((2 * len(self._hard), 5), np.int64)
        return self._settle_hard(array, int(num))

    def _settle_hard(self, array: Bytes, num: int) -> int:
        """Convert the numbers that the kernel left to Python. One out of float32's range makes its line malformed."""
        floats = self._words.view(np.float32)
        for word, byte, row, line, slot in self._hard[: self.result[text.NUM_HARD]].tolist():
            value = float(_token_at(array, byte))
            if abs(value) >= numerals.MAX_FLOAT32:
                self.result[text.STOPPED_AT], self.result[text.NUM_WORDS] = line, self._starts[row]
                self.result[text.REASON], self.result[text.SLOT] = text.OUT_OF_RANGE, slot
                self.result[text.PLACE] = byte
                return int(row)
            floats[word] = value
        return num

    def reason(self, line: bytes, begin: int) -> str:
        reason, slot, place, extra = self.result[[text.REASON, text.SLOT, text.PLACE, text.EXTRA]].tolist()
        found = _token(line[max(0, place - begin) :]).decode(errors="replace")
        shown = repr(found if len(found) <= _SHOWN else found[:_SHOWN] + "...")
        slots = self._layout.slots
        if reason == text.EMPTY:
            return ": expected a sample, found an empty line"
        if reason == text.LEFT_OVER:
            return f": expected the end of the line after slot '{slots[-1].name}', found {shown}"
        where, dim = f", slot '{slots[slot].name}'", slots[slot].dim
        kind = "an integer" if slots[slot].dtype == "int64" else "a number"
        texts: dict[int, Callable[[], str]] = {
            text.NO_COUNT: lambda: f"expected a count, found the end of the line (slot {slot + 1} of {len(slots)})",
            text.BAD_COUNT: lambda: f"expected a count, found {shown}",
            text.WRONG_COUNT: lambda: f"expected {dim} values (dim={dim}), found a count of {extra}",
            text.NO_VALUE: lambda: f"expected {extra >> 31} values, found {extra & 0x7FFFFFFF} and the end of the line",
            text.BAD_INT: lambda: f"expected {kind}, found {shown}",
            text.BAD_FLOAT: lambda: f"expected a finite number, found {shown}",
            text.OUT_OF_RANGE: lambda: f"expected {kind} that fits {slots[slot].dtype}, found {shown}",
        }
        return f"{where}: {texts[reason]()}"


def _token_at(array: Bytes, at: int) -> bytes:
    """The bytes from `at` to the next blank, tab, carriage return or newline."""
    size = 64
    while not (found := _END.search(data := array[at : at + size].tobytes())):
        size *= 4
    return data[: found.start()]


def _token(data: bytes) -> bytes:
    return _END.split(data, maxsplit=1)[0]
