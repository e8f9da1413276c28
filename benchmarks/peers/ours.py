"""torchfleet: in one process (local), or a worker or server of `fleetrun` (async, hybrid), or a rank (collective)."""

from __future__ import annotations

import argparse

import torch

import torchfleet as fleet
from benchmarks.peers import clicks
from benchmarks.peers.torch_clicks import Clicks, parts, plain_rows, test_auc, trainer


def main() -> None:
    chosen = clicks.options()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    is_collective = chosen.mode == "collective"
    fleet.init(is_collective=is_collective)
    rows = plain_rows(chosen) if is_collective else own_rows(chosen)
    model = fleet.distributed_model(Clicks(rows, chosen))
    optimizer = fleet.distributed_optimizer(optimizer_of(model, chosen), strategy_of(chosen))
    if not is_collective and fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        clicks.tell({"samples": 0, "seconds": 0, "cpu_s": 0})
        return
    if not is_collective:
        fleet.init_worker()
    chosen.index, chosen.number = fleet.worker_index(), fleet.worker_num()
    warm, own, num = parts(chosen)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    train = trainer(model, step, iter if is_collective else fleet.prefetch)
    found = clicks.timed(train, warm, own, num)
    fleet.barrier_worker()
    if fleet.is_first_worker():
        if not is_collective:
            fleet.flush()
        found["auc"] = test_auc(model, chosen)
    fleet.barrier_worker()
    clicks.tell(found)
    if not is_collective:
        fleet.stop_worker()


def own_rows(chosen: argparse.Namespace) -> torch.nn.Module:
    """Rows of any 64-bit ids, with a rule of their own if they are to have one."""
    first = fleet.nn.Uniform(-clicks.INITIAL, clicks.INITIAL)
    rule = fleet.optim.RowWiseAdagrad(lr=clicks.ROW_WISE, eps=1e-8) if chosen.rule == "row_wise" else None
    return fleet.nn.SparseEmbedding(chosen.dim, name="rows", initializer=first, optimizer=rule)


def optimizer_of(model: torch.nn.Module, chosen: argparse.Namespace) -> torch.optim.Optimizer:
    if chosen.rule == "sgd":
        return torch.optim.SGD(model.parameters(), lr=clicks.PLAIN)
    return torch.optim.Adam(model.parameters(), lr=clicks.ADAM)


def strategy_of(chosen: argparse.Namespace) -> fleet.DistributedStrategy:
    if chosen.mode in ("local", "collective"):
        return fleet.DistributedStrategy()
    return fleet.DistributedStrategy(a_sync=True, a_sync_configs={"hybrid": chosen.mode == "hybrid"})


if __name__ == "__main__":
    main()
