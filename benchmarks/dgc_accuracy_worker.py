"""One rank of benchmarks.dgc_accuracy: momentum SGD, dense or compressed, and the score of the rows held out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet

HASH_SIZE, DIM = 1 << 17, 8
BATCH = {"digits": 64, "criteo": 256}  # samples per step, of all ranks together


class Digits(torch.nn.Module):
    """1.1 million parameters for 64 pixels: far more than needed, so that there is something to compress."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
        self.tower = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10))

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.tower(dense)
        return logits


class Clicks(torch.nn.Module):
    """Hashed categories, embedded, beside 13 numbers; the embedding is an ordinary parameter with dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(HASH_SIZE, DIM)
        torch.nn.init.normal_(self.embedding.weight, std=0.01)
        self.tower = torch.nn.Sequential(torch.nn.Linear(26 * DIM + 13, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.tower(torch.cat([self.embedding(ids).flatten(1), dense], dim=1))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True, choices=list(BATCH))
    parser.add_argument("--folder", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--sparsity", type=float, nargs="*", default=[])
    parser.add_argument("--rampup_step", type=int, default=1)
    print(f"RESULT {json.dumps(train(parser.parse_args()))}", flush=True)


def train(options: argparse.Namespace) -> dict[str, Any]:
    configs = {"sparsity": options.sparsity, "rampup_step": options.rampup_step}
    strategy = {"dgc": True, "dgc_configs": configs} if options.sparsity else {}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**strategy))
    torch.manual_seed(options.seed)
    batch_size = BATCH[options.task]
    model: Any = fleet.distributed_model(Digits() if options.task == "digits" else Clicks())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9))
    inputs, labels = read(options.folder, "train")
    num_steps = len(labels) // batch_size
    order, found = torch.Generator().manual_seed(options.seed), []
    for _ in range(options.epochs):
        shuffled = torch.randperm(len(labels), generator=order)[: num_steps * batch_size]
        for rows in shuffled.view(-1, batch_size):
            own = rows[fleet.worker_index() :: fleet.worker_num()]
            model.train_batch(tuple(values[own] for values in inputs), labels[own], torch.nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        found.append(points(model, options))
    fleet.stop_worker()
    return {"points": found, "parameters": sum(parameter.numel() for parameter in model.parameters())}


def points(model: torch.nn.Module, options: argparse.Namespace) -> float:
    """Of the rows held out; all ranks have the same model and the same answer."""
    inputs, labels = read(options.folder, "test")
    with torch.no_grad():
        logits = model(*inputs)
    if options.task == "digits":
        return float((logits.argmax(1) == labels).double().mean()) * 100
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels.numpy(), (logits[:, 1] - logits[:, 0]).numpy())) * 100


def read(folder: str, part: str) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The model's inputs, and the labels."""
    paths = [Path(folder) / f"{part}-{name}.npy" for name in ("dense", "ids", "label")]
    *inputs, labels = (torch.from_numpy(np.load(path)) for path in paths if path.exists())
    return tuple(inputs), labels.long()


if __name__ == "__main__":
    main()
