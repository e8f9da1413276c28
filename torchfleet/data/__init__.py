"""From files to batches: docs/data.md. Names that need torch are loaded when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchfleet.data.criteo import CriteoFormat
    from torchfleet.data.file_batches import FileBatches
    from torchfleet.data.generator import MultiSlotDataGenerator, MultiSlotStringDataGenerator
    from torchfleet.data.hashing import hash_string
    from torchfleet.data.slots import Batch, Ragged, Slot

__all__ = [
    "Batch",
    "CriteoFormat",
    "FileBatches",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
    "Ragged",
    "Slot",
    "hash_string",
]

_ELSEWHERE = {
    "Batch": "slots",
    "CriteoFormat": "criteo",
    "FileBatches": "file_batches",
    "MultiSlotDataGenerator": "generator",
    "MultiSlotStringDataGenerator": "generator",
    "Ragged": "slots",
    "Slot": "slots",
    "hash_string": "hashing",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"torchfleet.data has no '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"torchfleet.data.{_ELSEWHERE[name]}"), name)
