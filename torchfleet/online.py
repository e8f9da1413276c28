"""fleet.online: training on a stream of parts, each as soon as it is complete (docs/online.md)."""

from __future__ import annotations

from torchfleet.apps.online import (
    FolderSource,
    KafkaSource,
    Part,
    PassReport,
    Result,
    Source,
    history,
    model_to_load,
    train_passes,
)
from torchfleet.base.lazy_names import nearest

__all__ = [
    "FolderSource",
    "KafkaSource",
    "Part",
    "PassReport",
    "Result",
    "Source",
    "history",
    "model_to_load",
    "train_passes",
]
__getattr__ = nearest(__name__, __all__)
