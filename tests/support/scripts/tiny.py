"""The smallest job: one embedding, one linear layer, a few steps. Started by fleetrun in the tests."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import torchfleet as fleet


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = fleet.nn.SparseEmbedding(2, name="words")
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(ids)).squeeze(1)


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    fleet.init(roles(options))
    strategy = fleet.DistributedStrategy(a_sync=options.mode == "async")
    model = fleet.distributed_model(Tiny())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    if fleet.is_server():
        fleet.init_server(options.load)
        fleet.run_server()
        return
    fleet.init_worker()
    is_last = fleet.worker_index() == fleet.worker_num() - 1
    for step in range(options.steps - options.fewer * is_last):
        ids = torch.arange(8) + 8 * fleet.worker_index()
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fleet.report(loss=loss.item())
        if step == 0:
            print(f"worker {fleet.worker_index()} is training, first loss {loss.item():.4f}", flush=True)
        if options.fail_worker == fleet.worker_index() and step == options.fail_step:
            print(f"about to fail at {time.time():.3f}", flush=True)
            raise RuntimeError("this worker was told to fail")
        time.sleep(options.pause)
        if options.until and Path(options.until).exists():
            break
    fleet.flush()
    print(f"worker {fleet.worker_index()} of {fleet.worker_num()} ends with loss {loss.item():.4f}, {options.note}")
    if options.barrier:
        fleet.barrier_worker()
    if not (options.forget_stop and is_last):
        fleet.stop_worker()


def roles(options: argparse.Namespace) -> fleet.UserDefinedRoleMaker | None:
    """Roles set in code, if the command line gives one; else None, and the environment decides."""
    if options.role is None:
        return None
    return fleet.UserDefinedRoleMaker(role=options.role, worker_num=1, server_endpoints=[options.endpoint])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="sync", choices=["sync", "async"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after every step")
    parser.add_argument("--until", help="stop as soon as this file exists")
    parser.add_argument("--fail_worker", type=int, default=-1)
    parser.add_argument("--fail_step", type=int, default=2)
    parser.add_argument("--fewer", type=int, default=0, help="steps that the last worker makes less than the others")
    parser.add_argument("--barrier", action="store_true", help="meet behind the last step")
    parser.add_argument("--forget_stop", action="store_true", help="the last worker ends without fleet.stop_worker()")
    parser.add_argument("--load", help="the servers load this model")
    parser.add_argument("--note", default="no note", help="said at the end")
    parser.add_argument("--role", choices=["worker", "server"])
    parser.add_argument("--endpoint", default="")
    return parser.parse_args()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    sys.exit(main())
