"""Admission of ids to tables on devices: the same ids get rows as in a table on servers, in saves too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.device_tables import ANY_IDS, device_table, ids_of, on_server, saved, spec

from torchfleet.base.errors import TableError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.chain import live_candidates
from torchfleet.ps.checkpoint.part_reader import load_sparse
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.table_saves import TableSaves
from torchfleet.ps.tables.settings.clock import DAY
from torchfleet.ps.tables.settings.policy import (
    CountFilterEntry,
    PredicateEntry,
    ProbabilityEntry,
    ShowClickEntry,
    Shrink,
    WindowCountEntry,
    combined,
)
from torchfleet.ps.tables.settings.spec import Rule
from torchfleet.ps.tables.sparse_table import SparseTable

Ids = np.ndarray[Any, Any]
KERNELS = ("plain", "triton")
ENTRIES = {
    "count": CountFilterEntry(3),
    "probability": ProbabilityEntry(0.4),
    "both": combined([CountFilterEntry(2), ProbabilityEntry(0.6)]),
    "predicate": PredicateEntry("count >= 4 or (count >= 2 and age_days > 1.5 and unseen_days < 1.5)"),
}


class Pair:
    """The same table on a device and on a server, with one clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernels: str = "plain", **fields: Any) -> None:
        self.now, described = 1_700_000_000, spec(dim=4, rule=Rule("adagrad", 0.1), **fields)
        self.device = device_table(described, kernels)
        self.server = on_server(described)
        monkeypatch.setattr(time, "time", lambda: float(self.now))

    def step(self, ids: Ids, seed: int = 0) -> None:
        """Look up and push; the values read are equal."""
        self.server.clock.set(self.now)
        expected = self.server.look_up(ids.view(np.uint64))
        slots, values = self.device.find_and_gather(ids_of(self.device, ids), insert=True, padding=None)
        np.testing.assert_allclose(values.cpu().numpy(), expected, rtol=2e-5, atol=2e-6)
        grads = np.random.default_rng(seed).normal(0, 0.2, (len(ids), 4)).astype(np.float32)
        self.server.push(ids.view(np.uint64), grads)
        self.device.push(slots, torch.from_numpy(grads).to(self.device.device))

    def check(self, ids: Ids) -> None:
        """The same ids have rows, with the same values, and the same ones are counted, equally often."""
        has_row = self.server.find(ids.view(np.uint64)) >= 0
        assert ((self.device.find(ids_of(self.device, ids)) >= 0).cpu().numpy() == has_row).all()
        assert self.device.num_rows == self.server.num_rows
        assert counted(self.device) == counted(self.server)


def counted(table: DeviceTable | SparseTable) -> dict[int, dict[str, int]]:
    """Candidates by key, with their statistics."""
    assert table.admission is not None
    if table.admission.candidates is None:
        return {}
    if isinstance(table, DeviceTable):
        blocks = table.admission.candidates.rows()
        chunks: Any = [(block.keys.cpu().numpy().view(np.uint64), table.admission.arrays_of(block)) for block in blocks]
    else:
        chunks = list(table.admission.candidates.chunks(1000, False))
    return {
        int(key): {name: int(column[i]) for name, column in columns.items()}
        for keys, columns in chunks
        for i, key in enumerate(keys)
    }


def drawn(seed: int, num: int = 120) -> Ids:
    random = np.random.default_rng(seed)
    return np.concatenate([random.choice(ANY_IDS, 8), (random.random(num) ** 3 * 80).astype(np.int64)])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_same_ids_get_rows_as_on_servers(entry: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, kernels, entry=ENTRIES[entry])
    for seed in range(5):
        pair.now += DAY
        pair.step(drawn(seed), seed)
        pair.check(np.unique(np.concatenate([ANY_IDS, np.arange(80)])))
    assert 0 < pair.device.num_rows < len(np.unique(np.concatenate([drawn(seed) for seed in range(5)])))


def test_padding_and_evaluation_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, entry=CountFilterEntry(2))
    ids = ids_of(pair.device, np.array([5, 7, 7]))
    for _ in range(3):
        pair.device.find(ids, insert=True, padding=5)
        pair.device.find(ids_of(pair.device, np.array([11])))
    assert pair.device.find(ids_of(pair.device, np.array([5, 7, 11]))).tolist() == [-1, 0, -1]
    assert counted(pair.device) == {}


def test_a_limit_evicts_no_row_of_the_lookup_that_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    table = device_table(spec(dim=4, entry=CountFilterEntry(2), shrink=Shrink(max_rows=100)), "plain")
    one = torch.ones(50, 4)
    for ids in (np.arange(50), np.arange(50), np.arange(50, 100), np.arange(50, 100), np.arange(100, 150)):
        table.push(table.find(ids_of(table, ids), insert=True), one)
    assert table.num_rows == 100  # of the last ids, none has appeared twice
    both = np.concatenate([np.arange(50, 100), np.arange(100, 150)])
    table.find(ids_of(table, both), insert=True)
    assert (table.find(ids_of(table, both)) >= 0).all()
    assert (table.find(ids_of(table, np.arange(50))) == -1).all()


def test_a_shrink_forgets_ids_that_are_unseen_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, entry=CountFilterEntry(3), shrink=Shrink(delete_after_unseen_days=2, max_share=1.0))
    pair.step(np.arange(20))
    pair.now += 2 * DAY
    pair.step(np.arange(10, 30))
    pair.now += DAY
    pair.server.clock.set(pair.now)
    pair.device.shrink()
    for _ in pair.server.shrink(pair.server.spec.shrink):
        pass
    pair.check(np.arange(30))
    assert set(counted(pair.device)) == set(range(10, 30))


def test_saves_carry_the_counts_into_devices_and_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full save and deltas, in which ids were admitted and others came: both kinds of tables go on as this one."""
    entry, storage = combined([CountFilterEntry(3), PredicateEntry("age_days >= 0")]), Storage(str(tmp_path))
    pair = Pair(monkeypatch, entry=entry)
    saves = TableSaves(pair.device)
    pair.step(drawn(0))
    saved(storage, saves, 1, "full")
    for number in (1, 2):
        pair.step(drawn(number), number)
        manifest = saved(storage, saves, 1 + number, "delta")
    chunks = list(live_candidates(storage, manifest, "ads"))
    assert {int(key) for keys, _ in chunks for key in keys} == set(counted(pair.server))
    described = pair.device.spec
    other, server = DeviceTable(described, "cpu", 16), on_server(described)
    load_sparse(storage, manifest, TableSaves(other))
    load_sparse(storage, manifest, server)
    assert counted(other) == counted(server) == counted(pair.server)
    pair.device, pair.server = other, server
    pair.step(drawn(3), 3)
    pair.check(np.unique(np.concatenate([ANY_IDS, np.arange(80)])))


def test_a_load_gives_rows_to_all_saved_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    table = device_table(spec(dim=2, entry=CountFilterEntry(3)), "plain")
    table.put(torch.arange(5), torch.ones(5, 2))
    assert table.num_rows == 5


@pytest.mark.parametrize(
    "entry", [WindowCountEntry(3), ShowClickEntry("show", "click"), PredicateEntry("slot == 3 and count > 1")]
)
def test_entries_that_only_servers_have_are_refused(entry: Any) -> None:
    with pytest.raises(TableError, match="'ads'"):
        DeviceTable(spec(entry=entry), "cpu")
