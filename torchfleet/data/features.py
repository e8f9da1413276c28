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

Mask = npt.NDArray[np.bool_]

_FLOATS = {"float16", "float32", "float64"}


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One input of a model, per sample: an array of `shape`, or any number of values if `shape` is None.

    With a `vocabulary`, a string becomes its position in it, from 1 on, or 0 if it is not in it. With `buckets`,
    numbers in ascending order, a number becomes the number of buckets that it reaches; edges and numbers are compared
    in float32. With `hash_size`, a string becomes `fleet.hash_string(string, hash_seed)` modulo `hash_size`, and whole
    numbers must be such ids. An int64 feature with none of the three takes whole numbers as ids, and the hashes of
    strings. A float feature takes finite numbers that fit its type.

    `missing` stands for a null, and for nan in an array of floats; None: they are refused. For ids it is one of them,
    or the next one. `default` has the values for a sample without the feature; None: every sample must have it.
    """

    name: str
    dtype: str = "int64"
    shape: list[int] | None = None
    hash_seed: int = 0
    hash_size: int = 0
    default: list[int | float] | None = None
    vocabulary: list[str] = []
    buckets: list[float] = []
    missing: int | float | None = None

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
        self._check_missing()

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
        self._check_edges()
        if len(set(self.vocabulary)) < len(self.vocabulary):
            raise DataError(f"feature '{self.name}': expected distinct words, found one twice in the vocabulary")

    def _check_edges(self) -> None:
        edges = self._edges().tolist()
        for i, (low, high) in enumerate(pairwise(edges)):
            if not low < high:
                raise DataError(
                    f"feature '{self.name}': expected buckets that differ in float32, in which numbers are compared; "
                    f"found {self.buckets[i]!r} and {self.buckets[i + 1]!r}, which are both {low!r}"
                )
        if not all(map(math.isfinite, edges)):
            raise DataError(f"feature '{self.name}': expected buckets that float32 can hold, found {self.buckets}")

    def _check_missing(self) -> None:
        if self.missing is None:
            return
        if isinstance(self.missing, bool) or not isinstance(self.missing, (int, float)):
            raise DataError(f"feature '{self.name}': expected a number as missing, found {self.missing!r:.80}")
        if self.is_float:
            if not np.isfinite(_as_floats(np.array([self.missing]), self.dtype)).all():
                raise DataError(
                    f"feature '{self.name}': expected as missing a number that {self.dtype} can hold, found "
                    f"{self.missing}"
                )
            return
        most = (1 << 63) - 1 if self._num_own_ids is None else self._num_own_ids
        least = -(1 << 63) if self._num_own_ids is None else 0
        if self.dtype != "int64" or not isinstance(self.missing, int) or not least <= self.missing <= most:
            raise DataError(
                f"feature '{self.name}': expected an id from {least} to {most} as missing, of an int64 feature, found "
                f"{self.missing} for {self.dtype}"
            )

    @property
    def is_float(self) -> bool:
        """Whether the model takes floats, not ids."""
        return self.dtype in _FLOATS

    @property
    def is_plain(self) -> bool:
        """Whether the model takes the numbers of a request as they are."""
        return not (self.vocabulary or self.buckets)

    @property
    def takes_strings(self) -> bool:
        """Whether strings become ids of this feature."""
        return self.dtype == "int64" and not self.buckets

    @property
    def _num_own_ids(self) -> int | None:
        """As num_ids, without that of missing values."""
        if self.vocabulary or self.buckets:
            return 1 + len(self.vocabulary) + len(self.buckets)
        return self.hash_size or None

    @property
    def num_ids(self) -> int | None:
        """The number of possible ids, which begin at 0; None: any 64-bit number."""
        own = self._num_own_ids
        return None if own is None else own + (self.missing == own)

    def from_strings(self, strings: Any, is_missing: Mask | None = None) -> npt.NDArray[np.int64]:
        """The ids of a list of byte strings, or of an array of numpy or pyarrow. Raises DataError if the feature takes
        no strings, or no missing values. `is_missing`: a mask; what stands in these places is not used.
        """
        if not self.takes_strings:
            raise self._error(f"numbers{' for its buckets' if self.buckets else f' ({self.dtype})'}", "strings")
        ids = self.hashed(strings) if isinstance(strings, list) else self.ids_of(strings)
        return self._filled(ids, is_missing)

    def from_numbers(self, numbers: npt.NDArray[Any], is_missing: Mask | None = None) -> npt.NDArray[Any]:
        """The ids of an array of numbers, or the numbers in the feature's type. Raises DataError for those that the
        feature does not take. `is_missing`: a mask; what stands in these places is not used.
        """
        if self.vocabulary:
            raise self._error("strings, of which the vocabulary has some", f"numbers ({numbers.dtype})")
        if self.buckets or self.is_float:
            return self._from_floats(numbers, is_missing)
        ids = self._whole(numbers)
        if self.hash_size:
            is_wrong = (ids < 0) | (ids >= self.num_ids)
            is_wrong = is_wrong if is_missing is None else is_wrong & ~is_missing
            if is_wrong.any():
                raise self.error_of_id(int(ids[is_wrong][0]))
        return self._filled(ids, is_missing)

    def bucketed(self, numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The bucket of each number: how many of `buckets` it reaches, in float32."""
        values = _as_floats(np.asarray(numbers), "float32")
        found: npt.NDArray[np.int64] = np.searchsorted(self._edges(), values, side="right")
        return found

    def from_missing(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The values of an array in which all are missing."""
        return self._filled(np.zeros(shape, self.dtype), np.ones(shape, np.bool_))

    def hashed(self, strings: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """The ids of these strings."""
        return self._ids(hash_bytes(strings, np.uint64(self.hash_seed)))

    def ids_of(self, strings: Any) -> npt.NDArray[np.int64]:
        """The ids of strings in an array of numpy or pyarrow, or in a list."""
        return self._ids(hash_strings(strings, self.hash_seed).view(np.uint64))

    def error_of_id(self, found: int) -> DataError:
        """The error for a whole number that is none of the ids that hash_size allows."""
        wanted = f"strings, which are hashed, or their ids, from 0 up to {self.num_ids}"
        return self._error(wanted, f"{found}. Give numbers that are to be hashed as strings")

    def _ids(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        if self.vocabulary:
            known, places = _words(tuple(self.vocabulary), self.hash_seed)
            at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            found: npt.NDArray[np.int64] = np.where(known[at] == hashes, places[at], 0)
            return found
        return (hashes % np.uint64(self.hash_size) if self.hash_size else hashes).view(np.int64)

    def _from_floats(self, numbers: npt.NDArray[Any], is_missing: Mask | None) -> npt.NDArray[Any]:
        if numbers.dtype.kind not in "iuf":
            raise self._error("numbers", str(numbers.dtype))
        values = _as_floats(numbers, "float32" if self.buckets else self.dtype)
        is_nan = np.isnan(values)
        is_missing = is_nan if is_missing is None else is_missing | is_nan
        is_wrong = ~(np.isfinite(values) | is_missing)
        if is_wrong.any():
            wanted = f"finite numbers that {values.dtype.name} can hold"
            raise self._error(wanted, repr(numbers[is_wrong][0].item()))
        found = self.bucketed(values) if self.buckets else values
        return self._filled(found, is_missing)

    def _whole(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Whole numbers, or booleans for a feature of booleans, in the feature's type."""
        found, wanted = numbers.dtype.kind, np.dtype(self.dtype)
        if found != wanted.kind and (found, wanted.kind) != ("u", "i"):
            or_strings = ", or strings" if self.takes_strings else ""
            raise self._error(f"{self.dtype}{or_strings}", str(numbers.dtype))
        if found == "u" and numbers.dtype.itemsize == 8 and self.dtype == "int64":
            return numbers.view(np.int64)  # ids from 2^63 on are kept as the same 64 bits
        if numbers.dtype.itemsize > wanted.itemsize and numbers.size:
            info = np.iinfo(wanted)
            if numbers.min() < info.min or numbers.max() > info.max:
                raise self._error(f"numbers that fit {self.dtype}", f"{numbers.min()} to {numbers.max()}")
        return np.ascontiguousarray(numbers, wanted)

    def _filled(self, values: npt.NDArray[Any], is_missing: Mask | None) -> npt.NDArray[Any]:
        if is_missing is None or not is_missing.any():
            return values
        if self.missing is None:
            num = np.count_nonzero(is_missing)
            raise self._error(
                "a value in each place",
                f"{num} of {is_missing.size} that are null or nan. missing= of the feature says which id or "
                "number stands for them",
            )
        return np.where(is_missing, values.dtype.type(self.missing), values)

    def _edges(self) -> npt.NDArray[Any]:
        """The buckets in the type in which numbers are compared with them."""
        return _as_floats(np.array(self.buckets, np.float64), "float32")

    def _error(self, expected: str, found: str) -> DataError:
        return DataError(f"feature '{self.name}': expected {expected}, found {found}")


class FormerFeature(Feature, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A feature of serving.json in version 1, whose requests keep the rule of then.

    Floats were compared with buckets in float64, or float32 if the request gave that. Whole numbers were ids as they
    were, whatever the buckets, vocabulary or hash size; strings were hashed for buckets, too.
    """

    @property
    def is_plain(self) -> bool:
        return True

    @property
    def num_ids(self) -> int | None:
        return None  # whole numbers were not checked

    def bucketed(self, numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The bucket of each number: how many of `buckets` it reaches."""
        found: npt.NDArray[np.int64] = np.searchsorted(np.array(self.buckets), np.asarray(numbers), side="right")
        return found

    def _check_edges(self) -> None:
        pass


def _as_floats(numbers: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """The numbers in this type; those out of its range become infinite.

    Whole numbers become float64 first, as numbers in JSON do, so that both are rounded alike.
    """
    with np.errstate(over="ignore"):
        return numbers.astype(np.float64 if numbers.dtype.kind in "iu" else numbers.dtype).astype(dtype)


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
