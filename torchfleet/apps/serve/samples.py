"""The samples of a request, and several requests joined into one batch: the tensors that a network takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api.serving.network_graph import dtype_named
from torchfleet.base.errors import DataError
from torchfleet.data.features import Feature

Numbers = Any  # a list, as JSON gave it, or a flat array


@dataclass
class Samples:
    """The samples of one request: flat values by feature, and for ragged features the number of values per sample.

    Features that the request does not give are not in `values`. `packed` replaces `values` if the request gives all
    features as plain numbers: a block for each type, with a row per sample and the columns of Packing.
    """

    num: int
    values: dict[str, Numbers]
    lengths: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    packed: dict[str, npt.NDArray[Any]] | None = None
    decoded_by: object = None  # a batch has samples of one


class Packing:
    """The columns of packed samples: features of one type stand beside each other in one block."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self.is_possible = all(feature.shape is not None for feature in features)
        self.types: dict[str, list[Feature]] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.places: dict[str, tuple[Feature, int, int]] = {}  # by name: the feature, its columns from .. to
        self.widths: dict[str, int] = {}
        for feature in features if self.is_possible else ():
            start = self.widths.get(feature.dtype, 0)
            self.places[feature.name] = feature, start, start + feature.num_values
            self.widths[feature.dtype] = start + feature.num_values
            self.types.setdefault(feature.dtype, []).append(feature)
            self.dtypes[feature.dtype] = _numpy_dtype(feature)
        self._limits = self._limits_of_ids()
        self._columns: dict[tuple[str, ...], Any] = {}

    def check(self, blocks: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raise DataError for whole numbers that are no ids of their feature."""
        if self._limits is None:
            return
        block = blocks["int64"]
        if (block.view(np.uint64) >= self._limits).any():  # negative numbers are large without a sign
            for feature, start, end in self.places.values():
                if feature.dtype == "int64" and feature.num_ids is not None:
                    feature.from_numbers(block[:, start:end])

    def _limits_of_ids(self) -> npt.NDArray[np.uint64] | None:
        """For each column of whole numbers, the number that all of its ids are below; None: all columns take any."""
        found = np.full(self.widths.get("int64", 0), np.iinfo(np.uint64).max, np.uint64)
        has_limits = False
        for feature, start, end in self.places.values():
            if feature.dtype == "int64" and feature.num_ids is not None:
                found[start:end], has_limits = feature.num_ids, True
        return found if has_limits else None

    def packed(self, num: int, values: Mapping[str, list[Any]]) -> dict[str, npt.NDArray[Any]]:
        """The blocks of `num` samples from the flat values of every feature."""
        blocks = {}
        with np.errstate(over="ignore"):  # numbers above float32's range become infinite, and are refused as such
            for dtype, features in self.types.items():
                given = list(chain.from_iterable([values[feature.name] for feature in features]))
                flat, start, parts = np.array(given, self.dtypes[dtype]), 0, []
                if num > 1:
                    for feature in features:
                        end = start + num * feature.num_values
                        parts.append(flat[start:end].reshape(num, feature.num_values))
                        start = end
                blocks[dtype] = np.concatenate(parts, axis=1) if parts else flat.reshape(num, -1)
        return blocks

    def unpacked(self, samples: Samples) -> Samples:
        """The same samples with values by feature."""
        if samples.packed is None:
            return samples
        values = {
            name: samples.packed[feature.dtype][:, start:end].reshape(-1)
            for name, (feature, start, end) in self.places.items()
        }
        return Samples(samples.num, values)

    def columns(self, names: tuple[str, ...]) -> Any:
        """The index of the columns of these features, which have one value each, in the block of their type."""
        if names not in self._columns:
            found = [self.places[name][1] for name in names]
            is_run = found == list(range(found[0], found[0] + len(found)))
            self._columns[names] = slice(found[0], found[0] + len(found)) if is_run else np.array(found)
        return self._columns[names]


class BlockValues(Mapping[str, torch.Tensor]):
    """The tensor of each feature in the blocks of packed samples, created on access."""

    def __init__(self, packing: Packing, blocks: Mapping[str, npt.NDArray[Any]]) -> None:
        self._packing, self._blocks = packing, blocks

    def __getitem__(self, name: str) -> torch.Tensor:
        feature, start, end = self._packing.places[name]
        part = torch.from_numpy(self._blocks[feature.dtype][:, start:end])
        if feature.num_values > 1:
            part = part.contiguous()  # a network may view samples as one dimension
        return part if len(feature.shape or ()) == 1 else part.reshape(-1, *(feature.shape or ()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._packing.places)

    def __len__(self) -> int:
        return len(self._packing.places)

    def columns(self, dtype: str, names: tuple[str, ...]) -> npt.NDArray[Any]:
        """Features of this type with one value each, side by side: [samples, len(names)]."""
        return self._blocks[dtype][:, self._packing.columns(names)]


@dataclass
class JoinedBatch:
    """The tensors of several requests, by feature; `offsets` of ragged features, as in fleet.data."""

    num: int
    values: Mapping[str, torch.Tensor]
    offsets: dict[str, torch.Tensor]


class Joiner:
    """Joins requests into batches."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._features = [(feature, _numpy_dtype(feature)) for feature in features]
        self._packing = Packing(features)

    def joined(self, requests: Sequence[Samples]) -> JoinedBatch:
        """One batch of all samples, in the order of the requests. Raises DataError for numbers that are not finite."""
        packed = [request.packed for request in requests if request.packed is not None]
        if len(packed) == len(requests):
            return self._from_packed(packed)
        requests = [self._packing.unpacked(request) for request in requests]
        num = sum(request.num for request in requests)
        values: dict[str, torch.Tensor] = {}
        offsets: dict[str, torch.Tensor] = {}
        for feature, dtype in self._features:
            array = _array([_values(request, feature) for request in requests], dtype)
            _check_finite(array, feature.name)
            if feature.shape is None:
                lengths = np.concatenate([_lengths(request, feature) for request in requests])
                offsets[feature.name] = torch.from_numpy(np.cumsum(lengths) - lengths)
                values[feature.name] = torch.from_numpy(array)
            else:
                values[feature.name] = torch.from_numpy(array.reshape(num, *feature.shape))
        return JoinedBatch(num, values, offsets)

    def _from_packed(self, packed: Sequence[Mapping[str, npt.NDArray[Any]]]) -> JoinedBatch:
        """One block per type: many features cost hardly more than one."""
        blocks: dict[str, npt.NDArray[Any]] = {}
        for dtype, features in self._packing.types.items():
            block = packed[0][dtype] if len(packed) == 1 else np.concatenate([one[dtype] for one in packed])
            _check_finite(block, features[0].name)
            blocks[dtype] = block
        return JoinedBatch(len(block), BlockValues(self._packing, blocks), {})


def _numpy_dtype(feature: Feature) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype_named(feature.dtype)).numpy().dtype


