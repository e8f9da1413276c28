"""A job whose workers meet once, at the end. Worker 1 comes late, or not at all. For fleetrun in tests."""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

import torchfleet as fleet


def main() -> None:
    options = parse()
    is_again = bool(os.environ.get("FLEET_RESTART"))
    time.sleep(options.start if is_again else 0.0)
    fleet.init()
    strategy = fleet.DistributedStrategy(a_sync=True, sync_timeout=options.sync_timeout)
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fleet.flush()
    print(f"worker {fleet.worker_index()} has trained", flush=True)
    if fleet.worker_index() == 1 and not (is_again and options.comes):
        time.sleep(1000)  # until it is killed
    fleet.barrier_worker()
    print(f"worker {fleet.worker_index()} has met the others", flush=True)
    fleet.stop_worker()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", type=float, default=0.0, help="seconds that a worker takes to start again")
    parser.add_argument("--comes", action="store_true", help="worker 1 meets the others after it was started again")
    parser.add_argument("--sync_timeout", type=float, default=600.0)
    return parser.parse_args()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    sys.exit(main())
