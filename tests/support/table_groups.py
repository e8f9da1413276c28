"""Groups of tables on devices for tests, beside the same tables alone as their oracle."""

from __future__ import annotations

from typing import Any

import msgspec.structs
import numpy as np
import torch
from support.device_tables import ANY_IDS, device_table, ids_of, kernels_under_test

from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.table_group import TableGroup
from torchfleet.ps.tables.settings.spec import TableSpec

NUM = 3


def named(described: TableSpec) -> list[TableSpec]:
    return [msgspec.structs.replace(described, name=f"ads{number}", seed=number) for number in range(NUM)]


def grouped(kernels: str, described: list[TableSpec], **settings: Any) -> tuple[TableGroup, list[DeviceTable]]:
    """(a group, the same tables alone, with the same positions of keys). Rows have the same numbers in both: programs
    of Triton's interpreter run in their order, and on a GPU tables are deterministic.
    """
    is_raced = kernels_under_test(kernels)[1] == "cuda"
    made = [[device_table(each, kernels, deterministic=is_raced, **settings) for each in described] for _ in range(2)]
    joined, alone = made
    for own, other in zip(joined, alone, strict=True):
        other.memory.secret = own.memory.secret
    return TableGroup(joined), alone


def drawn(random: np.random.Generator, step: int) -> list[np.ndarray[Any, Any]]:
    """Ids of each table in a step: more than a tile, some or none. The interpreter takes a while for each."""
    nums = [(130, 20, 0), (40, 200, 70), (0, 0, 64)][step % 3]
    return [np.concatenate([random.choice(ANY_IDS, num // 2), random.integers(0, 90, num - num // 2)]) for num in nums]


def step(group: TableGroup, alone: list[DeviceTable], ids: list[np.ndarray[Any, Any]], lr: Any = None) -> None:
    """One lookup and one update of all tables, in the group and alone, with equal results."""
    keys = [ids_of(alone[0], own) for own in ids]
    found = group.find_and_gather([(k, own, 7) for k, own in enumerate(keys)], insert=True)
    random = np.random.default_rng(len(keys[0]))
    grads = [torch.from_numpy(random.normal(0, 0.2, (len(own), group.dim)).astype(np.float32)) for own in keys]
    grads = [own.to(group.device) for own in grads]
    for table, own, grad, (slots, values) in zip(alone, keys, grads, found, strict=True):
        expected = table.find_and_gather(own, insert=True, padding=7)
        assert torch.equal(slots, expected[0])
        assert torch.equal(values, expected[1])
        table.push(expected[0], grad, lr)
    group.push([len(own) for own in keys], torch.cat([slots for slots, _ in found]), torch.cat(grads), lr)


def assert_equal(group: TableGroup, alone: list[DeviceTable]) -> None:
    """All rows with their state and statistics, and the counts of updates."""
    for table, expected in zip(group.tables, alone, strict=True):
        assert table.step == expected.step
        assert table.num_rows == expected.num_rows
        for own, other in zip(table.rows(), expected.rows(), strict=True):
            assert torch.equal(own.keys, other.keys)
            assert torch.equal(own.slots, other.slots)
            assert torch.equal(own.words.view(torch.int32), other.words.view(torch.int32))
            for name, column in own.columns.items():
                assert torch.equal(column, other.columns[name]), name
