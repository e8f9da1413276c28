"""Large-scale classification: which of very many identities is it? (features from files, or generated)

python examples/classify/train.py                                        # one process, a thousand classes
fleetrun --nproc_per_node 2 examples/classify/train.py                   # two, each with half of the classes
fleetrun --nproc_per_node 2 examples/classify/train.py --num_classes 1000000 --steps 20 --batch_size 32
fleetrun --nproc_per_node 2 examples/classify/train.py --data features   # train*.npz, test*.npz: features, labels
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

import torchfleet as fleet
from torchfleet.classify import Entry
from torchfleet.errors import DataError
from torchfleet.options import HelpFormatter

_NUM_TESTED = 2000


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    entry = Entry().set_train_epochs(options.epochs).set_train_batch_size(options.batch_size).set_seed(options.seed)
    entry.set_loss_type(options.loss_type).set_learning_rate(options.learning_rate).set_log_period(options.print_period)
    if options.save:
        entry.set_checkpoint_dir(options.save)
    if options.bf16:
        entry.set_strategy(fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"}))
    if options.data:
        train, test = (read(Path(options.data), name) for name in ("train", "test"))
        entry.set_dataset(train, test)
        num_classes = int(max(dataset.tensors[1].max() for dataset in (train, test))) + 1
        width = train.tensors[0].shape[1]
    else:
        people = Identities(options.num_classes, options.width, options.noise, options.seed)
        entry.set_dataset(people.samples(0), people.samples(_NUM_TESTED))
        entry.set_train_reader(lambda epoch: people.batches(epoch, options.steps, options.batch_size))
        num_classes, width = options.num_classes, options.width
    entry.set_class_num(num_classes).set_model(backbone(width, options.emb_dim), options.emb_dim)
    entry.train()
    accuracy = entry.test()
    entry.stop()
    if accuracy < options.min_accuracy:
        raise SystemExit(f"accuracy {accuracy:.4f} is less than --min_accuracy {options.min_accuracy}")


def backbone(width: int, emb_dim: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(width, 2 * emb_dim),
        torch.nn.BatchNorm1d(2 * emb_dim),
        torch.nn.ReLU(),
        torch.nn.Linear(2 * emb_dim, emb_dim),
    )


class Identities:
    """Every class is a point of its own, its samples are around it; drawn anew for every batch."""

    def __init__(self, num: int, width: int, noise: float, seed: int) -> None:
        self._centers = torch.randn(num, width, generator=torch.Generator().manual_seed(seed))
        self._noise, self._seed = noise, seed

    def batches(self, epoch: int, steps: int, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of this rank: others draw others."""
        index, number = fleet.data_shard()
        for step in range(steps):
            yield self._draw(batch_size, 1 + (epoch * steps + step) * number + index)

    def samples(self, num: int) -> TensorDataset:
        return TensorDataset(*self._draw(num, 0))

    def _draw(self, num: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed((self._seed << 32) + number)
        labels = torch.randint(len(self._centers), (num,), generator=random)
        noise = torch.randn(num, self._centers.shape[1], generator=random)
        return self._centers[labels] + self._noise * noise, labels


def read(folder: Path, name: str) -> TensorDataset:
    """All files `name`*.npz, each with arrays `features` (n, width) and `labels` (n,)."""
    files = sorted(folder.glob(f"{name}*.npz"))
    if not files:
        raise DataError(f"{folder} has no file {name}*.npz; it should hold arrays features (n, width) and labels (n,)")
    features, labels = [], []
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            for wanted in ("features", "labels"):
                if wanted not in arrays:
                    raise DataError(f"{file} has no array {wanted!r}, found {', '.join(arrays) or 'none'}")
            features.append(torch.from_numpy(arrays["features"].astype(np.float32)))
            labels.append(torch.from_numpy(arrays["labels"].astype(np.int64)))
    return TensorDataset(torch.cat(features), torch.cat(labels))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--data", default="", help="folder of train*.npz and test*.npz; generated if left out")
    parser.add_argument("--num_classes", type=int, default=1000, help="of generated data")
    parser.add_argument("--width", type=int, default=32, help="numbers per sample of generated data")
    parser.add_argument("--noise", type=float, default=0.3, help="of generated data, whose centers have deviation 1")
    parser.add_argument("--steps", type=int, default=200, help="batches per epoch of generated data")
    parser.add_argument("--emb_dim", type=int, default=64, help="numbers per embedding")
    parser.add_argument("--loss_type", default="arcface", choices=["arcface", "cosface", "softmax"], help="margin")
    parser.add_argument("--learning_rate", type=float, default=0.03, help="of SGD")
    parser.add_argument("--batch_size", type=int, default=128, help="of one rank")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the data")
    parser.add_argument("--bf16", action="store_true", help="the backbone in mixed precision")
    parser.add_argument("--save", default="", help="folder for checkpoints; training goes on from there")
    parser.add_argument("--print_period", type=int, default=50, help="batches between two lines of progress")
    parser.add_argument("--min_accuracy", type=float, default=0.0, help="end with an error below")
    parser.add_argument("--seed", type=int, default=1, help="of first values and of the order of samples")
    return parser.parse_args()


if __name__ == "__main__":
    main()
