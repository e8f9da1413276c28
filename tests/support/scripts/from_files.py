"""Script 2 of the design: training from files, with a reader in a pipe, a shuffle over all workers and a watch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet


class WideDeep(torch.nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.wide = fleet.nn.SparseEmbedding(2, name="wide", initializer=fleet.nn.Constant(0.0))
        self.deep = fleet.nn.SparseEmbedding(dim, name="deep", initializer=fleet.nn.Uniform(-0.01, 0.01))
        self.tower = torch.nn.Sequential(torch.nn.Linear(26 * dim + 13, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def forward(self, batch: Any) -> torch.Tensor:
        slots = [batch[f"C{i}"] for i in range(1, 27)]
        deep = self.tower(torch.cat([self.deep(slots).flatten(1), batch["dense_input"]], dim=1))
        return deep + self.wide(slots).sum(dim=1)


class Accuracy:
    """Stands in for an AUC: the share of right answers so far."""

    def __init__(self) -> None:
        self.num = self.num_right = 0

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> float:
        self.num += len(labels)
        self.num_right += int((logits.argmax(1) == labels.view(-1)).sum())
        return self.num_right / self.num


auc = Accuracy()


class Watch(fleet.FetchHandler):
    def handler(self, values: dict[str, Any]) -> None:
        print(f"auc {values['auc']:.4f}", flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--mode", default="async")
parser.add_argument("--passes", type=int, default=3)
parser.add_argument("--thread", type=int, default=1)
options = parser.parse_args()
files = sorted(str(path) for path in Path(options.folder).glob("part-*"))

torch.manual_seed(0)
fleet.init()
strategy = fleet.DistributedStrategy()
strategy.a_sync = options.mode != "sync"
model = fleet.distributed_model(WideDeep())
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2), strategy)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    dataset = fleet.InMemoryDataset()
    dataset.init(
        batch_size=20,
        thread_num=2,
        pipe_command="python reader.py",
        use_var=[
            fleet.Slot("dense_input", dtype="float32", dim=13),
            *(fleet.Slot(f"C{i}") for i in range(1, 27)),
            fleet.Slot("label", dim=1),
        ],
    )
    dataset.set_filelist(fleet.util.get_file_shard(files))
    dataset.load_into_memory()
    dataset.global_shuffle(seed=1)
    sizes = [dataset.get_memory_data_size(), dataset.get_memory_data_size(all_workers=True)]

    def step(batch: Any) -> dict[str, Any]:
        logits = model(batch)
        loss = torch.nn.functional.cross_entropy(logits, batch["label"].view(-1))
        return {"loss": loss, "auc": auc.update(logits, batch["label"])}

    results = []
    for _ in range(options.passes):
        result = fleet.train_from_dataset(
            step,
            dataset,
            optimizer,
            thread=options.thread,
            print_period=5,
            fetch_handler=Watch({"auc": "auc"}, period_secs=5),
        )
        results.append([result.steps, result.samples])
    fleet.flush()
    fleet.barrier_worker()
    mean = fleet.infer_from_dataset(step, dataset, print_period=0).mean
    unforeseen = fleet.stats()["worker"]["unforeseen_lookups"]
    found = {"worker": fleet.worker_index(), "sizes": sizes, "results": results, "mean": mean, "unforeseen": unforeseen}
    print(f"found {json.dumps(found)}", flush=True)
    fleet.barrier_worker()
    fleet.stop_worker()
