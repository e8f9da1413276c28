"""A two-tower model for retrieval, with its embeddings on parameter servers.

python examples/two_tower/train.py                                              one process
fleetrun --server_num 2 --worker_num 2 examples/two_tower/train.py              servers and workers on this machine
fleetrun --server_num 2 --worker_num 2 examples/two_tower/train.py --mode geo   another mode
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

import torchfleet as fleet

sys.path.insert(0, str(Path(__file__).parent))
from data import NUM_TASTES, batches, generated
from model import TwoTower, loss_of
from predict import item_vectors, recall


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    fleet.init()
    model = fleet.distributed_model(TwoTower(options.users, options.items, options.dim))
    optimizer = fleet.distributed_optimizer(make_optimizer(model, options), strategy_of(options))

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    likes, held_out = generated(options.users, options.items, options.likes, options.seed)
    start, losses = time.monotonic(), []
    for epoch in range(options.epochs):
        own = batches(likes, options.batch_size, fleet.worker_index(), fleet.worker_num(), options.seed + epoch)
        for step, batch in enumerate(fleet.prefetch(own)):  # knows the batch: rows of both towers come in one message
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 50 == 0:
                fleet.report(loss=np.mean(losses[-50:]))
                print(f"epoch {epoch} step {step:4} loss {np.mean(losses[-50:]):.4f}", flush=True)
    fleet.flush()
    num_samples = len(losses) * options.batch_size
    print(f"{num_samples / (time.monotonic() - start):,.0f} samples/s on this worker, last loss {losses[-1]:.6f}")
    fleet.barrier_worker()
    fleet.flush()  # dense parameters as they are now that all workers are done
    if fleet.is_first_worker():
        model.eval()
        found = recall(model, held_out["users"], held_out["items"], item_vectors(model, options.items))
        print(f"recall@20 {found:.4f} of {options.users:,} held-out likes, among {options.items:,} items")
        if options.save:
            fleet.save_inference_model(options.save)
            predict_script = Path(__file__).with_name("predict.py")
            print(f"saved to {options.save}; predict with {predict_script} --model {options.save}")
    fleet.stop_worker()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="async", choices=["sync", "half_async", "async", "geo", "hybrid"])
    parser.add_argument("--k_steps", type=int, default=20, help="steps between two exchanges in geo mode")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--lr", type=float, help="learning rate (default: 0.1 for Adagrad, 30 for geo's SGD)")
    parser.add_argument("--dim", type=int, default=16, help="numbers in a vector")
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--likes", type=int, default=60_000, help="likes to make up, beside one held out of every user")
    parser.add_argument("--save", help="a folder to save the model to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.users < 1 or options.items < NUM_TASTES or options.batch_size < 2:
        parser.error(f"--users must be at least 1, --items at least {NUM_TASTES} and --batch_size at least 2")
    if options.likes < options.batch_size:
        parser.error(f"--likes {options.likes} is less than a batch of {options.batch_size}")
    return options


def strategy_of(options: argparse.Namespace) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = options.mode != "sync"
    if options.mode == "geo":
        strategy.a_sync_configs = {"k_steps": options.k_steps}
    elif options.mode in ("half_async", "hybrid"):
        strategy.a_sync_configs = {options.mode: True}
    return strategy


def make_optimizer(model: torch.nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    if options.mode == "geo":
        return torch.optim.SGD(model.parameters(), lr=options.lr or 30.0)
    return torch.optim.Adagrad(model.parameters(), lr=options.lr or 0.1)


if __name__ == "__main__":
    main()
