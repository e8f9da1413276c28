"""A process of a fleet in which FleetStrategy trains the module of lightning_job: `lightning_strategy_job.py OUT KIND`.

The first worker leaves in OUT what the trained module rates, and what it was told of the others. KIND: a mode of
servers, or "ranks".
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from support.scripts import lightning_job as job
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torchfleet as fleet


class Watched(job.Ratings):
    """Says in validation which samples each worker has seen."""

    seen = 0

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.seen += len(batch[0])
        return super().training_step(batch, number)

    def validation_step(self, batch: Any, number: int) -> None:
        error = F.l1_loss(self(*batch[:2]), batch[2])
        self.log("error", error, sync_dist=True)
        self.log("rank", float(self.global_rank), sync_dist=True, reduce_fx="sum")


def settings(kind: str) -> Any:
    if kind != "ranks":
        return kind
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})


def main() -> None:
    warnings.filterwarnings("ignore")
    out, kind = Path(sys.argv[1]), sys.argv[2]
    options = {"gradient_clip_val": 2.0} if kind == "ranks" else {}
    trainer = job.trainer(out.parent / "run", strategy=fleet.lightning.FleetStrategy(settings(kind)), **options)
    module = Watched(sparse=kind != "ranks")
    size = job.BATCH // trainer.world_size // (2 if kind == "ranks" else 1)  # two batches are merged
    trainer.fit(module, DataLoader(job.ratings(), size), DataLoader(job.ratings(seed=1, num=160), job.BATCH // 2))
    rated = job.rated(module)
    fleet.barrier_worker()
    if trainer.is_global_zero:
        told = {"world_size": trainer.world_size, "seen": module.seen, "metrics": dict(trainer.callback_metrics)}
        torch.save({"rated": rated, "checkpoint": trainer.checkpoint_callback.best_model_path, **told}, out)


if __name__ == "__main__":
    main()
