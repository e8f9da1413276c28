"""The inputs of a model as programs outside of training give them: numbers, strings to be hashed, or lines of text.

Strings are hashed, missing values are filled and lines are parsed by the same code as files in training.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import DataError
from torchfleet.data.reading.criteo import NUM_SPARSE, CriteoFormat
from torchfleet.data.reading.formats import LineSource, MultiSlotParser
from torchfleet.data.reading.reader import ReadOptions
from torchfleet.data.slots import Batch, Ragged, RowSelection, SampleLayout, Slot
from torchfleet.ps.worker.batch.string_ids import hash_bytes, hash_strings


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One input of a model, per sample: an array of `shape`, or any number of values if `shape` is None.

    A string for an int64 feature becomes `fleet.hash_string(string, hash_seed)`, modulo `hash_size` unless that is 0.
    With a `vocabulary` it becomes its position in it, from 1 on, or 0 if it is not in it. With `buckets`, numbers in
    ascending order, a float becomes the number of buckets that it reaches. Whole numbers are used as ids unchanged.
    `default` has the values for a sample without the feature; None: every sample must have it.
    """

    name: str
    dtype: str = "int64"
    shape: list[int] | None = None
    hash_seed: int = 0
    hash_size: int = 0
    default: list[int | float] | None = None
    vocabulary: list[str] = []
    buckets: list[float] = []

    def __post_init__(self) -> None:
        if self.hash_seed < 0 or self.hash_size < 0 or self.hash_size >= 1 << 63 or self.hash_seed >= 1 << 64:
            raise DataError(f"feature '{self.name}': hash_seed and hash_size must be from 0 up to 64 bits")
        if self.shape is not None and any(size < 0 for size in self.shape):
            raise DataError(f"feature '{self.name}': expected sizes of at least 0 as shape, found {self.shape}")
        self._check_ways()
        if self.default is not None and self.shape is not None and len(self.default) != self.num_values:
            raise DataError(
                f"feature '{self.name}': expected {self.num_values} values as default, found {len(self.default)}"
            )

    @property
    def num_values(self) -> int:
        """The number of values in a sample; 0 for a ragged feature."""
        return math.prod(self.shape) if self.shape is not None else 0

    def _check_ways(self) -> None:
        ways = [name for name in ("vocabulary", "buckets", "hash_size") if getattr(self, name)]
        if len(ways) > 1:
            raise DataError(f"feature '{self.name}': expected one of {' and '.join(ways)}, found both")
        if (self.vocabulary or self.buckets) and self.dtype != "int64":
            raise DataError(f"feature '{self.name}': {ways[0]} gives ids, expected int64 as dtype, found {self.dtype}")
        if any(not low < high for low, high in pairwise(self.buckets)) or not all(map(math.isfinite, self.buckets)):
            raise DataError(f"feature '{self.name}': expected buckets in ascending order, found {self.buckets}")
        if len(set(self.vocabulary)) < len(self.vocabulary):
            raise DataError(f"feature '{self.name}': expected distinct words, found one twice in the vocabulary")

    @property
    def num_ids(self) -> int | None:
        """The number of possible ids, which begin at 0; None: any 64-bit number."""
        if self.vocabulary or self.buckets:
            return 1 + len(self.vocabulary) + len(self.buckets)
        return self.hash_size or None

    def hashed(self, strings: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """The ids of these strings."""
        return self._ids(hash_bytes(strings, np.uint64(self.hash_seed)))

    def ids_of(self, strings: Any) -> npt.NDArray[np.int64]:
        """The ids of strings in an array of numpy or pyarrow, or in a list."""
        return self._ids(hash_strings(strings, self.hash_seed).view(np.uint64))

    def bucketed(self, numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The bucket of each number: how many of `buckets` it reaches."""
        found: npt.NDArray[np.int64] = np.searchsorted(np.array(self.buckets), np.asarray(numbers), side="right")
        return found

    def _ids(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        if self.vocabulary:
            known, places = _words(tuple(self.vocabulary), self.hash_seed)
            at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            found: npt.NDArray[np.int64] = np.where(known[at] == hashes, places[at], 0)
            return found
        return (hashes % np.uint64(self.hash_size) if self.hash_size else hashes).view(np.int64)


@functools.lru_cache(maxsize=256)
def _words(vocabulary: tuple[str, ...], seed: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The hashes of the words in ascending order, and their places in the vocabulary, from 1 on."""
    hashes = hash_bytes([word.encode(errors="surrogateescape") for word in vocabulary], np.uint64(seed))
    order = np.argsort(hashes)
    if (hashes[order][1:] == hashes[order][:-1]).any():
        raise DataError("two words of a vocabulary have one hash: give the feature another hash_seed")
    return hashes[order], order + 1


class SlotField(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A fleet.Slot, as it is saved."""

    name: str
    dtype: str = "int64"
    dim: int | None = None


class SampleText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The format and the slots of lines of text that training reads without a program of the user's."""

    kind: Literal["criteo", "slots"]
    slots: list[SlotField]
    hash_size: int = 0
    log_scale: bool = False

    def options(self) -> ReadOptions:
        """The read options of the dataset."""
        slots = [Slot(slot.name, slot.dtype, slot.dim) for slot in self.slots]
        form = CriteoFormat(self.hash_size, self.log_scale) if self.kind == "criteo" else None
        return ReadOptions(slots, data_format=form)


class TextSamples:
    """Parses lines into batches, as a dataset does. Used by one thread."""

    def __init__(self, described: SampleText) -> None:
        options = described.options()
        self._layout = SampleLayout(options.use_var)
        form = options.data_format
        is_criteo = isinstance(form, CriteoFormat)
        self._parser = form.parser(self._layout) if is_criteo else MultiSlotParser(self._layout)  # type: ignore[union-attr]

    def batch(self, lines: Sequence[bytes]) -> Batch:
        """One sample per line. Raises DataError, which names the line, if one is malformed."""
        for number, line in enumerate(lines, 1):
            if b"\n" in line:
                raise DataError(f"line {number}: expected one line of text, found a line break in it")
        whole = b"".join(line + b"\n" for line in lines)
        rows = list(self._parser.read([whole], LineSource("the request")))
        return self._layout.batch([RowSelection(some, np.arange(some.num)) for some in rows])


def text_of(options: ReadOptions | None) -> SampleText | None:
    """What to save of a dataset's settings; None if its lines go through a program, or if it does not read text."""
    if options is None or options.pipe_command is not None:
        return None
    slots = [SlotField(slot.name, slot.dtype, slot.dim) for slot in options.use_var]
    form = options.data_format
    if isinstance(form, CriteoFormat):
        return SampleText("criteo", slots, form.hash_size, form.log_scale)
    return SampleText("slots", slots) if form is None else None


def as_in_text(feature: Feature, described: SampleText) -> Feature:
    """The feature with the hash of its field in lines of text, and the values of an empty field as its default."""
    if described.kind != "criteo" or feature.name not in {slot.name for slot in described.slots}:
        return feature
    empty = TextSamples(described).batch([b"0" + b"\t" * (13 + NUM_SPARSE)])[feature.name]
    values = empty.values if isinstance(empty, Ragged) else empty
    column = int(feature.name[1:]) if feature.name[1:].isdigit() and feature.name[0] == "C" else 0
    hashes = {"hash_seed": column, "hash_size": described.hash_size} if column else {}
    return msgspec.structs.replace(feature, default=values.flatten().tolist(), **hashes)
