"""TensorBoard: the script itself writes event files, as with torch.utils.tensorboard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchfleet.api.callbacks.callback import Callback, flat
from torchfleet.base.extras import required


class TensorBoardCallback(Callback):
    """Writes the numbers of this worker to event files in `folder`. `fleetrun --tensorboard DIR` does so for all
    processes, without changes to the script.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: Any = None

    def on_start(self, info: Mapping[str, Any]) -> None:
        required("tensorboard", "TensorBoardCallback", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder)
        self._writer.add_text("torchfleet", f"```\n{json.dumps(flat(info), indent=1, default=str)}\n```")

    def on_report(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"epoch/{name}", value, epoch)

    def on_save(self, dirname: str) -> None:
        self._writer.add_text("saved", dirname)

    def on_end(self, stats: Mapping[str, Any]) -> None:
        self._writer.close()
