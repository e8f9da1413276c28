"""fleet.metrics: numbers over all workers, a streaming AUC, and meters of rankings and click models."""

from __future__ import annotations

from torchfleet.api.grouped_auc import GAUC
from torchfleet.api.meters import NDCG, Calibrated, Calibration, HitRate, LogLoss
from torchfleet.api.metrics import AUC, Counts, acc, area, auc, mae, max, min, mse, rmse, sum
from torchfleet.base.lazy_names import nearest
from torchfleet.base.paddle_names import METRICS

__all__ = [
    "AUC",
    "GAUC",
    "NDCG",
    "Calibrated",
    "Calibration",
    "Counts",
    "HitRate",
    "LogLoss",
    "acc",
    "area",
    "auc",
    "mae",
    "max",
    "min",
    "mse",
    "rmse",
    "sum",
]
__getattr__ = nearest(__name__, __all__, METRICS)
