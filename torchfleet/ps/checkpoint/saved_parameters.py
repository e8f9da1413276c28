"""Parameters of a model against those of a save: what fits, what is refused by name, what earlier releases left out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Manifest, Parameter


def without_lost(storage: Storage, manifest: Manifest, wanted: Sequence[Parameter]) -> list[Parameter]:
    """Those that a save can have: earlier releases left out what is not float32, and a line on stderr names it."""
    saved = [parameter for table in manifest.tables for parameter in table.parameters]
    is_of_before = all(parameter.dtype == "float32" for parameter in saved)
    known = {parameter.name for parameter in saved}
    lost = [p for p in wanted if is_of_before and p.dtype != "float32" and p.name not in known]
    if lost:
        names = ", ".join(f"{parameter.name} ({parameter.dtype})" for parameter in lost)
        print(
            f"{storage.path} was saved without {names}: earlier releases saved float32 tensors only. The model keeps "
            "its own values; the next save has them.",
            file=sys.stderr,
            flush=True,
        )
    return [parameter for parameter in wanted if parameter not in lost]


def check_parameter(storage: Storage, parameter: Parameter, saved: Parameter | None) -> None:
    """Raise CheckpointError if a parameter of the model was not saved, or not as the model has it."""
    if saved is None:
        raise CheckpointError(f"{storage.path} has no parameter '{parameter.name}' of this model")
    check_kind(parameter, saved)


def check_kind(parameter: Parameter, saved: Parameter) -> None:
    """Raise CheckpointError if the model has a parameter in another type or shape than it was saved in."""
    if {saved.dtype, parameter.dtype} != {"float32"} and saved.described != parameter.described:
        raise CheckpointError(
            f"parameter '{parameter.name}' was saved as {saved.described}, and the model has {parameter.described}"
        )
    if saved.shape != parameter.shape:
        raise CheckpointError(
            f"parameter '{parameter.name}' was saved with shape {tuple(saved.shape)}, and the model has "
            f"{tuple(parameter.shape)}"
        )
