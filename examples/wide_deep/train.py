"""Wide & Deep with its embeddings on parameter servers: the quick start.

python examples/wide_deep/train.py                                              one process
fleetrun --server_num 2 --worker_num 2 examples/wide_deep/train.py              servers and workers on this machine
fleetrun --server_num 2 --worker_num 2 examples/wide_deep/train.py --mode geo   another mode
fleetrun --server_num 1 --worker_num 2 --heter_worker_num 1 examples/wide_deep/train.py   the tower on a heter worker

train_dataset.py is the same model with a dataset in the place of DataLoader and loop.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import torchfleet as fleet
from torchfleet.options import HelpFormatter

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.columns import auc
from examples.wide_deep.data import Rows, criteo, generated
from examples.wide_deep.model import WideDeep


class Batches(Dataset):  # type: ignore[type-arg]
    """Rows in memory; a whole batch is taken at once."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows[2])

    def __getitems__(self, indices: list[int]) -> Rows:
        at = torch.tensor(indices)
        return tuple(part[at] for part in self._rows)  # type: ignore[return-value]


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = options.mode != "sync"
    if options.mode == "geo":
        strategy.a_sync_configs = {"k_steps": options.k_steps}
    elif options.mode in ("half_async", "hybrid"):
        strategy.a_sync_configs = {options.mode: True}
    network = WideDeep()
    fleet.device_guard("gpu")(network.tower)  # computed by heter workers, if there are any: docs/heter.md
    model = fleet.distributed_model(network)
    if options.mode == "geo":
        inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=options.lr or 0.5)
    else:
        inner = torch.optim.Adam(model.parameters(), lr=options.lr or 2e-3)
    optimizer = fleet.distributed_optimizer(inner, strategy)

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    train_rows, test_rows = split(criteo(options.data) if options.data else generated(options.rows, options.seed))
    loader = DataLoader(
        Batches(own_share(train_rows, options.batch_size)),
        options.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda batch: batch,
        generator=torch.Generator().manual_seed(options.seed + fleet.worker_index()),
    )
    start, losses = time.monotonic(), []
    for epoch in fleet.epochs(options.epochs):
        for step, (ids, dense, label) in enumerate(fleet.prefetch(loader)):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, dense), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 50 == 0:
                fleet.report(loss=np.mean(losses[-50:]))
                print(f"epoch {epoch + 1} step {step:4} loss {np.mean(losses[-50:]):.4f}", flush=True)
    fleet.flush()
    num_samples = len(losses) * options.batch_size
    print(f"{num_samples / (time.monotonic() - start):,.0f} samples/s on this worker, last loss {losses[-1]:.6f}")
    fleet.barrier_worker()
    fleet.flush()  # dense parameters as they are now that all workers are done
    if fleet.is_first_worker():
        quality = auc(predict(model, test_rows), test_rows[2])
        fleet.report(auc=quality)
        print(f"AUC {quality:.4f} on {len(test_rows[2]):,} held-out rows")
        if options.save:
            fleet.save_persistables(options.save)
            predict_script = Path(__file__).with_name("predict.py")
            print(f"saved to {options.save}; predict with {predict_script} --model {options.save}")
    fleet.stop_worker()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    modes = ["sync", "half_async", "async", "geo", "hybrid"]
    parser.add_argument("--mode", default="async", choices=modes, help="when gradients travel")
    parser.add_argument("--k_steps", type=int, default=20, help="steps between two exchanges in geo mode")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the data")
    parser.add_argument("--batch_size", type=int, default=512, help="samples of a step, of each worker")
    parser.add_argument("--lr", type=float, help="learning rate (default: 2e-3 for Adam, 0.5 for geo's SGD)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows to make up when there is no --data")
    parser.add_argument("--data", help="a file of raw Criteo rows, plain, .gz or .xz")
    parser.add_argument("--save", help="a folder to save the model to")
    parser.add_argument("--seed", type=int, default=0, help="of first values and of the order of samples")
    options = parser.parse_args()
    if options.data and not Path(options.data).is_file():
        parser.error(f"no file at {options.data}; leave --data out to train on generated rows")
    if options.rows < 100 or options.batch_size < 1:
        parser.error("--rows must be at least 100 and --batch_size at least 1")
    return options


def split(rows: Rows) -> tuple[Rows, Rows]:
    """The last tenth is held out."""
    cut = len(rows[2]) * 9 // 10
    return tuple(part[:cut] for part in rows), tuple(part[cut:] for part in rows)  # type: ignore[return-value]


def own_share(rows: Rows, batch_size: int) -> Rows:
    """Every n-th row; all workers get the same number of whole batches, as sync mode needs."""
    size = len(rows[2]) // fleet.worker_num() // batch_size * batch_size
    if not size:
        raise SystemExit(
            f"{len(rows[2])} rows are not a batch of {batch_size} for each of {fleet.worker_num()} workers: give more "
            "rows, or a smaller --batch_size"
        )
    return tuple(part[fleet.worker_index() :: fleet.worker_num()][:size] for part in rows)  # type: ignore[return-value]


def predict(model: torch.nn.Module, rows: Rows) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        parts = [model(ids, dense) for ids, dense in zip(rows[0].split(4096), rows[1].split(4096), strict=True)]
    return torch.cat(parts)


if __name__ == "__main__":
    main()
