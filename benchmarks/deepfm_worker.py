"""One process of benchmarks.deepfm and benchmarks.deepfm_cpu: a click model, trained by plain torch or a fleet."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import torchfleet as fleet
from examples.deepctr.data import DENSE, SPARSE, Columns, feature_columns, generated, sizes
from examples.deepfm.model import DeepFM as OwnDeepFM

WARM = 10  # steps before the clock starts: kernels are compiled, and the ids' ways are learned
MODELS = ("deepfm", "dcn", "example")  # deepctr-torch's DeepFM and DCN; examples/deepfm
Inputs = tuple[Any, torch.Tensor]  # what the model is called with, and whether it was clicked
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", choices=["dense", "sparse"], help="torch alone, with such embeddings")
    parser.add_argument("--mode", choices=["sync", "async", "hybrid"], default="async")
    parser.add_argument("--model", choices=MODELS, default="deepfm")
    parser.add_argument("--slots", type=int, default=len(SPARSE), help="the first categories, which the model takes")
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
    if chosen.model == "example":
        torch.manual_seed(chosen.seed)
        return OwnDeepFM(chosen.dim) if chosen.plain is None else plain_example(chosen, sparse)
    columns = [c for c in feature_columns(chosen.dim, chosen.largest) if c.name not in SPARSE[chosen.slots :]]
    from deepctr_torch import models

    kind = {"deepfm": models.DeepFM, "dcn": models.DCN}[chosen.model]
    made: torch.nn.Module = kind(columns, columns, l2_reg_linear=0, l2_reg_embedding=0, init_std=0.01, seed=chosen.seed)
    for module in made.modules():
        if isinstance(module, torch.nn.Embedding):
            module.sparse = sparse
    return made


def plain_example(chosen: argparse.Namespace, sparse: bool) -> torch.nn.Module:
    """examples/deepfm with torch's own embeddings, and first values as its tables have them."""
    made, num_ids = OwnDeepFM(chosen.dim), sum(sizes(chosen.largest).values())
    first = torch.nn.Embedding(num_ids, 1, sparse=sparse)
    second = torch.nn.Embedding(num_ids, chosen.dim, sparse=sparse)
    torch.nn.init.zeros_(first.weight)
    torch.nn.init.uniform_(second.weight, -0.05, 0.05)
    made.first, made.second = first, second  # type: ignore[assignment]
    return made


def plain(chosen: argparse.Namespace) -> dict[str, float]:
    model = make_model(chosen, sparse=chosen.plain == "sparse")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    found = timed(model, optimizer, loss_of(chosen), *batches(model, chosen, 0, 1))
    return {**found, "auc": test_auc(model, chosen)}


def by_fleet(chosen: argparse.Namespace) -> dict[str, float]:
    fleet.init()
    model = fleet.distributed_model(make_model(chosen, sparse=True))
    configs = {"hybrid": True} if chosen.mode == "hybrid" else {}
    strategy = fleet.DistributedStrategy(a_sync=chosen.mode != "sync", a_sync_configs=configs)
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.01), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return {}
    fleet.init_worker()
    warm, own = batches(model, chosen, fleet.worker_index(), fleet.worker_num())
    found = timed(model, optimizer, loss_of(chosen), warm, own)
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
    x, y = inputs(model, chosen, *generated(chosen.rows + WARM * chosen.batch * number, chosen.largest))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(chosen.seed))[index::number]
    made = [(rows_of(x, at), y[at]) for at in torch.split(order, chosen.batch)]
    return made[:WARM], made[WARM:]


def rows_of(x: Any, at: Any) -> Any:
    return {name: column[at] for name, column in x.items()} if isinstance(x, dict) else x[at]


def inputs(model: Any, chosen: argparse.Namespace, columns: Columns, clicked: np.ndarray[Any, Any]) -> Inputs:
    """As deepctr-torch's own loop calls the model, or as the loop of examples/ does: ids of all categories differ."""
    if chosen.model == "example":
        first = np.cumsum([0, *sizes(chosen.largest).values()])[:-1]
        ids = np.stack([columns[name] for name in SPARSE], axis=1).astype(np.int64) + first
        dense = np.stack([columns[name] for name in DENSE], axis=1)
        return {"ids": torch.from_numpy(ids), "dense": torch.from_numpy(dense)}, torch.from_numpy(clicked)
    return torch.from_numpy(np.stack([columns[name] for name in model.feature_index], axis=1)), torch.from_numpy(
        clicked
    )


def loss_of(chosen: argparse.Namespace) -> Loss:
    """Of what the model returns, probabilities or logits, and whether it was clicked."""
    if chosen.model == "example":
        return F.binary_cross_entropy_with_logits
    return lambda out, y: F.binary_cross_entropy(out.squeeze(1), y)


def timed(model: Any, optimizer: Any, loss: Loss, warm: list[Inputs], own: list[Inputs]) -> dict[str, float]:
    """Seconds of training, until the last gradient has arrived; processor time of this process per step."""
    is_fleet = hasattr(optimizer, "user")
    train(model, optimizer, loss, warm)
    if is_fleet:
        fleet.flush()
        fleet.barrier_worker()
    start = time.perf_counter(), time.process_time(), time.thread_time()
    train(model, optimizer, loss, fleet.prefetch(own) if is_fleet else own)
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


def train(model: Any, optimizer: Any, loss: Loss, loader: Iterable[Inputs]) -> None:
    for x, y in loader:
        found = loss(model(x), y)
        optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def test_auc(model: Any, chosen: argparse.Namespace) -> float:
    from sklearn.metrics import roc_auc_score

    x, y = inputs(model, chosen, *generated(max(2_000, chosen.rows // 5), chosen.largest, seed=1))
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(rows_of(x, slice(i, i + 4096))) for i in range(0, len(y), 4096)])
    return float(roc_auc_score(y.numpy(), scores.numpy()))


if __name__ == "__main__":
    main()
