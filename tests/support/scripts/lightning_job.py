"""Neural collaborative filtering as a LightningModule, on ratings that are made up; run as a script, a worker or server
of a fleet that trains it: `lightning_job.py OUT` leaves the trained model's ratings in OUT."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchfleet as fleet

USERS, ITEMS, RATINGS, BATCH, EPOCHS = 120, 60, 1600, 80, 2


class Ratings(lightning.LightningModule):
    def __init__(self, sparse: bool, dim: int = 4) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.users = torch.nn.Embedding(USERS, dim, sparse=sparse)
        self.items = torch.nn.Embedding(ITEMS, dim, sparse=sparse)
        self.tower = torch.nn.Sequential(torch.nn.Linear(2 * dim, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        user, item = self.users(users), self.items(items)
        return (user * item).sum(1) + self.tower(torch.cat([user, item], dim=1)).squeeze(1)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = F.mse_loss(self(*batch[:2]), batch[2])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("error", F.l1_loss(self(*batch[:2]), batch[2]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def distributed(module: Ratings) -> Ratings:
    """What a user adds: the optimizer is the fleet's, and so is the scheduler, which is made of it."""
    module = fleet.distributed_model(module)
    (inner,), _ = module.configure_optimizers()
    optimizer = fleet.distributed_optimizer(inner)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
    module.configure_optimizers = lambda: ([optimizer], schedulers)
    return module


def ratings(share: slice = slice(None), seed: int = 0, num: int = RATINGS) -> TensorDataset:
    """Of users and items with three hidden tastes; popular ones are rated more often."""
    draw, tastes = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    user_tastes, item_tastes = (torch.randn(size, 3, generator=tastes) for size in (USERS, ITEMS))
    users, items = ((size * torch.rand(num, generator=draw) ** 2).long() for size in (USERS, ITEMS))
    stars = 3 + (user_tastes[users] * item_tastes[items]).sum(1) + 0.3 * torch.randn(num, generator=draw)
    return TensorDataset(*(column[share] for column in (users, items, stars.clamp(1, 5))))


def trainer(folder: Path | str, **options: Any) -> lightning.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    settings = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, **quiet, **options}
    return lightning.Trainer(default_root_dir=folder, **settings)


def rated(module: Ratings) -> torch.Tensor:
    """By everybody, of everything."""
    pairs = torch.cartesian_prod(torch.arange(USERS), torch.arange(ITEMS))
    module.eval()
    with torch.no_grad():
        return module(pairs[:, 0], pairs[:, 1])


def main() -> None:
    warnings.filterwarnings("ignore", module="lightning")
    out = Path(sys.argv[1])
    fleet.init()
    module = distributed(Ratings(sparse=True))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    index, number = fleet.data_shard()
    own = ratings(slice(index, None, number))
    loader = DataLoader(own, BATCH // number)
    trainer(out.parent / f"worker{index}", enable_checkpointing=False).fit(module, loader)
    fleet.barrier_worker()
    if fleet.is_first_worker():
        torch.save(rated(module), out)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
