"""Many tables in GPU memory: a step of 26 tables by one launch of each kernel, and by one per table. Part of
benchmarks.gpu.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import torchfleet as fleet
from benchmarks.gpu_tables import INITIAL, free_memory, graph_of, milliseconds
from benchmarks.timing import log
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.table_group import TableGroup
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

TABLES, ROWS, DIM = 26, 100_000, 16
ROUNDS = 3  # of every variant, in turns
RULE = Rule("adam", 1e-3, eps=1e-8)


def tables(num_ids: int) -> list[DeviceTable]:
    capacity = 2 * ROWS + num_ids
    described = [TableSpec(f"t{number}", dim=DIM, rule=RULE, initializer=INITIAL) for number in range(TABLES)]
    return [DeviceTable(each, "cuda", capacity) for each in described]


def drawn_ids(size: int) -> list[torch.Tensor]:
    return [torch.randint(0, ROWS, (size,), device="cuda") for _ in range(TABLES)]


def table_steps(size: int) -> dict[str, Callable[[], None]]:
    """Find, gather and update of all tables: each alone; alone, with one update; all together."""
    ids, grads = drawn_ids(size), [torch.randn(size, DIM, device="cuda") * 1e-3 for _ in range(TABLES)]
    alone, joined = tables(size), tables(size)
    group = TableGroup(joined)
    every = torch.arange(ROWS, device="cuda")
    for table in (*alone, *joined):
        table.find(every, insert=True)

    def separate() -> None:
        for table, own, grad in zip(alone, ids, grads, strict=True):
            table.push(table.find_and_gather(own, insert=True)[0], grad)

    def push(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        group.push([size] * TABLES, torch.cat([slots for slots, _ in found]), torch.cat(grads))

    def joined_update() -> None:
        push([table.find_and_gather(own, insert=True) for table, own in zip(joined, ids, strict=True)])

    def together() -> None:
        push(group.find_and_gather([(number, own, None) for number, own in enumerate(ids)], insert=True))

    return {"separate": separate, "joined_update": joined_update, "joined": together}


class Model(torch.nn.Module):
    """All tables; `is_joined`: looked up by the collection."""

    def __init__(self, capacity: int, is_joined: bool) -> None:
        super().__init__()
        made = {
            f"t{k}": fleet.nn.SparseEmbedding(DIM, f"t{k}", device="cuda", capacity=capacity) for k in range(TABLES)
        }
        self.tables, self.is_joined = fleet.nn.SparseEmbeddingCollection(made), is_joined
        self.head = torch.nn.Linear(TABLES * DIM, 1)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        found = self.tables(ids) if self.is_joined else {name: self.tables[name](own) for name, own in ids.items()}
        loss: torch.Tensor = self.head(torch.cat(list(found.values()), 1)).square().mean()
        return loss


def model_step(size: int, is_joined: bool) -> Callable[[], None]:
    """A training step through torchfleet's API."""
    fleet.reset()
    fleet.init(is_collective=True)
    model = fleet.distributed_model(Model(2 * ROWS + size, is_joined))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=True))
    ids = {f"t{number}": own for number, own in enumerate(drawn_ids(size))}

    def step() -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_tables(sizes: Sequence[int] = (4096, 65536)) -> dict[str, Any]:
    """Steps per second by batch size and variant, the best of ROUNDS in turns; `_graph`: as a CUDA graph."""
    found: dict[str, float] = {}
    for size in sizes:
        _measure(table_steps(size), size, found)
        free_memory()
        for name, is_joined in (("model_one_by_one", False), ("model_collection", True)):
            _measure({name: model_step(size, is_joined)}, size, found)
            free_memory()
    return {"tables": found}


def _measure(steps: Mapping[str, Callable[[], None]], size: int, found: dict[str, float]) -> None:
    calls: dict[str, Callable[[], object]] = dict(steps)
    for name, step in steps.items():
        try:
            calls[f"{name}_graph"] = graph_of(step)
        except Exception as error:  # a capture that fails must not hide the others
            log(f"{TABLES} tables, batch {size}, {name}_graph: failed")
            traceback.print_exception(error)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            place = f"{name}_{size}"
            found[place] = max(found.get(place, 0.0), 1e3 / milliseconds(call))
    for name in calls:
        log(f"{TABLES} tables, batch {size}, {name}: {found[f'{name}_{size}']:.0f} steps/s")
