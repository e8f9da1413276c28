"""A script that ends without fleet.stop_worker(). Every step moves every parameter by the rate: the saved model counts
the steps of all workers."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchfleet as fleet

WIDTH = 1 << 15  # 128 KiB of network: pyzmq sends such a message without a copy
MODES = {
    "sync": {},
    "half_async": {"a_sync": True, "a_sync_configs": {"half_async": True}},
    "async": {"a_sync": True},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 100}},
    "hybrid": {"a_sync": True, "a_sync_configs": {"hybrid": True}},
}


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(4, 2, sparse=True)
        self.network = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).sum() + self.network.sum()


def main(mode: str, folder: str) -> None:
    model = Counted()
    torch.nn.init.zeros_(model.rows.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.zeros(12, dtype=torch.int64)), batch_size=2)
    strategy = fleet.DistributedStrategy(**MODES[mode], sync_mean="workers" if mode == "sync" else "samples")
    model, optimizer, loader = fleet.prepare(model, optimizer, loader, strategy=strategy)
    for (ids,) in loader:
        model(ids[:1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if fleet.is_first_worker():
        fleet.save_inference_model(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
