"""A job that is interrupted after some steps and goes on in another one, with another number of servers."""

from __future__ import annotations

import argparse

import torch

import torchfleet as fleet
from torchfleet import nn

NUM_ITEMS, NUM_WORDS = 40, 1000


class Model(torch.nn.Module):
    """A table of declared size, one for any ids, a running mean, a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(NUM_ITEMS, 4, sparse=True)
        self.words = nn.SparseEmbedding(3, name="words")
        self.norm = torch.nn.BatchNorm1d(7)
        self.hidden = torch.nn.Linear(7, 5)
        self.out = torch.nn.Linear(5, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = torch.cat([self.items(batch["items"]), self.words(batch["words"])], dim=1)
        return self.out(torch.tanh(self.hidden(self.norm(x)))).squeeze(1)


def make_optimizer(rule: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if rule == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.05)
    if rule == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1)
    if rule == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = [p for name, p in model.named_parameters() if name.split(".")[0] in ("items", "words")]
    dense = [p for name, p in model.named_parameters() if name.split(".")[0] not in ("items", "words")]
    return torch.optim.SGD([{"params": dense, "momentum": 0.9, "nesterov": True}, {"params": sparse}], lr=0.1)


def batch_of(worker: int, step: int, size: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return {
        "items": torch.randint(0, NUM_ITEMS, (size,), generator=generator),
        "words": torch.randint(0, NUM_WORDS, (size,), generator=generator) * 1_000_003 - 5,
        "y": torch.randn(size, generator=generator),
    }


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, worker: int, first: int, last: int) -> None:
    for step in range(first, last):
        batch = batch_of(worker, step)
        (model(batch) - batch["y"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    options = parse()
    fleet.init()
    torch.manual_seed(fleet.worker_index())
    model = fleet.distributed_model(Model())
    optimizer = fleet.distributed_optimizer(make_optimizer(options.rule, model), fleet.DistributedStrategy())
    if fleet.is_server():
        fleet.init_server(options.load)
        fleet.run_server()
        return
    fleet.init_worker(options.load)
    train(model, optimizer, fleet.worker_index(), options.first, options.last)
    fleet.barrier_worker()
    if fleet.is_first_worker():
        fleet.save_persistables(options.save)
    else:
        try:
            fleet.save_persistables(options.save)
        except fleet.FleetError as error:
            print(f"refused: {error}", flush=True)
    fleet.barrier_worker()
    fleet.stop_worker()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", default="adam")
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--first", type=int)
    parser.add_argument("--last", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main()
