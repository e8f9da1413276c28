"""Every worker runs all cases in the same order and writes what each returned, or its error, to FOLDER/worker-N. The
last worker leaves before the last cases."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from torchfleet import metrics, util
from torchfleet.api import negatives
from torchfleet.api.metrics import AUC

SECONDS = 60.0  # that a worker waits for the others

Cases = dict[str, Callable[[], Any]]


def numbers(worker: int) -> dict[str, Any]:
    """What a worker brings: every kind of thing that can be brought."""
    rng = np.random.default_rng(worker)
    block = rng.integers(-50, 50, (2, 3))
    return {
        "int": int(rng.integers(100)),
        "float": float(rng.normal()),
        "bool": worker < 2,
        "numpy number": np.float32(rng.normal()),
        "list": [int(x) for x in rng.integers(0, 9, 3)],
        "nested list": [[0.5 * worker, 1.0], [2.0, -worker]],
        "float64 array": rng.normal(size=(2, 3)),
        "float32 array": rng.normal(size=5).astype(np.float32),
        "int64 array": block,
        "int32 array": block.astype(np.int32),
        "uint8 array": (block % 7).astype(np.uint8),
        "array without dimensions": np.array(rng.normal()),
        "empty array": np.zeros((0, 4)),
        "transposed array": rng.normal(size=(3, 2)).T,
        "float32 tensor": torch.from_numpy(rng.normal(size=(2, 2)).astype(np.float32)),
        "float64 tensor": torch.from_numpy(rng.normal(size=3)),
        "float16 tensor": torch.from_numpy(rng.integers(0, 9, 3).astype(np.float16)),
        "bfloat16 tensor": torch.tensor([1.0 + worker, 2.0]).to(torch.bfloat16),
        "int64 tensor": torch.from_numpy(block),
        "tensor without dimensions": torch.tensor(float(worker) - 0.5),
        "tensor with a gradient": torch.ones(2, requires_grad=True) * (worker + 1.0),
        "big array": rng.normal(size=100_000),
        "not a number": float("nan") if worker == 1 else 1.0,
        "infinite": math.inf if worker == 1 else 1.0,
    }


def things(worker: int) -> dict[str, Any]:
    """What can be gathered."""
    return {
        "int": worker * 10,
        "large int": 2**62 + worker,
        "float": 0.1 * worker,
        "text": f"wörker {worker}",
        "empty text": "",
        "bool": worker == 1,
        "none": None,
        "list": [worker, "a", [1.5, True]],
        "empty list": [],
        "dict": {"worker": worker, "values": [1, 2.5]},
        "dict with numbers as keys": {worker: "one", 7: "seven"},
        "not a number": math.nan,
        "infinite": [math.inf, -math.inf],
        "different kinds": [worker, str(worker), None][worker % 3],
        "long text": "x" * 100_000 * (worker + 1),
        "array": np.arange(worker + 1, dtype=np.int32),
        "array without numbers": np.empty((0, 3), np.float32),
        "tensor": torch.full((2, worker + 1), 0.5, dtype=torch.float64),
        "bfloat16": torch.tensor([1.0, worker], dtype=torch.bfloat16),
        "a number here and an array there": np.array([True]) if worker else 1,
    }


def samples(worker: int) -> tuple[Any, Any, Any]:
    """(logits, labels, predictions) of a worker: unequal numbers."""
    rng = np.random.default_rng(100 + worker)
    logits = rng.normal(size=500 + 300 * worker) * 2
    labels = (rng.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    return logits, labels, logits + rng.normal(size=len(logits))


def of_metrics(worker: int) -> Cases:
    logits, labels, predicted = samples(worker)
    meter = AUC()
    for part in range(3):
        meter.update(logits[part::3], labels[part::3])
    positive, negative = meter.compute()[2][2:]
    right = int(((logits > 0) == labels).sum())
    error = predicted - logits
    return {
        "auc": lambda: metrics.auc(positive, negative),
        "auc of tensors": lambda: metrics.auc(torch.from_numpy(positive), torch.from_numpy(negative)),
        "acc": lambda: metrics.acc(right, len(labels)),
        "acc of arrays": lambda: metrics.acc(np.array([right]), np.array([len(labels)])),
        "acc of tensors": lambda: metrics.acc(torch.tensor(right), torch.tensor([len(labels)])),
        "mae": lambda: metrics.mae(float(np.abs(error).sum()), len(labels)),
        "mse": lambda: metrics.mse(float((error**2).sum()), len(labels)),
        "rmse": lambda: metrics.rmse(np.array([(error**2).sum()]), np.array([len(labels)])),
    }


def rankings(worker: int) -> tuple[Any, Any]:
    """(scores, places of relevant candidates) of a worker's lists."""
    rng = np.random.default_rng(200 + worker)
    return rng.integers(0, 9, (10 + 5 * worker, 20)).astype(float), rng.integers(0, 20, 10 + 5 * worker)


def users(worker: int) -> Any:
    """Of a worker's samples: most are this worker's own, some are on all."""
    num = len(samples(worker)[0])
    return np.where(np.arange(num) % 3 == 0, np.arange(num) % 5, 1000 * worker + np.arange(num) % 7)