def _check_finite(array: npt.NDArray[Any], name: str) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array.sum()) and not np.isfinite(array).all():
        raise DataError(f"input '{name}', or one of its type: expected finite numbers of {array.dtype.name}")


def _values(request: Samples, feature: Feature) -> Numbers:
    given = request.values.get(feature.name)
    if given is None:
        assert feature.default is not None  # decoding refuses a request without it
        return feature.default * request.num
    return given


def _lengths(request: Samples, feature: Feature) -> npt.NDArray[np.int64]:
    given = request.lengths.get(feature.name)
    return np.full(request.num, len(feature.default or []), np.int64) if given is None else given


def _array(parts: list[Numbers], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """One flat array. Lists of many small requests become one array at once, which is faster than an array for each."""
    with np.errstate(over="ignore"):  # numbers above float32's range become infinite, and are refused as such
        if all([type(part) is list for part in parts]):  # noqa: C419 - a generator takes longer
            return np.array(parts[0] if len(parts) == 1 else list(chain.from_iterable(parts)), dtype)
        return np.concatenate([np.asarray(part).astype(dtype, copy=False) for part in parts])


def split_outputs(
    outputs: Mapping[str, npt.NDArray[Any]], requests: Sequence[Samples]
) -> list[dict[str, npt.NDArray[Any]]]:
    """Each request's part of the results of a batch."""
    if len(requests) == 1:
        return [dict(outputs)]
    ends = np.cumsum([request.num for request in requests]).tolist()
    starts = [0, *ends[:-1]]
    return [
        {name: array[start:end] for name, array in outputs.items()} for start, end in zip(starts, ends, strict=True)
    ]
