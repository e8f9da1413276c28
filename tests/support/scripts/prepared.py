"""An ordinary script of torch's with one line of fleet's in it; `--plain` leaves that line out."""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = torch.nn.Embedding(40, 4), torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.items(ids).sum(1) + self.places(ids % 5).mean(1)).squeeze(1)


def samples(num: int = 70) -> TensorDataset:
    ids = torch.randint(40, (num, 3), generator=torch.Generator().manual_seed(1))
    return TensorDataset(ids, ids.float().mean(1) / 20)


def plain_parts(batch_size: int) -> tuple[Model, torch.optim.Optimizer, DataLoader, torch.optim.lr_scheduler.StepLR]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(samples(), batch_size, shuffle=True)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader, scheduler) -> None:
    for _ in range(3):
        for ids, target in loader:
            loss = (model(ids) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--model", required=True, help="where the first worker saves")
    parser.add_argument("--fail", action="store_true")
    options = parser.parse_args()
    import torchfleet as fleet

    model, optimizer, loader, scheduler = fleet.prepare(*plain_parts(options.batch_size), sparse=40)
    torch.manual_seed(fleet.worker_index())  # processes have random numbers of their own
    train(model, optimizer, loader, scheduler)
    print(f"{len(loader)} batches, rate {optimizer.param_groups[0]['lr']:g}", flush=True)
    if options.fail:
        raise RuntimeError("this script fails")
    if fleet.is_first_worker():
        fleet.save_inference_model(options.model)


if __name__ == "__main__":
    main()
