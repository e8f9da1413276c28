"""A LightningModule whose embeddings are on parameter servers.

python examples/trainers/with_lightning.py                                        one process, servers within
fleetrun --server_num 2 --worker_num 2 examples/trainers/with_lightning.py        processes
fleetrun --server_num 2 --worker_num 2 examples/trainers/with_lightning.py --mode hybrid
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchfleet as fleet


class Clicks(lightning.LightningModule):
    """Users and items, as ids of any size; a click where their rows agree."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(dim, name="rows", initializer=fleet.nn.Uniform(-0.5, 0.5))
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids)
        return (rows[:, 0] * rows[:, 1]).sum(1) + self.bias

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        right = ((self(batch[0]) > 0) == (batch[1] > 0)).float().mean()
        self.log("right", right, sync_dist=True)  # the mean over all workers

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.3)


def samples(seed: int, num: int = 8000) -> TensorDataset:
    draw, tastes = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(7)
    users, items = (torch.randint(size, (num,), generator=draw) for size in (500, 200))
    of_users, of_items = (torch.randn(size, 3, generator=tastes) for size in (500, 200))
    agree = (of_users[users] * of_items[items]).sum(1) > 0
    return TensorDataset(torch.stack([users, items + 1_000_000], dim=1), agree.float())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="async", help="sync, half_async, async, geo or hybrid")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", default="lightning_run", help="of checkpoints")
    options = parser.parse_args()
    trainer = lightning.Trainer(
        strategy=fleet.lightning.FleetStrategy(options.mode),
        accelerator="cpu",
        max_epochs=options.epochs,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=options.folder,
    )
    loader, tested = DataLoader(samples(seed=0), batch_size=100), DataLoader(samples(seed=1, num=2000), batch_size=500)
    trainer.fit(Clicks(), loader, tested)
    if trainer.is_global_zero:
        print(f"{float(trainer.callback_metrics['right']):.1%} of new pairs are told apart")


if __name__ == "__main__":
    main()
