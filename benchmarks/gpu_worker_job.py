"""One role of benchmarks.gpu_worker: CTR-DNN on a GPU, its rows on servers, with or without a cache."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet
from torchfleet.ps.worker.cache.row_memory import RowMemory

NUM_DENSE = 13
PROFILED = 30  # steps
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class CtrDnn(torch.nn.Module):
    def __init__(self, options: argparse.Namespace, cache: int | None) -> None:
        super().__init__()
        first = fleet.nn.Uniform(-0.01, 0.01)
        self.rows = fleet.nn.SparseEmbedding(options.dim, name="rows", initializer=first, cache=cache)
        widths = [options.slots * options.dim + NUM_DENSE, 400, 400, 400]
        layers = [(torch.nn.Linear(*pair), torch.nn.ReLU()) for pair in pairwise(widths)]
        self.tower = torch.nn.Sequential(*(layer for pair in layers for layer in pair), torch.nn.Linear(400, 1))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        rows = self.rows(ids).flatten(1)
        with torch.autocast(dense.device.type, torch.bfloat16):
            logits: torch.Tensor = self.tower(torch.cat([rows, dense], 1))
        return logits.squeeze(1).float()


def drawn(options: argparse.Namespace, num: int) -> list[Batch]:
    """Batches on the device; an id is the hash of its rank."""
    device = torch.device(options.device)
    draws = torch.Generator(device).manual_seed(1)
    ranks = torch.arange(1, options.num_ids + 1, device=device, dtype=torch.float64)
    cumulative = ranks.pow_(-options.zipf).cumsum_(0)
    made = []
    for _ in range(num):
        points = torch.rand(options.batch, options.slots, generator=draws, device=device, dtype=torch.float64)
        at = torch.searchsorted(cumulative, points * cumulative[-1])
        ids = at * 6364136223846793005 + 1442695040888963407
        dense = torch.rand(options.batch, NUM_DENSE, generator=draws, device=device)
        made.append((ids, dense, (at.float().log1p().sin().mean(1) > 0.1).float()))
    return made


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("batch", "slots", "dim", "num_ids", "warm", "steps", "eager", "profile"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--zipf", type=float, required=True)
    parser.add_argument("--cached_rows", type=float, required=True)
    parser.add_argument("--device", required=True)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy(a_sync=True, a_sync_configs={"hybrid": True})
    fleet.init(strategy=strategy)
    num_rows = int(options.cached_rows * options.num_ids)
    row_bytes = RowMemory.bytes_per_row(fleet.nn.SparseEmbedding(options.dim, name="rows").table_spec("rows"))
    state_bytes = 2 * 4 * options.dim  # of Adam
    made = CtrDnn(options, num_rows * (row_bytes + state_bytes) if num_rows else None).to(options.device)
    if not options.eager:
        made.tower.compile()
    model = fleet.distributed_model(made)
    is_fused = True if options.device == "cuda" else None
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3, fused=is_fused))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    if num_rows:
        torch.set_num_threads(1)  # threads that spin between copies take the cores of the servers
    num_timed = options.warm + options.steps
    data = drawn(options, num_timed + PROFILED * options.profile)
    fleet.init_worker()
    batches = fleet.prefetch(data[:num_timed])
    train(model, optimizer, islice(batches, options.warm))
    before, threads = fleet.stats()["worker"], thread_seconds()
    start, cpu = time.perf_counter(), time.process_time()
    losses = train(model, optimizer, batches)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    stats = fleet.stats()
    result: dict[str, Any] = {
        "samples_per_s": len(losses) * options.batch / seconds,
        "step_ms": 1000 * seconds / len(losses),
        "cpu_ms": 1000 * cpu / len(losses),
        "loss": float(torch.stack(losses).mean()),
        "servers_busy": [server["busy"] for server in stats["servers"]],
        **changes(before, stats["worker"], len(losses)),
        "thread_cpu_ms": {
            name: round(1000 * (now - threads.get(name, 0.0)) / len(losses), 3)
            for name, now in thread_seconds().items()
            if now > threads.get(name, 0.0)
        },
    }
    if options.profile:
        profile(model, optimizer, data[num_timed:])
    start = time.perf_counter()
    fleet.flush()
    print("RESULT " + json.dumps({**result, "flush_s": time.perf_counter() - start}), flush=True)
    fleet.stop_worker()


def train(model: Any, optimizer: Any, batches: Iterator[Batch]) -> list[torch.Tensor]:
    losses = []
    for ids, dense, label in batches:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, dense), label)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses[-1].item()  # waits for the device
    return losses


def thread_seconds() -> dict[str, float]:
    """Processor time of each thread of this process so far, by number and name."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {}
    for path in Path("/proc/self/task").iterdir():
        user, system = (path / "stat").read_text().rpartition(")")[2].split()[11:13]
        ticks = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        found[f"{path.name} {names.get(int(path.name), '')}".strip()] = ticks
    return found


def changes(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, Any]:
    """Of the cache, by step."""
    if "cache" not in after:
        return {}
    old, new = before["cache"]["rows"], after["cache"]["rows"]
    counted = (
        "looked_up",
        "missed",
        "pulled",
        "evicted",
        "written",
        "wait_ms",
        "begin_ms",
        "end_ms",
        "pull_ms",
        "evict_ms",
    )
    return {**{name: (new[name] - old[name]) / steps for name in counted}, "cache_rows": new["rows"]}


def profile(model: Any, optimizer: Any, data: list[Batch]) -> None:
    """Print where the time of some steps goes, on the host and on the device."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        train(model, optimizer, fleet.prefetch(data))
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=25), flush=True)
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), flush=True)


if __name__ == "__main__":
    main()
