"""Samples of requests, and several requests joined into one batch: the tensors that a network takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The samples of one request: flat values by feature, and of ragged features the number of values per sample.

    Features that the request does not give are not in `values`. `packed` stands for `values` where a request gives all
    features as plain JSON: a list for each type, with the values of one feature after the other.
    """

    num: int
    values: dict[str, Numbers]
    lengths: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    packed: dict[str, list[Any]] | None = None


@dataclass
class JoinedBatch:
    """The tensors of several requests, by feature; `offsets` of ragged features, as in fleet.data."""

    num: int
    values: dict[str, torch.Tensor]
    offsets: dict[str, torch.Tensor]


class Packing:
    """The order of features in packed samples: those of one type stand together."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self.is_possible = all(feature.shape is not None for feature in features)
        self.types: dict[str, list[Feature]] = {}
        for feature in features:
            self.types.setdefault(feature.dtype, []).append(feature)
        self.widths = {dtype: [feature.num_values for feature in some] for dtype, some in self.types.items()}

    def unpacked(self, samples: Samples) -> Samples:
        """The same samples with values by feature."""
        if samples.packed is None:
            return samples
        values: dict[str, Numbers] = {}
        for dtype, flat in samples.packed.items():
            start = 0
            for feature in self.types[dtype]:
                end = start + samples.num * feature.num_values
                values[feature.name] = flat[start:end]
                start = end
        return Samples(samples.num, values)


class Joiner:
    """Joins requests into batches."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._features = [(feature, _numpy_dtype(feature)) for feature in features]
        self._dtypes = {feature.dtype: dtype for feature, dtype in self._features}
        self._packing = Packing(features)

    def joined(self, requests: Sequence[Samples]) -> JoinedBatch:
        """One batch of all samples, in the order of the requests. Raises DataError for numbers that are not finite."""
        size = requests[0].num
        if all(request.packed is not None and request.num == size for request in requests):
            return JoinedBatch(size * len(requests), self._from_packed(requests, size), {})
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

    def _from_packed(self, requests: Sequence[Samples], size: int) -> dict[str, torch.Tensor]:
        """One array per type, and views of it: many features cost hardly more than one."""
        values: dict[str, torch.Tensor] = {}
        for dtype, features in self._packing.types.items():
            flat = _array([request.packed[dtype] for request in requests], self._dtypes[dtype])  # type: ignore[index]
            _check_finite(flat, features[0].name)
            whole = torch.from_numpy(flat.reshape(len(requests), -1))
            parts = torch.split(whole, [size * width for width in self._packing.widths[dtype]], dim=1)
            for feature, part in zip(features, parts, strict=True):
                is_shaped = size == 1 and len(feature.shape or ()) == 1
                values[feature.name] = part if is_shaped else part.reshape(-1, *(feature.shape or ()))
        return values


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
    """One flat array. Lists of many small requests become one array at once, which is faster than one each."""
    if all([type(part) is list for part in parts]):  # noqa: C419 - a generator takes longer
        return np.array(parts[0] if len(parts) == 1 else list(chain.from_iterable(parts)), dtype)
    with np.errstate(over="ignore"):  # numbers above float32's range become infinite, and are refused as such
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
