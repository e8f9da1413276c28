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

    Features that the request does not give are not in `values`.
    """

    num: int
    values: dict[str, Numbers]
    lengths: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)


@dataclass
class JoinedBatch:
    """The tensors of several requests, by feature; `offsets` of ragged features, as in fleet.data."""

    num: int
    values: dict[str, torch.Tensor]
    offsets: dict[str, torch.Tensor]


class Joiner:
    """Joins requests into batches."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._features = [(feature, _numpy_dtype(feature)) for feature in features]

    def joined(self, requests: Sequence[Samples]) -> JoinedBatch:
        """One batch of all samples, in the order of the requests. Raises DataError for numbers that are not finite."""
        num = sum(request.num for request in requests)
        values: dict[str, torch.Tensor] = {}
        offsets: dict[str, torch.Tensor] = {}
        for feature, dtype in self._features:
            array = _array([_values(request, feature) for request in requests], dtype)
            if dtype.kind == "f" and not np.isfinite(array.sum()) and not np.isfinite(array).all():
                raise DataError(f"input '{feature.name}': expected finite numbers of {feature.dtype}")
            if feature.shape is None:
                lengths = np.concatenate([_lengths(request, feature) for request in requests])
                offsets[feature.name] = torch.from_numpy(np.cumsum(lengths) - lengths)
                values[feature.name] = torch.from_numpy(array)
            else:
                values[feature.name] = torch.from_numpy(array.reshape(num, *feature.shape))
        return JoinedBatch(num, values, offsets)


def _numpy_dtype(feature: Feature) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype_named(feature.dtype)).numpy().dtype


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
    with np.errstate(over="ignore"):  # numbers above float32's range become infinite, and are refused as such
        if all(type(part) is list for part in parts):
            return np.array(list(chain.from_iterable(parts)), dtype)
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
