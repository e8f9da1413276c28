"""Datasets: from files to batches (docs/data.md). Names that need torch are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchfleet.data.queue_dataset import FileBatches
    from torchfleet.data.reading.criteo import CriteoFormat
    from torchfleet.data.reading.generator import MultiSlotDataGenerator, MultiSlotStringDataGenerator
    from torchfleet.data.reading.parquet import ParquetFormat
    from torchfleet.data.reading.string_hash import hash_string
    from torchfleet.data.slots import Batch, Ragged, Slot

__all__ = [
    "Batch",
    "CriteoFormat",
    "FileBatches",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
    "ParquetFormat",
    "Ragged",
    "Slot",
    "from_arrow",
    "from_parquet",
    "from_ray",
    "hash_string",
]

_ELSEWHERE = {
    "Batch": "slots",
    "CriteoFormat": "reading.criteo",
    "FileBatches": "queue_dataset",
    "MultiSlotDataGenerator": "reading.generator",
    "MultiSlotStringDataGenerator": "reading.generator",
    "ParquetFormat": "reading.parquet",
    "Ragged": "slots",
    "Slot": "slots",
    "hash_string": "reading.string_hash",
}
_OF_JOB = ("from_arrow", "from_parquet", "from_ray")  # made above this room, where the job's workers are known


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"torchfleet.data has no '{name}'; it has {', '.join(__all__)}")
    if name in _OF_JOB:
        return getattr(import_module("torchfleet.api.datasets"), name)
    return getattr(import_module(f"torchfleet.data.{_ELSEWHERE[name]}"), name)
