"""Rules for rows in one process: samples/s and bytes per row of each, and row-wise Adagrad beside FBGEMM's.

python -m benchmarks.rules --json            10 million ids, Zipf 1.15, 26 ids of dim 16 per sample, batch 4096
python -m benchmarks.rules --quick --json    smaller and shorter, to see that it works

FBGEMM's table-batched embedding takes part where it is installed (pip install fbgemm-gpu-cpu, of the version that fits
torch): one table with a row for every id, the same bags, its rule EXACT_ROWWISE_ADAGRAD. Both begin with equal values,
and their rows after three steps are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from benchmarks.timing import interleave, log, report

Batch = tuple[torch.Tensor, torch.Tensor]
LR, EPS = 0.01, 1e-8
RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR),
    "momentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9),
    "rowwise_adagrad": lambda p: fleet.optim.RowWiseAdagrad(p, lr=LR, eps=EPS),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=LR),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=LR),
    "lion": lambda p: fleet.optim.Lion(p, lr=1e-4),
    "ftrl": lambda p: fleet.optim.FTRL(p, lr=LR, l1=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
}


class Bags(torch.nn.Module):
    """A row for each bag of ids: their sum."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(dim, name="rows", initializer=fleet.nn.Constant(0.0))

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.rows(ids, offsets)  # type: ignore[no-any-return]


def batches(options: argparse.Namespace) -> list[Batch]:
    """Bags of `slots` ids, by Zipf's law, whose order says nothing of how often they come."""
    cumulative = np.cumsum(1.0 / np.arange(1, options.num_ids + 1) ** options.zipf)
    names = np.random.default_rng(0).permutation(options.num_ids)
    offsets = torch.arange(0, options.batch * options.slots + 1, options.slots)
    made = []
    for number in range(options.num_batches):
        drawn = np.random.default_rng(1 + number).random(options.batch * options.slots) * cumulative[-1]
        made.append((torch.from_numpy(names[np.searchsorted(cumulative, drawn)]), offsets))
    return made


@contextlib.contextmanager
def ours(name: str, dim: int) -> Iterator[Callable[[list[Batch], torch.Tensor], None]]:
    """A step per batch by a rule, in one process. The gradient of a batch's rows is given."""
    fleet.reset()
    fleet.init()
    model = fleet.distributed_model(Bags(dim))
    optimizer = fleet.distributed_optimizer(RULES[name](model.parameters()))
    fleet.init_worker()

    def train(data: list[Batch], grad: torch.Tensor) -> None:
        for ids, offsets in data:
            model(ids, offsets[:-1]).backward(grad)
            optimizer.step()
            optimizer.zero_grad()

    train.model = model  # type: ignore[attr-defined]
    try:
        yield train
    finally:
        fleet.stop_worker()
        fleet.reset()


def fbgemm(num_ids: int, dim: int) -> Any:
    """FBGEMM's operator, with rows of zeros; None where it is not installed."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError as error:
        log(f"without FBGEMM: {error}")
        return None
    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(num_ids, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        eps=EPS,
    )
    made.split_embedding_weights()[0].zero_()
    return made


def step_fbgemm(operator: Any, data: list[Batch], grad: torch.Tensor) -> None:
    for ids, offsets in data:
        operator(ids, offsets).backward(grad)


def largest_difference(options: argparse.Namespace, data: list[Batch], grad: torch.Tensor) -> float:
    """Between rows of both after three steps from zeros."""
    operator = fbgemm(options.num_ids, options.dim)
    step_fbgemm(operator, data[:3], grad)
    with ours("rowwise_adagrad", options.dim) as train:
        train(data[:3], grad)
        ids = torch.unique(torch.cat([ids for ids, _ in data[:3]]))
        with torch.no_grad():
            found = train.model.rows(ids)  # type: ignore[attr-defined]
    return float((found - operator.split_embedding_weights()[0][ids]).abs().max())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    data = batches(options)
    grad = torch.randn(options.batch, options.dim, generator=torch.Generator().manual_seed(0)) / options.batch
    num = options.batch * len(data)
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "ids": options.num_ids}
    operator = fbgemm(options.num_ids, options.dim)
    for name in RULES:
        with ours(name, options.dim) as train:
            train(data, grad)  # rows are made

            def timed(work: Callable[..., None] = train) -> float:
                start = time.perf_counter()
                work(data, grad)
                return float(num / (time.perf_counter() - start))

            contenders: dict[str, Callable[[], float]] = {name: timed}
            if name == "rowwise_adagrad" and operator is not None:
                step_fbgemm(operator, data, grad)
                contenders["fbgemm"] = lambda: timed(lambda *given: step_fbgemm(operator, *given))
            found = interleave(options.rounds, contenders)
            table = fleet.stats()["servers"][0]["tables"]["rows"]
        result[f"{name}_samples_per_s"] = round(found[name])
        result[f"{name}_bytes_per_row"] = round(table["bytes"] / table["rows"], 1)
        if "fbgemm" in found:
            result["fbgemm_samples_per_s"] = round(found["fbgemm"])
            result["fbgemm_ratio"] = round(found[name] / found["fbgemm"], 3)
    if operator is not None:
        result["fbgemm_largest_difference"] = largest_difference(options, data, grad)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"batch": 4096, "slots": 26, "dim": 16, "num_ids": 10_000_000, "num_batches": 40, "rounds": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.15)
    parser.add_argument("--quick", action="store_true", help="100,000 ids, three batches, one round")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    if options.quick:
        options.num_ids, options.num_batches, options.rounds = 100_000, 3, 1
    report(measure(options), options.json)


if __name__ == "__main__":
    main()
