"""Tables in GPU memory by themselves: find, gather, insert, whole steps on repeated ids. Parts of benchmarks.gpu."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.timing import log
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec

LOADS, HITS = (0.5, 0.75, 0.95), (1.0, 0.6)
BLOCK = 1 << 23  # keys inserted at once while a table is filled
NUM_IDS = 1 << 22  # of a call
STEP_IDS, STEP_ROWS = 1_048_570, 20_000_000  # of DynamicEmb's published benchmark: Zipf 1.05, dim 128
INITIAL = Initializer("uniform", -0.05, 0.05)


def milliseconds(call: Callable[[], object], num: int = 20) -> float:
    """Of a call on the GPU, mean of `num` after three more."""
    for _ in range(3):
        call()
    made: Any = torch.cuda.Event
    begin, end = made(enable_timing=True), made(enable_timing=True)
    begin.record()
    for _ in range(num):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / num


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    """The replay of a CUDA graph of what `call` does, after three calls."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # torch no longer does: what is freed in a capture may end it
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    finally:
        gc.enable()
    return graph.replay


def zipf_ranks(num: int, num_rows: int, alpha: float) -> torch.Tensor:
    """`num` numbers below num_rows, of which k comes with a probability in proportion to (k + 1) ** -alpha."""
    sums = torch.arange(1, num_rows + 1, device="cuda", dtype=torch.float64).pow_(-alpha).cumsum_(0)
    drawn = torch.rand(num, device="cuda", dtype=torch.float64) * sums[-1]
    return torch.searchsorted(sums, drawn).clamp_(max=num_rows - 1)


def filled(dim: int, rule: Rule, num_rows: int, capacity: int) -> tuple[DeviceTable, torch.Tensor]:
    """A table with random keys, and the keys."""
    table = DeviceTable(TableSpec("bench", dim=dim, rule=rule, initializer=INITIAL), "cuda", capacity)
    keys = torch.randint(-(1 << 62), 1 << 62, (num_rows,), device="cuda")
    for start in range(0, num_rows, BLOCK):
        table.find(keys[start : start + BLOCK], insert=True)
    return table, keys


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def measure_find(num_rows: int) -> dict[str, Any]:
    """Keys and rows per second over loads and shares of keys that have rows; the headlines are the worst of them."""
    rates: dict[str, dict[str, float]] = {"find": {}, "gather16": {}, "gather128": {}}
    for dim in (16, 128):
        for load in LOADS if dim == 16 else LOADS[1:2]:
            table, keys = filled(dim, Rule("sgd", 0.1), num_rows, int(num_rows / load))
            for hits in HITS:
                name, ids = f"load {load:g}, hits {hits:g}", _drawn(keys, hits)
                rates[f"gather{dim}"][name] = NUM_IDS / milliseconds(partial(table.find_and_gather, ids)) * 1e3
                rates["find"][f"{name}, dim {dim}"] = NUM_IDS / milliseconds(partial(table.find, ids)) * 1e3
                log(f"dim {dim}, {name}: find {rates['find'][f'{name}, dim {dim}'] / 1e9:.2f} G keys/s, "
                    f"with values {rates[f'gather{dim}'][name] / 1e9:.2f} G rows/s")  # fmt: skip
            table = None  # type: ignore[assignment]
            free_memory()
    return {
        "find_keys_per_s": min(rates["find"].values()),
        "gather16_rows_per_s": min(rates["gather16"].values()),
        "gather128_rows_per_s": min(rates["gather128"].values()),
        "find_rates": rates,
    }


def _drawn(keys: torch.Tensor, hits: float) -> torch.Tensor:
    """Ids of a call, of which the share `hits` is among the keys."""
    ids = keys[torch.randint(0, len(keys), (NUM_IDS,), device="cuda")]
    ids[int(hits * NUM_IDS) :] += 1
    return ids[torch.randperm(NUM_IDS, device="cuda")]


def measure_insert(num_rows: int, num_calls: int = 12) -> dict[str, Any]:
    """Find-or-insert where 40 % of the keys of every call are new, first values included, dim 16."""
    num_new = int(0.4 * NUM_IDS)
    table, keys = filled(16, Rule("sgd", 0.1), num_rows, num_rows + num_calls * num_new + 2 * NUM_IDS)
    batches = []
    for _ in range(num_calls):
        old = keys[torch.randint(0, num_rows, (NUM_IDS - num_new,), device="cuda")]
        new = torch.randint(-(1 << 62), 1 << 62, (num_new,), device="cuda")
        batches.append(torch.cat([old, new])[torch.randperm(NUM_IDS, device="cuda")])
    left = iter(batches)
    took = milliseconds(lambda: table.find(next(left), insert=True), num_calls - 3)
    log(f"insert: {NUM_IDS / took / 1e6:.2f} G keys/s, 40 % new")
    return {"insert_keys_per_s": NUM_IDS / took * 1e3}


def measure_step(num_rows: int = STEP_ROWS, num_ids: int = STEP_IDS) -> dict[str, Any]:
    """Find, gather, sums of repeated ids and the rule, in DynamicEmb's configuration."""
    found: dict[str, Any] = {}
    ranks = zipf_ranks(num_ids, num_rows, 1.05)
    for rule in (Rule("adam", 1e-3, eps=1e-8), Rule("sgd", 1e-3)):
        times = step_times(rule, 128, ranks, num_rows)
        found[f"step_{rule.name}_ms"] = times["step"]
        found[f"step_{rule.name}_parts_ms"] = times
        log(f"{rule.name}: " + ", ".join(f"{part} {took:.3f} ms" for part, took in times.items()))
        free_memory()
    return found


def step_times(rule: Rule, dim: int, ranks: torch.Tensor, num_rows: int) -> dict[str, float]:
    """Milliseconds of a step on the keys of these ranks, as a CUDA graph and without, and of its parts."""
    table, keys = filled(dim, rule, num_rows, num_rows + 4 * len(ranks))
    ids, grads = keys[ranks], torch.randn(len(ranks), dim, device="cuda") * 1e-3
    slots = table.find(ids)

    def step() -> None:
        table.push(table.find_and_gather(ids, insert=True)[0], grads)

    return {
        "step without a graph": milliseconds(step),
        "step": milliseconds(graph_of(step)),
        "find": milliseconds(lambda: table.find(ids)),
        "gather": milliseconds(lambda: table.gather(slots)),
        "find, insert and gather": milliseconds(lambda: table.find_and_gather(ids, insert=True)),
        "sort": milliseconds(lambda: torch.sort(slots, stable=True)),
        "push": milliseconds(lambda: table.push(slots, grads)),
    }
