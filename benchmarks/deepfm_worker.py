"""One process of benchmarks.deepfm: deepctr-torch's DeepFM, trained by plain torch or by a fleet, and timed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import torchfleet as fleet
from examples.deepctr.data import Columns, feature_columns, generated

WARM = 10  # steps before the clock starts: kernels are compiled, and the ids' ways are learned
Inputs = tuple[torch.Tensor, torch.Tensor]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", choices=["dense", "sparse"], help="torch alone, with such embeddings")
    parser.add_argument("--mode", choices=["async", "hybrid"], default="async")
    parser.add_argument("--threads", type=int, default=1)
    for name in ("rows", "batch", "dim", "largest", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    torch.set_num_threads(chosen.threads)
    found = plain(chosen) if chosen.plain else by_fleet(chosen)
    if found:
        print(f"RESULT {json.dumps(found)}", flush=True)


def make_model(chosen: argparse.Namespace, sparse: bool) -> torch.nn.Module:
    """As it comes, but without L2 terms over whole tables, which no sparse training can have."""
    columns = feature_columns(chosen.dim, chosen.largest)
    from deepctr_torch.models import DeepFM

    made: torch.nn.Module = DeepFM(
        columns, columns, l2_reg_linear=0, l2_reg_embedding=0, init_std=0.01, seed=chosen.seed
    )
    for module in made.modules():
        if isinstance(module, torch.nn.Embedding):
            module.sparse = sparse
    return made


def plain(chosen: argparse.Namespace) -> dict[str, float]:
    model = make_model(chosen, sparse=chosen.plain == "sparse")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    found = timed(model, optimizer, *batches(model, chosen, 0, 1))
    return {**found, "auc": test_auc(model, chosen)}


def by_fleet(chosen: argparse.Namespace) -> dict[str, float]:
    fleet.init()
    model = fleet.distributed_model(make_model(chosen, sparse=True))
    strategy = fleet.DistributedStrategy(a_sync=True, a_sync_configs={"hybrid": chosen.mode == "hybrid"})
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.01), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return {}
    fleet.init_worker()
    warm, own = batches(model, chosen, fleet.worker_index(), fleet.worker_num())
    found = timed(model, optimizer, warm, own)
    fleet.barrier_worker()
    fleet.flush()  # the network as it is now that all workers are done
    stats = fleet.stats()["worker"]
    lookups = {name: stats[name] for name in ("lookups", "unforeseen_lookups", "pull_wait_ms", "push_wait_ms")}
    found = {**found, **lookups}
    if fleet.is_first_worker():
        found["auc"] = test_auc(model, chosen)
    fleet.barrier_worker()
    fleet.stop_worker()
    return found


def batches(model: Any, chosen: argparse.Namespace, index: int, number: int) -> tuple[list[Inputs], list[Inputs]]:
    """(to warm up, to train on): this worker's."""
    x, y = inputs(model, *generated(chosen.rows + WARM * chosen.batch * number, chosen.largest))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(chosen.seed))[index::number]
    made = [(x[at], y[at]) for at in torch.split(order, chosen.batch)]
    return made[:WARM], made[WARM:]


def inputs(model: Any, columns: Columns, clicked: np.ndarray[Any, Any]) -> Inputs:
    """As deepctr-torch's own loop calls the model."""
    return torch.from_numpy(np.stack([columns[name] for name in model.feature_index], axis=1)), torch.from_numpy(
        clicked
    )


def timed(model: Any, optimizer: Any, warm: list[Inputs], own: list[Inputs]) -> dict[str, float]:
    """Seconds of training, until the last gradient has arrived; processor time of this process per step."""
    is_fleet = hasattr(optimizer, "user")
    train(model, optimizer, warm)
    if is_fleet:
        fleet.flush()
        fleet.barrier_worker()
    start = time.perf_counter(), time.process_time(), time.thread_time()
    train(model, optimizer, fleet.prefetch(own) if is_fleet else own)
    if is_fleet:
        fleet.flush()
    wall, cpu, thread = (
        now - then
        for now, then in zip((time.perf_counter(), time.process_time(), time.thread_time()), start, strict=True)
    )
    num = len(own)
    return {
        "samples": sum(len(y) for _, y in own),
        "seconds": wall,
        "cpu_ms": 1000 * cpu / num,
        "training_thread_cpu_ms": 1000 * thread / num,
    }


def train(model: Any, optimizer: Any, loader: Iterable[Inputs]) -> None:
    for x, y in loader:
        loss = F.binary_cross_entropy(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def test_auc(model: Any, chosen: argparse.Namespace) -> float:
    from sklearn.metrics import roc_auc_score

    x, y = inputs(model, *generated(max(2_000, chosen.rows // 5), chosen.largest, seed=1))
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(part) for part in torch.split(x, 4096)])
    return float(roc_auc_score(y.numpy(), scores.numpy()))


if __name__ == "__main__":
    main()
