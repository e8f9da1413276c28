"""A job whose workers share one list of files; each writes down what it trained on. For fleetrun in tests."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

import torchfleet as fleet


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = fleet.nn.SparseEmbedding(2, name="words")
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, batch: fleet.data.Batch) -> torch.Tensor:
        return self.linear(self.embedding(batch["word"])).squeeze(1)


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fleet.init()
    strategy = fleet.DistributedStrategy(a_sync=True)
    if options.mode == "half_async":
        strategy.a_sync_configs = {"half_async": True}
    model = fleet.distributed_model(Tiny())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    index = fleet.worker_index()
    dataset = fleet.QueueDataset()
    slots = [fleet.Slot("id", dim=1), fleet.Slot("word")]
    dataset.init(batch_size=options.batch_size, thread_num=options.readers, use_var=slots, queue_batches=2)
    dataset.set_filelist(options.files, dynamic=True, lease=options.lease)
    pause = options.pauses[index % len(options.pauses)]
    with open(Path(options.out) / f"seen.{index}.{os.getpid()}", "a") as seen:
        for epoch in range(options.epochs):

            def step(batch: fleet.data.Batch, epoch: int = epoch) -> torch.Tensor:
                loss = model(batch).square().mean()
                seen.write("".join(f"{epoch} {number}\n" for number in batch["id"].reshape(-1).tolist()))
                seen.flush()
                if options.hold:
                    hold(options, index, num_seen(seen.name))
                time.sleep(pause)
                return loss

            if options.loop == "train":
                fleet.train_from_dataset(step, dataset, optimizer, thread=options.threads, print_period=0)
            else:
                batches: Iterable[fleet.data.Batch] = fleet.prefetch(dataset)
                for batch in batches:
                    step(batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            print(f"worker {index} is through with epoch {epoch}", flush=True)
    fleet.stop_worker()


def num_seen(path: str) -> int:
    return len(Path(path).read_text().splitlines())


def hold(options: argparse.Namespace, index: int, num: int) -> None:
    """A worker stays in the step that brings it to so many samples, until it is told to go on. The others begin, and
    wait for it."""
    (worker, needed), held, go_on = options.hold, Path(options.out) / "held", Path(options.out) / "go_on"
    if index == worker and num >= needed:
        held.touch()
        wait_for(go_on)
    elif index != worker and num >= 4:
        wait_for(held)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--mode", default="async", choices=["async", "half_async"])
    parser.add_argument("--loop", default="train", choices=["train", "plain"])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lease", type=float, default=2.0)
    parser.add_argument("--pauses", type=float, nargs="+", default=[0.0], help="seconds per batch, by worker")
    parser.add_argument("--hold", type=int, nargs=2, metavar=("WORKER", "NUM"), help="see hold()")
    parser.add_argument("--files", nargs="*", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    sys.exit(main())
