"""A worker or server in hybrid mode whose workers have different numbers of batches. Each worker writes down what
train_from_dataset returned for each of two passes, and its network."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("configs", type=json.loads)
parser.add_argument("--dynamic", action="store_true")
options = parser.parse_args()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = fleet.nn.SparseEmbedding(2, name="items", initializer=fleet.nn.Constant(0.0))
        self.out = torch.nn.Linear(2, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.out(self.items(batch["id"]))


fleet.init()
model = fleet.distributed_model(Model())
optimizer = fleet.distributed_optimizer(
    torch.optim.SGD(model.parameters(), lr=0.01),
    fleet.DistributedStrategy(a_sync=True, a_sync_configs={"hybrid": True, **options.configs}),
)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    files = sorted(map(str, options.folder.glob("part-*")))
    dataset = fleet.QueueDataset()
    dataset.init(batch_size=4, use_var=[fleet.Slot("id", dim=1)])
    dataset.set_filelist(files if options.dynamic else fleet.split_files(files), dynamic=options.dynamic)
    passes = []
    for _ in range(2):
        result = fleet.train_from_dataset(model, dataset, optimizer, lambda out, _: out.mean(), print_period=0)
        passes.append({"steps": result.steps, "samples": result.samples, "unused": result.unused})
    written = {"passes": passes, "network": model.out.weight.flatten().tolist() + model.out.bias.tolist()}
    (options.folder / f"worker-{fleet.worker_index()}.json").write_text(json.dumps(written))
    fleet.stop_worker()
