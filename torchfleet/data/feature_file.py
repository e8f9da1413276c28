"""A file of features that training and serving share: their names, vocabularies, buckets, hashes and crosses.

[[feature]]
name = "city"
vocabulary = ["Berlin", "Paris"]        # 1 and 2; all others are 0

[[feature]]
name = "age"
buckets = [18, 30, 50]                  # 0: below 18, 1: below 30, ...

[[feature]]
name = "user"
hash_size = 1000000

[[cross]]
name = "city_age"
of = ["city", "age"]
size = 10000
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from torchfleet.base.errors import DataError
from torchfleet.base.prepared_types import prepared
from torchfleet.data.features import Feature
from torchfleet.data.raw_columns import raw_column

_MULTIPLIER = 0x5851F42D4C957F2D  # odd, and below 2^63: torch computes in signed numbers
_MASK = (1 << 31) - 1


class Cross(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A feature made of several others: each combination of their ids gets one of `size` ids."""

    name: str
    of: list[str]
    size: int

    def __post_init__(self) -> None:
        if len(self.of) < 2 or not 1 <= self.size < 1 << 31:
            raise DataError(
                f"cross '{self.name}': expected at least two features, and a size from 1 up to 2^31; found {self.of} "
                f"and {self.size}"
            )

    def ids(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The ids of the combinations, with the shape of the parts."""
        dims = [parts[name].dim() for name in self.of]
        if len(set(dims)) > 1:  # numbers alone would be combined with those of other samples
            raise DataError(
                f"cross '{self.name}': expected features with the same number of dimensions, found {dims} for "
                f"{', '.join(self.of)}. Give them the same shape."
            )
        mixed: torch.Tensor | None = None
        for name in self.of:
            own = parts[name].long()
            mixed = own if mixed is None else _scrambled(mixed) + own
        assert mixed is not None
        return _scrambled(mixed) % self.size


class FeatureFile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"features": "feature", "crosses": "cross"}
):
    """Features, and crosses of them. `fleet.save_inference_model(path, features=file.features)` saves them with a
    model, so that `fleet serve` takes the same words and numbers.
    """

    features: list[Feature]
    crosses: list[Cross] = []

    def __post_init__(self) -> None:
        names = [*(feature.name for feature in self.features), *(cross.name for cross in self.crosses)]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise DataError(f"features: expected distinct names, found twice: {', '.join(twice)}")
        ids = {feature.name for feature in self.features if feature.dtype == "int64"}
        for cross in self.crosses:
            if not set(cross.of) <= ids:
                wrong = ", ".join(sorted(set(cross.of) - ids))
                raise DataError(f"cross '{cross.name}': expected names of features with ids, found {wrong}")

    def num_ids(self, name: str) -> int | None:
        """How many ids a feature or a cross can have, for the size of its table; None: any 64-bit number."""
        for cross in self.crosses:
            if cross.name == name:
                return cross.size
        return self[name].num_ids

    def __getitem__(self, name: str) -> Feature:
        for feature in self.features:
            if feature.name == name:
                return feature
        raise DataError(f"there is no feature '{name}'; there is {', '.join(one.name for one in self.features)}")

    def tensors(self, columns: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """By feature: the ids or numbers of raw columns (arrays of numpy or pyarrow, or lists; strings, floats or whole
        numbers), converted as `fleet serve` converts a request. Columns without a feature are left out. Nulls, and nan,
        become `missing` of their feature, or are refused.

        A feature with a `shape` becomes (samples, *shape). Another has the shape of its column, and a default of one
        value that of a column with one value per sample.
        """
        if not columns:
            raise DataError("expected at least one column, which says how many samples there are; found none")
        missing = [feature.name for feature in self.features if feature.name not in columns and feature.default is None]
        if missing:
            raise DataError(f"expected a column for each feature without a default, found none for {missing}")
        used = [feature.name for feature in self.features if feature.name in columns] or list(columns)
        lengths = {name: len(columns[name]) for name in used}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{num} in '{name}'" for name, num in lengths.items())
            raise DataError(f"expected columns with the same number of samples, found {found}")
        num = lengths[used[0]]
        return {feature.name: _tensor(feature, columns.get(feature.name), num) for feature in self.features}

    def crossed(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By cross: its ids, from the ids of its features. Call it in the model's forward: the saved network then
        includes it, and requests do not give crosses.
        """
        return {cross.name: cross.ids(ids) for cross in self.crosses}


def read_features(path: str | Path) -> FeatureFile:
    """Read a file of features: JSON if its name ends in .json, else TOML (Python 3.11 or newer). Raises DataError."""
    path = Path(path)
    try:
        body = path.read_bytes()
        if path.suffix == ".json":
            return msgspec.json.decode(body, type=prepared(FeatureFile))
        return msgspec.toml.decode(body, type=prepared(FeatureFile))
    except OSError as error:
        raise DataError(f"{path}: expected a file of features, found none: {error.strerror}") from None
    except ImportError:
        raise DataError(f"{path}: TOML needs Python 3.11, or `pip install tomli`; give the same as JSON") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not a file of features: {error}") from None


def _tensor(feature: Feature, column: Any, num: int) -> torch.Tensor:
    array = _default(feature, num) if column is None else _converted(feature, column)
    if feature.shape is None:
        return torch.from_numpy(array)
    shape = (len(array), *feature.shape)
    if array.size != math.prod(shape):
        raise DataError(f"feature '{feature.name}': expected values of shape {list(shape)}, found {list(array.shape)}")
    return torch.from_numpy(array.reshape(shape))


def _default(feature: Feature, num: int) -> npt.NDArray[Any]:
    """The values of `num` samples without the feature."""
    values = np.asarray(feature.default, feature.dtype)
    return np.full(num, values[0]) if len(values) == 1 else np.tile(values, (num, 1))


def _converted(feature: Feature, column: Any) -> npt.NDArray[Any]:
    found = raw_column(column, feature.name)
    if found.values is None or not math.prod(found.shape):
        return feature.from_missing(found.shape)
    if found.are_strings:
        return feature.from_strings(found.values, found.is_missing)
    return feature.from_numbers(found.values, found.is_missing)


def _scrambled(ids: torch.Tensor) -> torch.Tensor:
    """The bits of each number, mixed; never negative."""
    mixed = ids * _MULTIPLIER
    high = torch.bitwise_and(torch.bitwise_right_shift(mixed, 32), _MASK)
    return torch.bitwise_xor(high, torch.bitwise_and(mixed, _MASK))
