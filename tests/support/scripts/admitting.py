"""Two days of training under admission, statistics, eviction on a schedule, full and delta saves: the same steps as
processes of a fleet (this script) or as threads of a test."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import torchfleet as fleet

DAY = 86_400
START = 20_000 * DAY
NUM_HOURS, NUM_STEPS = 16, 3  # hours are three hours apart
NUM_IDS = 60


class Scorer(torch.nn.Module):
    """Rows for ids that were shown and clicked enough; they go when they are unseen for 15 hours."""

    def __init__(self) -> None:
        super().__init__()
        entry = [
            fleet.CountFilterEntry(2),
            fleet.ShowClickEntry("show", "click", show_click_decay_rate=0.5),
            fleet.PredicateEntry("show >= 1 or count > 3"),
        ]
        shrink = fleet.Shrink(delete_after_unseen_days=0.6, delete_threshold=-1, every_hours=6, max_share=1.0)
        self.ids = fleet.nn.SparseEmbedding(3, name="ids", entry=entry, shrink=shrink)
        self.out = torch.nn.Linear(3, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.out(self.ids(batch["ids"]).sum(dim=1)).squeeze(1)


def batch_of(worker: int, hour: int, step: int) -> dict[str, torch.Tensor]:
    """Which ids there are moves on with time."""
    generator = torch.Generator().manual_seed(10_000 * worker + 100 * hour + step)
    ids = (torch.randint(0, 25, (6, 2), generator=generator) + 3 * hour) % NUM_IDS
    show = torch.randint(0, 3, (6,), generator=generator).float()
    return {"ids": ids, "show": show, "click": (show > 1).float(), "y": torch.randn(6, generator=generator)}


def train(
    model: torch.nn.Module,
    optimizer: Any,
    worker: int,
    prefetch: Callable[[Any], Any],
    barrier: Callable[[], None],
    begin_hour: Callable[[int], None],
    end_hour: Callable[[int], None],
) -> None:
    """`begin_hour` and `end_hour` are what worker 0 does while the others wait."""
    for hour in range(NUM_HOURS):
        barrier()
        if worker == 0:
            begin_hour(START + 3 * 3600 * hour)
        barrier()
        for batch in prefetch([batch_of(worker, hour, step) for step in range(NUM_STEPS)]):
            (model(batch) - batch["y"]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        barrier()
        if worker == 0:
            end_hour(hour)
        barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    options = parser.parse_args()
    fleet.init()
    torch.manual_seed(fleet.worker_index())
    model = fleet.distributed_model(Scorer())
    optimizer = fleet.distributed_optimizer(
        torch.optim.Adagrad(model.parameters(), lr=0.1), fleet.DistributedStrategy()
    )
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()

    def save(hour: int) -> None:
        if hour % 5 == 0:
            fleet.save_persistables(options.folder, mode=int(hour > 0), extra={"hour": hour})

    def set_time(now: int) -> None:
        for table, num in fleet.set_time(now).items():
            print(f"at {now} {num} rows of {table} were dropped", flush=True)

    train(model, optimizer, fleet.worker_index(), fleet.prefetch, fleet.barrier_worker, set_time, save)
    if not fleet.is_first_worker():
        for refused in (lambda: fleet.shrink(max_rows=3), lambda: fleet.set_time(5)):
            try:
                refused()
            except fleet.FleetError as error:
                print(f"refused: {error}", flush=True)
    fleet.barrier_worker()
    fleet.stop_worker()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main()
