"""Online learning: training on a stream of parts, each as soon as it is complete (docs/online.md)."""

from __future__ import annotations

from torchfleet.apps.online.folders import FolderSource
from torchfleet.apps.online.kafka import KafkaSource
from torchfleet.apps.online.parts import Part, Source
from torchfleet.apps.online.pass_progress import PassReport, Result, history, model_to_load
from torchfleet.apps.online.passes import train_passes

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
