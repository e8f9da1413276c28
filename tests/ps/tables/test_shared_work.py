"""Tables whose kernels are shared by several threads: equal to the bit, and how many threads a job has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import torchfleet as fleet
from torchfleet.ps.kernels.team import TEAM
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

NUM_KEYS, DIM = 7000, 16  # 2,048 keys at least for each thread


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    TEAM.resize(1)


def trained(rule: Rule, num_threads: int) -> tuple[np.ndarray, np.ndarray]:
    """(what was pulled, values and state at the end) of a table, in the order of the keys."""
    TEAM.resize(num_threads)
    rng = np.random.default_rng(0)
    table = SparseTable(TableSpec("rows", dim=DIM, rule=rule, initializer=Initializer("uniform", -1.0, 1.0)), 1 << 24)
    pulled = []
    for _ in range(4):
        keys = rng.permutation(2 * NUM_KEYS)[:NUM_KEYS].astype(np.uint64)
        pulled.append(table.pull(keys))
        table.push(keys, rng.standard_normal((NUM_KEYS, DIM), np.float32))
    chunks = [(keys, values) for keys, values, _ in table.chunks()]
    order = np.argsort(np.concatenate([keys for keys, _ in chunks]))
    return np.concatenate(pulled), np.concatenate([values for _, values in chunks])[order]


@pytest.mark.parametrize(
    "rule", [Rule("rowwise_adagrad"), Rule("adam", weight_decay=0.1), Rule("ftrl")], ids=lambda rule: rule.name
)
def test_a_table_is_equal_to_the_bit_by_any_number_of_threads(rule: Rule) -> None:
    alone, shared = trained(rule, 1), trained(rule, 3)
    for one, other in zip(alone, shared, strict=True):
        assert one.shape == other.shape
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32))


class Bags(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(DIM, name="rows")

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.rows(ids, offsets)  # type: ignore[no-any-return]


def sums_after_training(num_threads: int) -> tuple[int, torch.Tensor]:
    """(threads of kernels, sums of bags after three steps) in a job of one process."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        fleet.init()
        model = fleet.distributed_model(Bags())
        optimizer = fleet.distributed_optimizer(fleet.optim.RowWiseAdagrad(model.parameters(), lr=0.1))
        fleet.init_worker()
        ids = torch.randint(0, 30_000, (50_000,), generator=torch.Generator().manual_seed(0))
        offsets = torch.arange(0, 50_000, 10)
        for _ in range(3):
            model(ids, offsets).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        used = TEAM.num_threads
        with torch.no_grad():
            found = model(ids, offsets)
        fleet.stop_worker()
        return used, found
    finally:
        fleet.reset()
        torch.set_num_threads(before)


def test_a_job_of_one_process_uses_the_threads_of_torch_with_the_same_result() -> None:
    alone, shared = sums_after_training(1), sums_after_training(2)
    assert (alone[0], shared[0], TEAM.num_threads) == (1, 2, 1)
    assert torch.equal(alone[1], shared[1])
