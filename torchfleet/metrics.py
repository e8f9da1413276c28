"""fleet.metrics: numbers over all workers, and a streaming AUC."""

from __future__ import annotations

from typing import NoReturn

from torchfleet.api.metrics import AUC, Counts, acc, area, auc, mae, max, min, mse, rmse, sum
from torchfleet.base.lazy_names import missing
from torchfleet.base.paddle_names import METRICS

__all__ = ["AUC", "Counts", "acc", "area", "auc", "mae", "max", "min", "mse", "rmse", "sum"]


def __getattr__(name: str) -> NoReturn:
    raise missing(__name__, name, __all__, METRICS)
