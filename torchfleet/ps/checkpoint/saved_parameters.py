"""Checks a model's parameters against those of a save."""

from __future__ import annotations

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Parameter


def check_parameter(storage: Storage, parameter: Parameter, saved: Parameter | None) -> None:
    """Raise CheckpointError if a parameter of the model was not saved, or was saved with another type or shape."""
    if saved is None:
        raise CheckpointError(f"{storage.path} has no parameter '{parameter.name}' of this model")
    check_kind(parameter, saved)


def check_kind(parameter: Parameter, saved: Parameter) -> None:
    """Raise CheckpointError if a parameter has another type or shape in the model than in the save."""
    if {saved.dtype, parameter.dtype} != {"float32"} and saved.described != parameter.described:
        raise CheckpointError(
            f"parameter '{parameter.name}' was saved as {saved.described}, and the model has {parameter.described}"
        )
    if saved.shape != parameter.shape:
        raise CheckpointError(
            f"parameter '{parameter.name}' was saved with shape {tuple(saved.shape)}, and the model has "
            f"{tuple(parameter.shape)}"
        )
