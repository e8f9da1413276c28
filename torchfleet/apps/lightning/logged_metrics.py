"""What a LightningModule logs, shown by the launcher's display."""

from __future__ import annotations

import math
import time
from typing import Any

import torchfleet as fleet
from torchfleet.api import process_role

_PERIOD = 0.5  # seconds: the display takes no more


class LoggedMetrics:
    """Reports the numbers of `self.log` by fleet.report, at most twice a second and where a stage ends."""

    lightning_module: Any
    _next_report = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if time.monotonic() >= self._next_report:
            self._report()

    def on_validation_end(self) -> None:
        self._report()

    def on_train_end(self) -> None:
        self._report()

    def _report(self) -> None:
        self._next_report = time.monotonic() + _PERIOD
        if not process_role.is_under_way() or self.lightning_module is None:
            return
        found = {name: float(value) for name, value in self.lightning_module.trainer.callback_metrics.items()}
        fleet.report(**{name: value for name, value in found.items() if math.isfinite(value)})
