"""fleet.metrics: numbers over all workers, and a streaming AUC."""

from __future__ import annotations

from torchfleet.api.metrics import AUC, Counts, acc, area, auc, mae, max, min, mse, rmse, sum
from torchfleet.base.lazy_names import nearest
from torchfleet.base.paddle_names import METRICS

__all__ = ["AUC", "Counts", "acc", "area", "auc", "mae", "max", "min", "mse", "rmse", "sum"]
__getattr__ = nearest(__name__, __all__, METRICS)
