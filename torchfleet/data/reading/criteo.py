"""Parses the raw text of the Criteo display advertising challenge into samples."""

from __future__ import annotations

import numpy as np

from torchfleet.base.errors import DataError
from torchfleet.data.reading.formats import Bytes, Parser
from torchfleet.data.slots import SampleLayout, Slot
from torchfleet.ps.kernels import text

NUM_DENSE, NUM_SPARSE = 13, 26
LOW = np.array([0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], np.float64)
RANGE = np.array([20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50], np.float64)  # to the 95th percentile


class CriteoFormat:
    """Maps `label \\t I1..I13 \\t C1..C26` to `dense_input`, `C1`..`C26` and `label`, as in docs/data.md."""

    def __init__(self, hash_size: int = 1_000_001, log_scale: bool = False) -> None:
        if not isinstance(hash_size, int) or not 1 <= hash_size < 1 << 63:
            raise DataError(f"CriteoFormat: hash_size must be at least 1 and below 2^63, found {hash_size!r}")
        self.hash_size, self.log_scale = hash_size, log_scale

    @staticmethod
    def slots() -> list[Slot]:
        ids = [Slot(f"C{i}", dim=1) for i in range(1, NUM_SPARSE + 1)]
        return [Slot("dense_input", dtype="float32", dim=NUM_DENSE), *ids, Slot("label", dim=1)]

    def parser(self, layout: SampleLayout) -> Parser:
        """The parser for these slots: those of `slots()`, with all ids of `dim=1` or all without `dim`."""
        ragged = [Slot(slot.name) if slot.name.startswith("C") else slot for slot in self.slots()]
        if list(layout.slots) not in (self.slots(), ragged):
            raise DataError(
                "CriteoFormat fills the slots of fleet.CriteoFormat.slots() (dense_input, C1..C26, label): "
                f"give these as use_var; found {', '.join(slot.name for slot in layout.slots)}"
            )
        return CriteoParser(self, is_ragged=layout.slots[1].dim is None)


class CriteoParser(Parser):
    words_per_byte = 3  # an empty field is one tab, and yields a count and an id of two words

    def __init__(self, options: CriteoFormat, is_ragged: bool) -> None:
        super().__init__()
        self._options, self._is_ragged = options, is_ragged

    def _parse_some(self, array: Bytes, at: int, end: int) -> int:
        hash_size, log_scale = np.uint64(self._options.hash_size), self._options.log_scale
        floats = self._words.view(np.float32)
        num: int = text.parse_criteo(
            array, at, end, self._is_ragged, LOW, RANGE, hash_size, log_scale, self._words, floats, self._starts,
            self.result,
        )  # fmt: skip
        return num

    def reason(self, line: bytes, begin: int) -> str:
        reason, column, place = self.result[[text.REASON, text.SLOT, text.PLACE]].tolist()
        num = line.count(b"\t") + 1
        field = line[place - begin :].split(b"\t", 1)[0].decode(errors="replace")
        shown = repr(field if len(field) <= 40 else field[:40] + "...")
        if reason == text.EMPTY:
            return ": expected a row, found an empty line"
        if reason in (text.TOO_FEW_COLUMNS, text.TOO_MANY_COLUMNS):
            return f": expected 40 columns separated by tabs, found {num}"
        if reason == text.BAD_LABEL:
            return f", column 1: expected the label 0 or 1, found {shown}"
        return f", column {column + 1}: expected an integer or nothing, found {shown}"
