"""Rules for rows in one process: samples/s and bytes per row of each, beside FBGEMM's row-wise Adagrad.

python -m benchmarks.rules --json            10 million ids, Zipf 1.15, 26 ids of dim 16 per sample, batch 4096
python -m benchmarks.rules --quick --json    smaller and shorter, to see that it works
python -m benchmarks.rules --rules rowwise_adagrad,ftrl --json

FBGEMM's table-batched embedding takes part where it is installed (pip install fbgemm-gpu-cpu, of the version that fits
torch). Its rule is always EXACT_ROWWISE_ADAGRAD. It and each of our rules train in turns on the same batches; the
ratio of a rule is the median over the rounds of our speed over FBGEMM's in the same round. Both use as many threads as
torch may. Per batch, both sides

- take the same bags: 26 ids a sample in one tensor, and their offsets;
- give the sum of each bag as a tensor that is part of torch's graph;
- get the same gradient of these sums, by `backward`;
- sum the gradients of an id that repeats, and update its row once.

Ours finds rows by any 64-bit id through a map, checks that gradients are finite, and its step is `optimizer.step()`
and `zero_grad()`. FBGEMM's ids are row numbers of a table with a row for each; it updates rows inside `backward`. Our
tables ask the kernel for huge pages; FBGEMM's memory is torch's, which has them where GLIBC_TUNABLES is
glibc.malloc.hugetlb=1 or the system gives them to all. Rows of row-wise Adagrad are compared after three steps from
zeros.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from benchmarks.timing import in_turns, log, report

Batch = tuple[torch.Tensor, torch.Tensor]
Train = Callable[[list[Batch], torch.Tensor], None]
LR, EPS = 0.01, 1e-8
COMPARED = "rowwise_adagrad"  # FBGEMM's rule
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
def ours(name: str, dim: int) -> Iterator[Train]:
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
    with ours(COMPARED, options.dim) as train:
        train(data[:3], grad)
        ids = torch.unique(torch.cat([ids for ids, _ in data[:3]]))
        with torch.no_grad():
            found = train.model.rows(ids)  # type: ignore[attr-defined]
    return float((found - operator.split_embedding_weights()[0][ids]).abs().max())


class Timed:
    """Passes over all batches: their samples per second, and the processor time of their steps."""

    def __init__(self, train: Train, data: list[Batch], grad: torch.Tensor) -> None:
        self._train, self._data, self._grad = train, data, grad
        self.cpu_ms: list[float] = []  # of all threads, for a step

    def __call__(self) -> float:
        start, cpu = time.perf_counter(), time.process_time()
        self._train(self._data, self._grad)
        self.cpu_ms.append(1000 * (time.process_time() - cpu) / len(self._data))
        return len(self._grad) * len(self._data) / (time.perf_counter() - start)


def measure_rule(
    name: str, options: argparse.Namespace, operator: Any, data: list[Batch], grad: torch.Tensor
) -> dict[str, Any]:
    """Figures of one rule, and of FBGEMM in turns with it."""
    with ours(name, options.dim) as train:
        contenders = {name: Timed(train, data, grad)}
        if operator is not None:
            contenders["fbgemm"] = Timed(lambda *given: step_fbgemm(operator, *given), data, grad)
        for contender in contenders.values():
            contender()  # rows are made
            contender.cpu_ms.clear()
        found = in_turns(options.rounds, contenders)
        table = fleet.stats()["servers"][0]["tables"]["rows"]
    result = {
        f"{name}_samples_per_s": round(statistics.median(found[name])),
        f"{name}_cpu_ms": round(statistics.median(contenders[name].cpu_ms), 2),
        f"{name}_bytes_per_row": round(table["bytes"] / table["rows"], 1),
    }
    if operator is not None:
        ratios = [mine / theirs for mine, theirs in zip(found[name], found["fbgemm"], strict=True)]
        result[f"{name}_ratio"] = round(statistics.median(ratios), 3)
    if operator is not None and name == COMPARED:
        result["fbgemm_ratio"] = result[f"{name}_ratio"]
        result["fbgemm_samples_per_s"] = round(statistics.median(found["fbgemm"]))
        result["fbgemm_cpu_ms"] = round(statistics.median(contenders["fbgemm"].cpu_ms), 2)
    return result


def measure(options: argparse.Namespace) -> dict[str, Any]:
    data = batches(options)
    grad = torch.randn(options.batch, options.dim, generator=torch.Generator().manual_seed(0)) / options.batch
    distinct = statistics.fmean(len(torch.unique(ids)) for ids, _ in data[:8])
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "ids": options.num_ids,
        "distinct_per_batch": round(distinct),
    }
    operator = fbgemm(options.num_ids, options.dim)
    for name in options.rules:
        result |= measure_rule(name, options, operator, data, grad)
    if operator is not None:
        result["fbgemm_largest_difference"] = largest_difference(options, data, grad)
    return result


def rule_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in RULES]:
        raise argparse.ArgumentTypeError(f"expected names of {', '.join(RULES)}; found {', '.join(unknown)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"batch": 4096, "slots": 26, "dim": 16, "num_ids": 10_000_000, "num_batches": 40, "rounds": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.15)
    parser.add_argument("--rules", type=rule_names, default=list(RULES), help="some rules, by name (default: all)")
    parser.add_argument("--quick", action="store_true", help="100,000 ids, three batches, one round")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    if options.quick:
        options.num_ids, options.num_batches, options.rounds = 100_000, 3, 1
    report(measure(options), options.json)


if __name__ == "__main__":
    main()
