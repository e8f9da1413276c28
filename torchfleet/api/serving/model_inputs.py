"""The inputs of a model's call: which tensors they are, under which names, and how to make such a call again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchfleet.base.errors import ModelError
from torchfleet.data.features import Feature
from torchfleet.data.slots import Batch, Ragged
from torchfleet.ps.worker.batch.batch_tensors import num_samples, tensors_of

Rebuild = Callable[[list[torch.Tensor]], Any]  # from the tensors of a batch to a part of the model's inputs


@dataclass
class ModelInputs:
    """The features of a call, in order, and functions that build the call's arguments from other tensors.

    A ragged feature has two tensors, its values and its offsets; other features have one.
    """

    features: list[Feature] = field(default_factory=list)
    args: Rebuild = lambda tensors: ()
    kwargs: Rebuild = lambda tensors: {}


def inputs_of(model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> ModelInputs:
    """Describe the inputs of a call. Raises ModelError for inputs that a request cannot give: other objects, or tensors
    without samples.
    """
    inputs = [args, dict(kwargs)]
    described = _Described(num_samples(inputs, tensors_of(inputs).values()))
    names = _parameter_names(model, len(args))
    is_single = len(args) + len(kwargs) == 1  # model(batch): its slots need no prefix
    made = [described.part(value, name, is_single) for name, value in zip(names, args, strict=True)]
    named = {name: described.part(value, name, is_single) for name, value in kwargs.items()}
    found = [feature.name for feature in described.features]
    if len(set(found)) < len(found):
        raise ModelError(f"two inputs of the model have the name {max(found, key=found.count)!r}")
    return ModelInputs(
        described.features,
        lambda tensors: tuple(rebuild(tensors) for rebuild in made),
        lambda tensors: {name: rebuild(tensors) for name, rebuild in named.items()},
    )


def _parameter_names(model: torch.nn.Module, num: int) -> list[str]:
    """The names of forward's first parameters; those of *args are numbered."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    return [names[i] if i < len(names) else f"input_{i}" for i in range(num)]


class _Described:
    """Collects the features of a call."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._num_tensors = 0
        self.features: list[Feature] = []

    def part(self, value: Any, name: str, is_bare: bool = False) -> Rebuild:
        """Add the features of one value. `is_bare`: the keys of a batch are feature names, without a prefix."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, Ragged) or self._is_pair(value):
            return self._ragged(value, name)
        if isinstance(value, Mapping):
            return self._mapping(value, "" if is_bare else f"{name}.")
        if isinstance(value, (list, tuple)):
            parts = [self.part(part, f"{name}.{i}") for i, part in enumerate(value)]
            kind: Any = list if isinstance(value, list) else tuple
            return lambda tensors: kind(rebuild(tensors) for rebuild in parts)
        if value is None or isinstance(value, (bool, int, float, str)):
            return lambda tensors: value
        raise ModelError(f"input '{name}' is of type {type(value).__name__}, and a request gives tensors")

    def _tensor(self, tensor: torch.Tensor, name: str) -> Rebuild:
        if not tensor.dim() or len(tensor) != self._num_samples:
            raise ModelError(
                f"input '{name}' has shape {tuple(tensor.shape)} in a batch of {self._num_samples} samples: its first "
                "dimension is not that of the samples"
            )
        at = self._next(1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.features.append(Feature(name, dtype, list(tensor.shape[1:])))
        return lambda tensors: tensors[at]

    def _is_pair(self, value: Any) -> bool:
        """Whether this is (values, offsets), as embeddings take them."""
        is_pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, torch.Tensor) for v in value)
        return is_pair and value[0].dim() == 1 and value[1].dim() == 1 and len(value[0]) != len(value[1])

    def _ragged(self, value: Any, name: str) -> Rebuild:
        values, offsets = value
        if len(offsets) != self._num_samples:
            raise ModelError(f"input '{name}' has {len(offsets)} samples in a batch of {self._num_samples}")
        at = self._next(2)
        dtype = str(values.dtype).removeprefix("torch.")
        self.features.append(Feature(name, dtype, None, default=[]))
        kind = Ragged if isinstance(value, Ragged) else _pair
        return lambda tensors: kind(tensors[at], tensors[at + 1])

    def _mapping(self, value: Mapping[str, Any], prefix: str) -> Rebuild:
        parts = {name: self.part(part, f"{prefix}{name}") for name, part in value.items()}
        if not isinstance(value, Batch):
            return lambda tensors: {name: rebuild(tensors) for name, rebuild in parts.items()}

        def batch(tensors: list[torch.Tensor]) -> Batch:
            made = {name: rebuild(tensors) for name, rebuild in parts.items()}
            first = next(iter(made.values()))
            return Batch(made, (first.offsets if isinstance(first, Ragged) else first).shape[0])

        return batch

    def _next(self, num: int) -> int:
        self._num_tensors += num
        return self._num_tensors - num


def _pair(values: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values, offsets
