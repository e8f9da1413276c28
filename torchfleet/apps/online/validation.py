"""Progressive validation: the AUC of a part over all workers, before training on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchfleet.api.metrics import AUC, area
from torchfleet.apps.online.agreement import gather_at
from torchfleet.base.errors import FleetError


def auc_of_all(meter: Any, part: str) -> tuple[float | None, int]:
    """(AUC, samples) over the meters of all workers, at a barrier. A worker without samples may give None; the AUC is
    None if all workers do.
    """
    if meter is not None and not isinstance(meter, AUC):
        raise FleetError(f"evaluate must return a fleet.metrics.AUC, or None, found {type(meter).__name__}")
    counts = meter.compute()[2][2:] if meter is not None else []
    gathered = gather_at("evaluated", part, [count.tobytes() for count in counts])
    stats = [[np.frombuffer(count, np.float64) for count in worker] for worker in gathered if worker]
    if len({len(positive) for positive, _ in stats}) > 1:
        raise FleetError("evaluate: the workers' AUCs have different num_thresholds; give all of them the same")
    if not stats:
        return None, 0
    positive, negative = np.sum(stats, axis=0)
    return area(positive, negative), int(positive.sum() + negative.sum())
