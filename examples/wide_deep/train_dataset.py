"""Wide & Deep trained from files by a dataset: fleet reads, shuffles, pulls rows ahead, trains and prints.

python examples/wide_deep/train_dataset.py                                                 one process
fleetrun --server_num 2 --worker_num 2 examples/wide_deep/train_dataset.py --mode async    also hybrid and geo
... --dataset queue                                                                        read while training; in sync
                                                                                           mode from files of one size
... --data ctr_data                                                                        files of ctr_dnn/prepare.py

train.py is the same model with a DataLoader and a loop of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import torchfleet as fleet

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.ctr_dnn.prepare import generated
from examples.flags import optimizer_of, own_batch_size, parsed, parser_of, strategy_of
from examples.wide_deep.data import NUM_SLOTS
from examples.wide_deep.model import WideDeep

PARTS = 4  # files of each worker when rows are made up


class FromSlots(WideDeep):
    """Takes a batch as the dataset gives it. The model itself picks the ids out of it: so they are known ahead."""

    def forward(self, batch: Any) -> torch.Tensor:
        ids = torch.cat([batch[f"C{i}"] for i in range(1, NUM_SLOTS + 1)], dim=1)
        return super().forward(ids, batch["dense_input"])


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    fleet.init()
    model = fleet.distributed_model(FromSlots())
    optimizer = fleet.distributed_optimizer(optimizer_of(model, options), strategy_of(options))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    with tempfile.TemporaryDirectory() as own:
        train(model, optimizer, Path(own), options)
    fleet.stop_worker()


def train(model: torch.nn.Module, optimizer: Any, own: Path, options: argparse.Namespace) -> None:
    data, held_out = dataset_of(options, "train", own), dataset_of(options, "test", own)

    def step(batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": F.binary_cross_entropy_with_logits(model(batch), batch["label"].view(-1).float())}

    for epoch in fleet.epochs(options.epochs):
        if options.dataset == "memory":
            data.global_shuffle(options.seed + epoch)  # among all workers
        result = fleet.train_from_dataset(step, data, optimizer, print_period=50)
        print(f"epoch {epoch + 1}: {result.samples:,} samples on this worker", flush=True)
    fleet.flush()
    fleet.barrier_worker()  # all have trained
    print(f"AUC {auc(model, held_out):.4f} on the held-out rows of all workers", flush=True)
    if options.save and fleet.is_first_worker():
        fleet.save_persistables(options.save)
        print(f"saved to {options.save}")


def auc(model: torch.nn.Module, held_out: Any) -> float:
    """Over all workers' held-out files."""
    meter = fleet.metrics.AUC()

    def step(batch: Any) -> dict[str, Any]:
        return {"auc": meter.update(torch.sigmoid(model(batch)), batch["label"])}

    fleet.infer_from_dataset(step, held_out, print_period=0)
    *_, positive, negative = meter.compute()[2]
    return fleet.metrics.auc(positive, negative)


def dataset_of(options: argparse.Namespace, name: str, own: Path) -> Any:
    """Rows to train on are read into memory, if asked for; held-out ones always while they are used."""
    in_memory = options.dataset == "memory" and name == "train"
    dataset = fleet.InMemoryDataset() if in_memory else fleet.QueueDataset()
    dataset.init(
        own_batch_size(options, fleet.worker_num()),
        use_var=fleet.CriteoFormat.slots(),
        data_format=fleet.CriteoFormat(log_scale=True),
        drop_last=name == "train",  # in sync mode all workers must have as many batches
    )
    dataset.set_filelist(files_of(options, name, own))
    if in_memory:
        dataset.load_into_memory()
    return dataset


def files_of(options: argparse.Namespace, name: str, own: Path) -> list[str]:
    """This worker's files: its share of those at hand, or its share of the made-up rows, which it writes itself."""
    if options.data:
        files = sorted(str(path) for path in (Path(options.data) / name).glob("part-*"))
        if not files:
            raise SystemExit(f"no part-* files in {options.data}/{name}: run examples/ctr_dnn/prepare.py first")
        return fleet.util.get_file_shard(files)
    lines = list(generated(options.rows, options.seed))
    cut = len(lines) * 9 // 10
    size = own_batch_size(options, fleet.worker_num())
    whole = cut // fleet.worker_num() // size * size  # batches, as many for every worker
    if not whole:
        raise SystemExit(
            f"--rows {options.rows} are not a batch of {size} for each of {fleet.worker_num()} workers: give more "
            "rows, or a smaller --batch_size"
        )
    share = slice(fleet.worker_index(), whole * fleet.worker_num() if name == "train" else None, fleet.worker_num())
    rows = (lines[:cut] if name == "train" else lines[cut:])[share]
    files = [own / f"{name}-{part}" for part in range(PARTS)]
    for part, file in enumerate(files):
        file.write_bytes(b"".join(rows[part::PARTS]))
    return [str(file) for file in files]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, epochs=2, batch_size=256, lr=0.05, geo_lr=0.5)
    parser.add_argument(
        "--dataset", default="memory", choices=["memory", "queue"], help="read first, or while training"
    )
    parser.add_argument("--rows", type=int, default=60_000, help="rows to make up when there is no --data")
    parser.add_argument("--data", help="a folder with raw Criteo rows in train/part-* and test/part-*")
    return parsed(parser)


if __name__ == "__main__":
    main()
