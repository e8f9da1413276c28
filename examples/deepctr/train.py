"""deepctr-torch's DeepFM, as it is, with its embeddings on parameter servers.

python examples/deepctr/train.py                                              one process
fleetrun --server_num 1 --worker_num 2 examples/deepctr/train.py              a server and two workers on this machine
fleetrun --server_num 1 --worker_num 2 examples/deepctr/train.py --mode sync  another mode
python examples/deepctr/train.py --plain                                      without torchfleet, to compare

Lines that torchfleet adds are marked with `# fleet`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet  # fleet
from torchfleet.options import HelpFormatter

sys.path.insert(0, str(Path(__file__).parent))
from data import Columns, feature_columns, generated


def main() -> None:
    options = parse()
    columns = feature_columns()
    from deepctr_torch.models import DeepFM

    model = DeepFM(columns, columns, l2_reg_linear=0, l2_reg_embedding=0, init_std=0.01, seed=options.seed)
    (x, y), (test_x, test_y) = generated(options.rows), generated(options.rows // 4, seed=1)
    if options.plain:
        optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=options.lr)
        train(model, optimizer, x, y, options)
        print_auc(model, test_x, test_y)
        return

    fleet.init()  # fleet
    model = fleet.distributed_model(model, sparse=1)  # fleet: all embeddings, small ones too
    strategy = fleet.DistributedStrategy(a_sync=options.mode != "sync")  # fleet
    if options.mode == "hybrid":
        strategy.a_sync_configs = {"hybrid": True}
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=options.lr), strategy)  # fleet
    if fleet.is_server():  # fleet
        fleet.init_server()  # fleet
        fleet.run_server()  # fleet
        return
    fleet.init_worker()  # fleet
    own = slice(fleet.worker_index(), None, fleet.worker_num())  # fleet
    train(model, optimizer, {name: column[own] for name, column in x.items()}, y[own], options)
    fleet.flush()  # fleet
    fleet.barrier_worker()  # fleet
    fleet.flush()  # fleet: the network as it is now that all workers are done
    if fleet.is_first_worker():
        print_auc(model, test_x, test_y)
    fleet.stop_worker()  # fleet


def train(model: Any, optimizer: Any, x: Columns, y: np.ndarray[Any, Any], options: argparse.Namespace) -> None:
    """By deepctr-torch's own loop."""
    start = time.monotonic()
    model.compile(optimizer, "binary_crossentropy", metrics=["auc"])
    model.fit(x, y, batch_size=options.batch_size, epochs=options.epochs, verbose=2)
    print(f"{options.epochs * len(y) / (time.monotonic() - start):,.0f} samples/s here", flush=True)


def print_auc(model: Any, x: Columns, y: np.ndarray[Any, Any]) -> None:
    print(f"AUC {model.evaluate(x, y, batch_size=4096)['auc']:.4f} on {len(y):,} held-out rows", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--mode", default="async", choices=["sync", "async", "hybrid"], help="when gradients travel")
    parser.add_argument("--plain", action="store_true", help="train without torchfleet")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data")
    parser.add_argument("--batch_size", type=int, default=256, help="samples of a step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of Adagrad")
    parser.add_argument("--rows", type=int, default=40_000, help="rows to make up")
    parser.add_argument("--seed", type=int, default=0, help="of first values")
    options = parser.parse_args()
    if options.rows < 4 * options.batch_size:
        parser.error(f"--rows {options.rows} is less than four batches of {options.batch_size}")
    return options


if __name__ == "__main__":
    main()
