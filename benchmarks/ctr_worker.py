"""One role of benchmarks.ctr: CTR-DNN trained for a while and timed; or, as `tower`, its network alone."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from examples.ctr_dnn.model import CTRDNN, loss_of, slots


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "tower"])
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--files", nargs="*", default=[])
    parser.add_argument("--test", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = tower(options) if options.what == "tower" else train(options)
    if found:
        print(f"RESULT {json.dumps(found)}", flush=True)


def tower(options: argparse.Namespace) -> dict[str, float]:
    """Forward and backward of the bare network; `input`: with the gradient that embeddings would need."""
    network = CTRDNN().tower
    values, labels = torch.randn(options.batch, 273), {"label": torch.randint(0, 2, (options.batch, 1))}
    rates = {}
    for name in ("bare", "input"):
        values.requires_grad_(name == "input")
        times = []
        end = time.perf_counter() + options.seconds / 2
        while time.perf_counter() < end:
            start = time.perf_counter()
            loss_of(network(values), labels).backward()  # type: ignore[no-untyped-call]
            network.zero_grad()
            values.grad = None
            times.append(time.perf_counter() - start)
        rates[name] = options.batch * (len(times) - 3) / sum(times[3:])
    return rates


def train(options: argparse.Namespace) -> dict[str, Any]:
    fleet.init()
    model = fleet.distributed_model(CTRDNN())
    strategy = fleet.DistributedStrategy(a_sync=True)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return {}
    fleet.init_worker()
    data = fleet.InMemoryDataset()
    data.init(options.batch, use_var=slots(), data_format=fleet.CriteoFormat(log_scale=True), drop_last=True)
    data.set_filelist(fleet.util.get_file_shard(options.files))
    data.load_into_memory()
    times: list[float] = []
    deadline = float("inf")
    while time.perf_counter() < deadline:
        data.local_shuffle()
        last = time.perf_counter()
        for batch in fleet.prefetch(data):
            loss_of(model(batch), batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter()
            times.append(now - last)
            last = now
            if now > deadline:
                break
        if deadline == float("inf"):  # the first pass made all rows
            fleet.barrier_worker()
            times, deadline = [], time.perf_counter() + options.seconds
    fleet.flush()
    stats = fleet.stats()["worker"]
    fleet.barrier_worker()
    found = {
        "samples_per_s": options.batch * len(times) / sum(times),
        "p50_step_ms": 1000 * float(np.percentile(times, 50)),
        "p99_step_ms": 1000 * float(np.percentile(times, 99)),
        "pull_wait_ms": stats["pull_wait_ms"],
        "push_wait_ms": stats["push_wait_ms"],
        "auc": test_auc(model, options.test),
    }
    fleet.stop_worker()
    return found


def test_auc(model: torch.nn.Module, files: list[str]) -> float:
    test, meter = fleet.QueueDataset(), fleet.metrics.AUC()
    test.init(4096, use_var=slots(), data_format=fleet.CriteoFormat(log_scale=True))
    test.set_filelist(files)
    fleet.infer_from_dataset(lambda batch: {"auc": meter.update(model(batch), batch["label"])}, test, print_period=0)
    return meter.compute()[0]


if __name__ == "__main__":
    main()