def vectors(worker: int) -> tuple[Any, Any, Any, Any]:
    """(user vectors, item vectors, ids, log_q) of a worker's batch, all batches of one size."""
    rng = torch.Generator().manual_seed(300 + worker)
    made = (torch.randn(4, 3, generator=rng, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return *made, torch.tensor([worker, 7, 10 + worker, 11]), torch.randn(4, generator=rng, dtype=torch.float64)


def in_batch_gradients(worker: int) -> list[Any]:
    """The loss over all workers' items, and its gradients for this worker's vectors."""
    users, items, ids, log_q = vectors(worker)
    loss = torch.nn.functional.cross_entropy(*negatives.in_batch(users, items, ids, log_q, across_workers=True))
    loss.backward()
    return [loss.item(), users.grad.numpy(), items.grad.numpy()]


def of_meters(worker: int) -> Cases:
    logits, labels, _ = samples(worker)
    meters = {"hit rate": metrics.HitRate(5), "ndcg": metrics.NDCG(5)}
    for meter in meters.values():
        meter.update(*rankings(worker))
    loss, calibration, grouped = metrics.LogLoss(), metrics.Calibration(), metrics.GAUC()
    for part in range(3):
        loss.update(logits[part::3], labels[part::3])
        calibration.update(logits[part::3], labels[part::3])
        grouped.update(logits[part::3], labels[part::3], users(worker)[part::3])
    everything = {**meters, "log loss": loss, "calibration": calibration, "gauc": grouped}
    ids = users(worker)
    return {
        **{name: lambda meter=meter: meter.compute(all_workers=True) for name, meter in everything.items()},
        "popularity": lambda: negatives.Popularity.of(ids, 1.0, across_workers=True).log_q([0, 1000, 1003]).tolist(),
        "in_batch": lambda: in_batch_gradients(worker),
    }


def mistakes(worker: int) -> Cases:
    first = worker == 0
    return {
        "all_reduce of other shapes": lambda: util.all_reduce(np.zeros(3 if first else 4)),
        "all_reduce of as many in other shapes": lambda: util.all_reduce(np.zeros((2, 3) if first else (3, 2))),
        "all_reduce in other modes": lambda: util.all_reduce(1, mode="sum" if first else "max"),
        "all_reduce of other kinds": lambda: util.all_reduce(np.zeros(3, np.float32 if first else np.float64)),
        "all_reduce in a mode that is none": lambda: util.all_reduce(1, mode="mean"),
        "all_reduce of text": lambda: util.all_reduce("one"),
        "all_reduce among servers": lambda: util.all_reduce(1, comm_world="server"),
        "all_gather among all": lambda: util.all_gather(1, comm_world="everybody"),
        "all_gather of an array of text": lambda: util.all_gather(np.array(["a"])),
        "all_gather of bytes": lambda: util.all_gather(b"abc"),
        "barrier among servers": lambda: util.barrier(comm_world="server"),
        "sum of other shapes": lambda: metrics.sum(np.zeros(3 if first else 4)),
        "sum of as many in other shapes": lambda: metrics.sum(np.zeros((2, 3) if first else (3, 2))),
        "sum here and max there": lambda: metrics.sum(1.0) if first else metrics.max(1.0),
        "auc of other numbers of bins": lambda: metrics.auc(np.ones(9 if first else 5), np.ones(9 if first else 5)),
        "auc of other negatives": lambda: metrics.auc(np.ones(9), np.ones(9 if first else 5)),
        "acc without samples": lambda: metrics.acc(0, 0),
        "rmse without samples": lambda: metrics.rmse(np.zeros(1), np.zeros(1)),
    }


def all_cases(worker: int) -> Cases:
    cases: Cases = {}
    for kind, value in numbers(worker).items():
        for mode in ("sum", "max", "min"):
            cases[f"all_reduce {mode} {kind}"] = lambda value=value, mode=mode: util.all_reduce(value, mode=mode)
            cases[f"metrics {mode} {kind}"] = lambda value=value, mode=mode: getattr(metrics, mode)(value)
    for kind, value in things(worker).items():
        cases[f"all_gather {kind}"] = lambda value=value: util.all_gather(value)
    cases.update(of_metrics(worker))
    cases.update(of_meters(worker))
    cases.update(mistakes(worker))
    for rank in (0, 1, 99):
        cases[f"print_on_rank {rank}"] = lambda rank=rank: printed(lambda: util.print_on_rank("hello", rank))
    cases["barrier"] = util.barrier
    cases["sum after all mistakes"] = lambda: util.all_reduce([worker, 1])
    return cases


def printed(call: Callable[[], Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        call()
    return text.getvalue()


def outcome(case: Callable[[], Any]) -> tuple[Any, ...]:
    try:
        return ("ok", case())
    except Exception as error:
        return ("error", isinstance(error, fleet.FleetError), f"{type(error).__name__}: {error}")


def main(folder: Path) -> None:
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(1, 1))
    strategy = fleet.DistributedStrategy(sync_timeout=SECONDS)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    found = {"before init_worker": outcome(lambda: metrics.sum(np.ones(1)))}
    if fleet.is_server():
        (folder / f"server-{fleet.server_index()}").write_bytes(pickle.dumps(found))
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    worker, num = fleet.worker_index(), fleet.worker_num()
    for name, case in all_cases(worker).items():
        fleet.barrier_worker()  # what one case leaves behind does not reach the next
        found[name] = outcome(case)
    if worker < num - 1:
        found["sum without the one that left"] = outcome(lambda: util.all_reduce(worker + 1))
        found["auc without the one that left"] = outcome(of_metrics(worker)["auc"])
        found["gathered without the one that left"] = outcome(lambda: util.all_gather(worker))
        found["barrier without the one that left"] = outcome(util.barrier)
    (folder / f"worker-{worker}").write_bytes(pickle.dumps(found))
    fleet.stop_worker()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main(Path(sys.argv[1]))
