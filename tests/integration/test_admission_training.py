"""Training under admission and eviction: against plain torch that masks what has no row, by one worker and by several,
in threads and in processes; statistics from datasets and loaders; tables that stay within their size; and mistakes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support import jobs
from support.messages import lines_naming, naming
from support.paths import SCRIPTS
from support.policy_fleets import Tables
from support.scripts import admitting, slotted

import torchfleet as fleet
from torchfleet import nn
from torchfleet.base.errors import FleetError, ModelError, StrategyError, TableError
from torchfleet.ps.tables.settings.clock import MAX_TIME
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

NUM, DIM, LR, NEEDED = 40, 3, 0.5, 3
SCRIPT = str(SCRIPTS / "admitting.py")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "PSERVER_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with jobs.clean_facade():
        yield


class Scorer(torch.nn.Module):
    def __init__(self, entry: Any = None, shrink: Shrink | None = None) -> None:
        super().__init__()
        self.ids = nn.SparseEmbedding(DIM, name="ids", entry=entry, shrink=shrink, initializer=nn.Uniform(-1, 1))
        self.out = torch.nn.Linear(DIM, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        ids = batch["ids"]
        rows = self.ids(ids) if isinstance(ids, torch.Tensor) else self.ids(ids).unsqueeze(1)
        return self.out(rows.sum(dim=1)).squeeze(1)


def counted() -> Scorer:
    return Scorer(fleet.CountFilterEntry(NEEDED))


def shown() -> Scorer:
    return Scorer(fleet.ShowClickEntry("show", "click"), Shrink(where="slot > 1000"))


def make_batch(seed: int, size: int = 6) -> dict[str, torch.Tensor]:
    """Ids repeat; most are rare."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.geometric(0.12, (size, 2)) - 1, NUM - 1)
    show = rng.integers(0, 3, size)
    made = {"ids": ids, "show": show.astype(np.float32), "click": np.minimum(show, rng.integers(0, 2, size))}
    made["y"] = rng.normal(size=size).astype(np.float32)
    return {name: torch.from_numpy(value) for name, value in made.items()}


def loss_of(model: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
    return (model(batch) - batch["y"]).square().mean()


def step(model: torch.nn.Module, optimizer: Any, batch: Any) -> float:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def first_values(spec: TableSpec) -> torch.Tensor:
    """Of new rows, worked out without servers."""
    everyone = msgspec.structs.replace(spec, entry=AdmissionEntry(), shrink=Shrink(), shard=0, num_shards=1)
    return torch.from_numpy(SparseTable(everyone, 1 << 20).pull(np.arange(NUM, dtype=np.uint64)))


class Masked:
    """The same training in plain torch: ids that were not in enough batches read zeros and learn nothing.

    `together`: several workers' batches are one step, at the end of which ids get their rows, and then the gradients.
    """

    def __init__(self, first: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.rows, self.out = first.clone(), Scorer().out
        self.counts: Counter[int] = Counter()
        self.admitted: set[int] = set()

    def step(self, batches: Sequence[Any], together: bool = False) -> list[float]:
        if not together:
            self._appear(batches)
        losses, grads = [], torch.zeros_like(self.rows)
        mask = torch.zeros(NUM, 1)
        mask[sorted(self.admitted)] = 1
        dense = [torch.zeros_like(parameter) for parameter in self.out.parameters()]
        for batch in batches:
            rows = (self.rows * mask).requires_grad_()
            loss = loss_of(lambda b, rows=rows: self.out(rows[b["ids"]].sum(dim=1)).squeeze(1), batch)
            found = torch.autograd.grad(loss, [rows, *self.out.parameters()])
            grads += found[0] / len(batches)
            dense = [total + grad / len(batches) for total, grad in zip(dense, found[1:], strict=True)]
            losses.append(loss.item())
        if together:
            self._appear(batches)
        mask[sorted(self.admitted)] = 1
        self.rows -= LR * grads * mask
        with torch.no_grad():
            for parameter, grad in zip(self.out.parameters(), dense, strict=True):
                parameter.sub_(LR * grad)
        return losses

    def _appear(self, batches: Sequence[Any]) -> None:
        for batch in batches:
            self.counts.update(set(batch["ids"].flatten().tolist()))
        self.admitted = {key for key, count in self.counts.items() if count >= NEEDED}

    def values(self) -> dict[str, torch.Tensor]:
        mask = torch.tensor([[float(key in self.admitted)] for key in range(NUM)])
        dense = {f"out.{name}": value.detach() for name, value in self.out.named_parameters()}
        return {**dense, "ids": self.rows * mask}


def statistics_of(tables: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """By key, of the parts of a table."""
    found: dict[int, dict[str, Any]] = {}
    for table in tables:
        for keys, _, columns in table.chunks():
            for i, key in enumerate(keys.tolist()):
                found[key] = {name: column[i].tolist() for name, column in columns.items()}
    return found


def counts_of(tables: Sequence[Any]) -> dict[int, int]:
    """Of keys that have no row."""
    found: dict[int, int] = {}
    for table in tables:
        for keys, columns in table.admission.candidates.chunks(100, only_changed=False):
            found.update(zip(keys.tolist(), columns["count"].tolist(), strict=True))
    return found


def parts_of(servers: jobs.Servers, name: str = "ids") -> list[Any]:
    return [servers.table(name, index) for index in range(len(servers))]


# Against plain torch


@pytest.mark.parametrize("mode", ["sync", "half_async", "async"])
@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "prefetch"])
def test_ids_without_a_row_read_zeros_and_learn_nothing(mode: str, ahead: bool) -> None:
    batches = [make_batch(seed) for seed in range(25)]
    servers = jobs.Servers(2)
    with jobs.one_worker(counted(), lambda model: jobs.sgd(model, LR), mode=mode, servers=servers) as part:
        torch.manual_seed(0)
        part.model.out.load_state_dict(Scorer().out.state_dict())
        for group in part.job.plan.dense:
            part.worker.client.set_dense(group.spec.name, group.values())
        oracle = Masked(first_values(part.job.plan.sparse["ids"].spec))
        for batch in part.prefetch(batches) if ahead and mode != "async" else batches:
            found = step(part.model, part.optimizer, batch)
            part.flush()
            assert found == pytest.approx(oracle.step([batch])[0], rel=1e-5)
        dense = {name: value.detach() for name, value in part.model.named_parameters() if len(value)}
        jobs.assert_equal_values({**dense, "ids": part.rows("ids", range(NUM))}, oracle.values(), 1e-6)
    rows = {key for table in parts_of(servers) for keys, _, _ in table.chunks() for key in keys.tolist()}
    assert rows == oracle.admitted
    assert counts_of(parts_of(servers)) == {k: n for k, n in oracle.counts.items() if n < NEEDED}
    assert 3 < len(rows) < len(oracle.counts)


def test_two_workers_in_sync_equal_plain_torch_and_each_other_whatever_the_order() -> None:
    """Every run has other pauses, so pulls and pushes come in another order; all end with the same bits."""

    def run(seed: int) -> tuple[jobs.Run, list[Any]]:
        def body(part: jobs.Part) -> list[float]:
            dice = np.random.default_rng([seed, part.index])
            losses = []
            for number in range(12):
                time.sleep(float(dice.choice([0, 0.002, 0.006])))
                loss = loss_of(part.model, make_batch(100 * part.index + number))
                time.sleep(float(dice.choice([0, 0.002, 0.006])))
                loss.backward()
                part.optimizer.step()
                part.optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        made = jobs.run(body, counted, lambda m: jobs.sgd(m, LR), num_workers=2, num_servers=2)
        tables = parts_of(made.servers)
        held = [(table.step, counts_of([table])) for table in tables]
        return made, [held, {name: value.tolist() for name, value in made.values(ids=NUM).items()}, made.results]

    made, first = run(0)
    oracle = Masked(first_values(made.parts[0].job.plan.sparse["ids"].spec))
    for number in range(12):
        losses = oracle.step([make_batch(number), make_batch(100 + number)], together=True)
        assert [results[number] for results in made.results] == pytest.approx(losses, rel=1e-5)
    jobs.assert_equal_values(made.values(ids=NUM), oracle.values(), 1e-6)
    assert counts_of(parts_of(made.servers)) == {k: n for k, n in oracle.counts.items() if n < NEEDED}
    for seed in (1, 2):
        assert run(seed)[1] == first, f"run {seed}"


@pytest.mark.slow
def test_a_fleet_of_processes_equals_threads_to_the_bit(tmp_path: Path) -> None:
    """Two servers and two workers, two days with statistics, eviction on a schedule and a chain of saves."""
    launcher = ["-m", "torchfleet.launch", "--log_dir", str(tmp_path / "log"), "--server_num", "2", "--worker_num", "2"]
    jobs.command([*launcher, SCRIPT, str(tmp_path / "processes")], 200)
    logs = "\n".join(path.read_text() for path in (tmp_path / "log").rglob("*") if path.is_file())
    for what in ("shrink", "set_time"):
        assert lines_naming(logs, f"fleet.{what}", "worker 0", "worker 1")
    folder = str(tmp_path / "threads")
    dropped: list[int] = []

    def body(part: jobs.Part) -> None:
        def save(hour: int) -> None:
            if hour % 5 == 0:
                part.worker.save(folder, "delta" if hour else "full", {"hour": hour})

        def begin_hour(now: int) -> None:
            dropped.extend(part.worker.set_time(now).values())

        admitting.train(part.model, part.optimizer, part.index, part.prefetch, part.barrier, begin_hour, save)

    made = jobs.run(body, admitting.Scorer, jobs.fleet_optimizer("adagrad", lr=0.1), num_workers=2, num_servers=3)
    specs = made.parts[0].job.plan.specs
    found, expected = (Tables(specs, 1, f) for f in (str(tmp_path / "processes"), folder))
    assert found.everything() == expected.everything()
    assert fleet.saved_extra(str(tmp_path / "processes")) == fleet.saved_extra(folder) == {"hour": 15}
    assert logs.count("rows of ids were dropped") == len(dropped) == 7
    assert sum(dropped) > 10
    assert expected.candidates("ids")
    assert expected.rows("ids")


# What counts


def test_prediction_counts_nothing(tmp_path: Path) -> None:
    with slotted.job(counted(), num_servers=2) as part:
        tables = parts_of(part.worker._servers)
        batch = make_batch(0)
        part.model.eval()
        for _ in range(NEEDED):
            part.model(batch)
        part.model.train()
        with torch.no_grad():
            for _ in range(NEEDED):
                part.model(batch)
        data = slotted.dataset("queue", [_ids_file(tmp_path, [[1, 2], [3]])], 2, _IDS)
        for _ in range(NEEDED):
            fleet.infer_from_dataset(lambda b: {"loss": part.model(b).sum()}, data, print_period=0)
        assert counts_of(tables) == {}
        step(part.model, part.optimizer, batch)
        assert counts_of(tables) == dict.fromkeys(set(batch["ids"].flatten().tolist()), 1)


def test_a_chain_of_saves_is_predicted_with(tmp_path: Path) -> None:
    """Rows that were dropped since the full save read zeros, and ids that were only counted too."""
    folder = str(tmp_path / "model")
    batches = [make_batch(seed) for seed in range(12)]
    servers = jobs.Servers(2)
    policies = fleet.CountFilterEntry(2), Shrink(max_rows=1000)
    with slotted.job(Scorer(*policies), jobs.fleet_optimizer("adagrad", lr=0.1), servers=servers) as part:
        for number, batch in enumerate(batches):
            step(part.model, part.optimizer, batch)
            if number % 4 == 0:
                fleet.save_persistables(folder, mode=int(number > 0))
            if number == 6:
                assert fleet.shrink("ids", max_rows=4)["ids"] > 5
        fleet.save_persistables(folder, mode=1)
        part.model.eval()
        expected = [part.model(batch).tolist() for batch in batches]
        num_rows = servers.num_rows("ids")
    for model in (Scorer(*policies), Scorer()):
        loaded = fleet.load_inference_model(folder, model)
        assert [loaded(batch).tolist() for batch in batches] == expected
    with jobs.clean_facade():  # and trained on, in one process
        fleet.init()
        model = fleet.distributed_model(Scorer(*policies))
        fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        fleet.init_worker(folder)
        assert sum(server["tables"]["ids"]["rows"] for server in fleet.stats()["servers"]) == num_rows
        model.eval()
        assert [model(batch).tolist() for batch in batches] == expected
        assert fleet.save_persistables(folder, mode=1) == 5
        fleet.stop_worker()


def test_a_batch_counts_an_id_once_however_often_it_is_looked_up() -> None:
    class Twice(torch.nn.Module):
        """Two modules of one table, of which the second is not foreseen in the first batch."""

        def __init__(self) -> None:
            super().__init__()
            self.one = nn.SparseEmbedding(DIM, name="ids", entry=fleet.CountFilterEntry(9))
            self.other = nn.SparseEmbedding(DIM, name="ids", entry=fleet.CountFilterEntry(9), padding_idx=0)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.one(ids) + self.other(ids.flip(0)) + self.one(ids)).sum()

    with jobs.one_worker(Twice()) as part:
        for _ in range(4):
            part.model(torch.tensor([1, 2, 2, 5, 1])).backward()
            part.optimizer.step()
        assert counts_of([part.worker._servers.table("ids")]) == {1: 4, 2: 4, 5: 4}


_IDS = [fleet.Slot("ids"), fleet.Slot("show", dtype="float32", dim=1), fleet.Slot("click", dtype="int64", dim=1),
        fleet.Slot("y", dtype="float32", dim=1)]  # fmt: skip


def _ids_file(folder: Path, lists: list[list[int]]) -> str:
    """Samples with these ids; sample i has i shows and i % 2 clicks."""
    samples = [{"ids": ids, "show": [float(i)], "click": [i % 2], "y": [0.5]} for i, ids in enumerate(lists)]
    return slotted.write(folder / "part", samples)


def _expected(samples: Sequence[tuple[Sequence[int], float, float]]) -> dict[int, tuple[float, float]]:
    """Shows and clicks by id: a place of an id in a sample counts the sample's."""
    found: dict[int, tuple[float, float]] = {}
    for ids, show, click in samples:
        for key in ids:
            before = found.get(key, (0.0, 0.0))
            found[key] = before[0] + show, before[1] + click
    return found


def _shows(tables: Sequence[Any]) -> dict[int, tuple[float, float]]:
    return {key: (kept["show"], kept["click"]) for key, kept in statistics_of(tables).items()}


def test_shows_and_clicks_come_from_a_datasets_slots(tmp_path: Path) -> None:
    lists = [[1, 2], [], [3, 3, 1], [7], [2, 9], [], [1]]
    file = _ids_file(tmp_path, lists)
    samples = [(ids, float(i), float(i % 2)) for i, ids in enumerate(lists)]
    for num_passes, mode in ((2, "sync"), (1, "async")):
        with slotted.job(shown(), num_servers=2, mode=mode) as part:
            data = slotted.dataset("memory", [file], 3, _IDS)
            for _ in range(num_passes):
                fleet.train_from_dataset(
                    part.model, data, part.optimizer, lambda out, b: (out - b["y"]).square().mean()
                )
            part.flush()
            tables = parts_of(part.worker._servers)
            assert _shows(tables) == _expected(samples * num_passes)
            assert {kept["slot"] for kept in statistics_of(tables).values()} == {1}


@pytest.mark.parametrize("mode", ["sync", "half_async", "async"])
def test_shows_and_clicks_come_from_dict_batches_of_a_loader(mode: str) -> None:
    batches = [make_batch(seed) for seed in range(8)]
    with slotted.job(shown(), num_servers=2, mode=mode) as part:
        for batch in fleet.prefetch(batches):
            step(part.model, part.optimizer, batch)
        part.flush()
        tables = parts_of(part.worker._servers)
        samples = [
            (ids, show, click)
            for batch in batches
            for ids, show, click in zip(*(batch[n].tolist() for n in ("ids", "show", "click")), strict=True)
        ]
        assert _shows(tables) == _expected(samples)
        slots = {key: kept["slot"] for key, kept in statistics_of(tables).items()}
        last = {key: {1 + i for i in range(2) if key in batch["ids"][:, i]} for batch in batches
                for key in batch["ids"].flatten().tolist()}  # fmt: skip
        assert all(slots[key] in known for key, known in last.items())


class Sometimes(Scorer):
    """Looks ids up only in batches that have some."""

    def __init__(self) -> None:
        super().__init__(fleet.ShowClickEntry("show", "click"), Shrink(where="slot > 1000"))

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) if "ids" in batch else self.out(torch.ones(len(batch["y"]), DIM)).squeeze(1)


def shown_batch(*ids: list[int]) -> dict[str, Any]:
    """Samples with these ids, each shown and clicked once."""
    ones = torch.ones(max(1, len(ids)))
    found = {"ids": torch.tensor(ids)} if ids else {}
    return {**found, "show": ones, "click": ones, "y": torch.zeros(len(ones))}


def test_a_worker_that_looks_nothing_up_trains_beside_others() -> None:
    """Its push for the table is empty, and as wide as theirs; with empty bags, too."""

    def body(part: jobs.Part) -> None:
        empty = {**shown_batch(), "ids": slotted.ragged([[]])}
        mine = [shown_batch([1, 2], [3, 1]), shown_batch([1, 2]), shown_batch([2, 2])]
        for batch in part.prefetch(mine if part.index == 0 else [shown_batch(), shown_batch([2, 4]), empty]):
            step(part.model, part.optimizer, batch)

    made = jobs.run(body, Sometimes, jobs.sgd, num_workers=2, num_servers=2)
    assert _shows(parts_of(made.servers)) == {1: (3, 3), 2: (5, 5), 3: (1, 1), 4: (1, 1)}


def test_merged_pushes_keep_slots_and_sum_shows() -> None:
    """Async: several steps wait in the queue and are sent as one; in some nothing was looked up."""
    servers = jobs.Servers(2)
    options = {"max_merge_var_num": 8, "send_wait_times": 5, "send_queue_size": 16}
    with jobs.one_worker(Sometimes(), mode="async", servers=servers, **options) as part:
        servers.hold_pushes()
        step(part.model, part.optimizer, shown_batch())
        jobs.wait_until(lambda: part.stats()["pushes"] == 1, "the sender has taken the first step, and waits")
        for batch in [shown_batch([5, 6]), shown_batch(), shown_batch([5, 6]), shown_batch([5, 6]), shown_batch()]:
            step(part.model, part.optimizer, batch)
        servers.release_pushes()
        part.flush()
        assert (part.stats()["pushes"], part.stats()["merged"]) == (2, 4)
        kept = statistics_of(parts_of(servers))
        assert {key: (k["show"], k["click"], k["slot"]) for key, k in kept.items()} == {5: (3, 3, 1), 6: (3, 3, 2)}


def test_a_slot_that_is_not_there_is_named() -> None:
    batch = make_batch(0)
    with slotted.job(shown()) as part:
        with pytest.raises(ModelError, match=naming("'show'")):
            part.model.ids(batch["ids"])
        with pytest.raises(ModelError, match=naming("'show'", "ids", "y")):
            part.model({"ids": batch["ids"], "y": batch["y"]})
        with pytest.raises(ModelError, match=naming("'click'", "ids", "show")):
            part.model({"ids": batch["ids"], "show": batch["show"]})
        with pytest.raises(ModelError, match=naming("'show'", 6, 5)):
            part.model({**batch, "show": batch["show"][:5]})
        part.model.eval()
        part.model({"ids": batch["ids"]})  # prediction needs none
        part.model.train()
        step(part.model, part.optimizer, batch)
        assert len(_shows(parts_of(part.worker._servers))) == len(batch["ids"].unique())


# A table that stays within its size


def test_hot_keys_keep_their_values_in_a_stream_of_cold_ones() -> None:
    """Ten times as many cold keys as there is room for pass by: hot ones, seen now and then, stay; memory stays."""
    table = SparseTable(TableSpec("t", dim=2, rule=Rule("sgd", lr=1.0), shrink=Shrink(max_rows=5000)), 1 << 22)
    hot, updates = np.arange(500, dtype=np.uint64), np.zeros(500)
    sizes: list[tuple[int, int]] = []
    for number in range(200):
        some = np.arange(number % 5, 500, 5)  # each in every fifth step; there is room for 18 steps' cold ones
        cold = 1000 + 250 * number + np.arange(250)
        keys = np.concatenate([hot[some], cold.astype(np.uint64)])
        values = table.pull(keys)
        assert (values[:100, 0] == updates[some]).all()
        assert (values[100:] == 0).all()
        table.push(keys, np.full((350, 2), -1.0, np.float32))
        updates[some] += 1
        assert table.index.num_keys <= 5000
        sizes.append((table.index.num_bytes, table.index.num_row_numbers))
    assert (table.pull(hot, create=False)[:, 0] == updates).all()
    assert sizes[-1] == sizes[60]
    assert sizes[-1][1] == 5000
    assert table.num_evicted == 500 + 200 * 250 - 5000


def test_rows_of_the_batch_at_hand_are_never_dropped() -> None:
    """Neither the oldest of all, which come back beside many new ones, nor those that a push makes anew."""
    table = SparseTable(TableSpec("t", dim=1, rule=Rule("sgd", lr=1.0), shrink=Shrink(max_rows=100)), 1 << 20)
    known: dict[int, float] = {}
    rng = np.random.default_rng(1)
    for number in range(300):
        keys = np.unique(np.concatenate([rng.integers(0, 150, 40), rng.integers(0, 10**6, rng.integers(0, 50))]))
        found = dict(zip(keys.tolist(), table.pull(keys.astype(np.uint64))[:, 0].tolist(), strict=True))
        assert all(value in (0.0, known.get(key, 0.0)) for key, value in found.items()), "another key's row"
        if number % 3 == 0:
            table.erase(rng.choice(keys, 5).astype(np.uint64))  # dropped between pull and push
        table.push(keys.astype(np.uint64), -(keys % 1000 + 1).astype(np.float32).reshape(-1, 1))
        after = table.pull(keys.astype(np.uint64), create=False)[:, 0].tolist()
        for key, value in zip(keys.tolist(), after, strict=True):
            assert value in (found[key] + key % 1000 + 1, key % 1000 + 1)
            known[key] = value
        assert table.index.num_keys <= 100
        assert len(np.unique(table.find(keys.astype(np.uint64)))) == len(keys)


def test_rows_of_the_batch_at_hand_stay_where_all_are_equally_old() -> None:
    table = SparseTable(TableSpec("t", dim=1, rule=Rule("sgd", lr=1.0), shrink=Shrink(max_rows=100)), 1 << 20)
    some = np.arange(90, dtype=np.uint64)
    table.pull(some)
    both = np.concatenate([some[:60], np.arange(1000, 1030, dtype=np.uint64)])  # 20 of the other 30 must go
    table.push(both, -np.arange(1, 91, dtype=np.float32).reshape(-1, 1))
    assert table.pull(both, create=False)[:, 0].tolist() == list(range(1, 91))
    assert table.stats()["rows"] == 100
    table.pull(both)
    more = np.concatenate([both[20:], np.arange(2000, 2030, dtype=np.uint64)])  # at the same step
    assert table.pull(more)[:, 0].tolist() == [*range(21, 91), *([0] * 30)]
    assert (table.find(more) >= 0).all()
    assert table.stats()["rows"] == 100


def test_a_batch_that_fits_is_taken_and_one_that_does_not_changes_nothing() -> None:
    for num_new in (1, 30, 60, 100):
        table = SparseTable(TableSpec("t", dim=1, shrink=Shrink(max_rows=100)), 1 << 20)
        for start in range(0, 100, 10):
            table.pull(np.arange(start, start + 10, dtype=np.uint64))
            table.push(np.empty(0, np.uint64), np.empty((0, 1), np.float32))
        new = np.arange(1000, 1000 + num_new, dtype=np.uint64)
        table.pull(new)
        assert (table.find(new) >= 0).all()
        assert table.stats()["rows"] == 100
        assert table.num_evicted == num_new
    before = [(keys.tolist(), columns["tick"].tolist()) for keys, _, columns in table.chunks()]
    with pytest.raises(TableError, match=r"max_rows|full"):
        table.look_up(np.arange(5000, 5101, dtype=np.uint64))
    assert [(keys.tolist(), columns["tick"].tolist()) for keys, _, columns in table.chunks()] == before


@pytest.mark.parametrize("num_servers", [1, 3])
def test_training_stays_within_max_rows_and_reuses_memory(num_servers: int) -> None:
    servers = jobs.Servers(num_servers)
    model = Scorer(shrink=Shrink(max_rows=90, delete_after_unseen_days=1, max_share=1.0))
    with slotted.job(model, servers=servers) as part:
        fleet.set_time(0)
        for number in range(60):
            ids = torch.arange(20).reshape(10, 2) + 20 * number
            ids[:2] = torch.tensor([[1, 2], [3, 4]])  # hot
            step(part.model, part.optimizer, {"ids": ids, "y": torch.zeros(10)})
            assert servers.num_rows("ids") <= 90
        assert part.rows("ids", range(1, 5)).abs().sum(dim=1).min() > 0
        numbers = [table.index.num_row_numbers for table in parts_of(servers)]
        assert sum(numbers) <= 90
        fleet.set_time(2 * 86_400)
        assert fleet.shrink() == {"ids": servers.num_rows("ids") or 90}
        assert servers.num_rows("ids") == 0
        for number in range(10):
            step(part.model, part.optimizer, {"ids": torch.arange(8).reshape(4, 2) + 100 * number, "y": torch.zeros(4)})
        assert [table.index.num_row_numbers for table in parts_of(servers)] == numbers


# Mistakes


def begin(model: torch.nn.Module, strategy: Any = None) -> Any:
    fleet.init()
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=LR), strategy)


def test_policies_need_servers_that_see_lookups() -> None:
    for model in (
        counted(),
        shown(),
        Scorer(shrink=Shrink(delete_after_unseen_days=1)),
        Scorer(shrink=Shrink(ttl_days=1)),
    ):
        with jobs.clean_facade(), pytest.raises(StrategyError, match=naming("'ids'", "geo")):
            begin(model, jobs.strategy("geo"))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: fleet.CountFilterEntry(0), "n 1"),
        (lambda: fleet.CountFilterEntry(-3), "n 1"),
        (lambda: fleet.CountFilterEntry(2.5), "entry int"),
        (lambda: fleet.CountFilterEntry("3"), "entry int"),
        (lambda: fleet.ProbabilityEntry(1.5), "p 0 1 1.5"),
        (lambda: fleet.ProbabilityEntry(float("nan")), "p 0 1"),
        (lambda: fleet.ShowClickEntry("show", ""), "slots"),
        (lambda: fleet.ShowClickEntry("show", "click", show_click_decay_rate=0.0), "show_click_decay_rate 0.0"),
        (lambda: fleet.ShowClickEntry("show", "click", click_weight=float("inf")), "click_weight"),
        (lambda: fleet.WindowCountEntry(256), "n 1 255"),
        (lambda: fleet.WindowCountEntry(3, hours=0), "hours"),
        (lambda: fleet.WindowCountEntry(3, max_bytes=0), "max_bytes"),
        (lambda: fleet.PredicateEntry(""), "condition"),
        (lambda: fleet.PredicateEntry("count >"), "'count >'"),
        (lambda: fleet.PredicateEntry("norm > 1"), "'norm'"),
        (lambda: fleet.Shrink(ttl_days=-1), "ttl_days 0"),
        (lambda: fleet.Shrink(delete_after_unseen_days=float("nan")), "delete_after_unseen_days"),
        (lambda: fleet.Shrink(max_rows=0), "max_rows 1"),
        (lambda: fleet.Shrink(min_norm=float("inf")), "min_norm"),
        (lambda: fleet.Shrink(every_hours=6), "every_hours"),
        (lambda: fleet.Shrink(ttl_days=1, every_hours=0), "every_hours"),
        (lambda: fleet.Shrink(where="count > 1"), "'count'"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_where_it_is_declared(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(TableError, match=naming(*match.split())):
        make()


def test_policies_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ModelError, match=naming("count", 2, 3)):
        Scorer([fleet.CountFilterEntry(2), fleet.CountFilterEntry(3)])
    with pytest.raises(ModelError, match=naming("fleet.CountFilterEntry")):
        Scorer([5])
    with pytest.raises(ModelError, match=naming("fleet.Shrink(...)", 7)):
        Scorer(shrink=7)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=naming("entry", "shrink")):
        nn.SparseEmbedding(2, entry=fleet.CountFilterEntry(2), num_embeddings=5)
    with pytest.raises(ModelError, match=naming("entry", "shrink")):
        nn.SparseEmbedding(2, shrink=Shrink(ttl_days=2), num_embeddings=5)
    for model in (Scorer(fleet.PredicateEntry("show > 1")), Scorer(shrink=Shrink(delete_threshold=1.0))):
        with jobs.clean_facade(), pytest.raises(FleetError, match=naming("entry=fleet.ShowClickEntry(show, click)")):
            begin(model)
    model = torch.nn.ModuleList([nn.SparseEmbedding(2, "t", fleet.CountFilterEntry(n)) for n in (2, 3)])
    with pytest.raises(ModelError, match=naming("'t'", "entry")):
        begin(model)


def test_shrink_and_set_time_say_what_they_cannot_do() -> None:
    for call in (fleet.shrink, lambda: fleet.set_time(1)):
        with pytest.raises(FleetError, match=r"fleet.init"):
            call()
    model = Scorer(shrink=Shrink(delete_after_unseen_days=3, max_share=1.0))
    plain = nn.SparseEmbedding(2, name="plain")
    model.add_module("plain", plain)
    with slotted.job(model, num_servers=2) as part:
        part.worker.client.pull("ids", np.arange(10)).result()
        for policy, column in (
            ({"ttl_days": 1}, "born"),
            ({"max_rows": 3}, "tick"),
            ({"delete_threshold": 0.0}, "show"),
            ({"where": "slot > 1"}, "slot"),
            ({"where": "delta > 1"}, "delta"),
        ):
            with pytest.raises(TableError, match=naming("'ids'", f"'{column}'", "SparseEmbedding")):
                fleet.shrink("ids", **policy)
        with pytest.raises(TableError, match=naming("'plain'", "'seen'")):
            fleet.shrink(delete_after_unseen_days=5)  # of all tables
        with pytest.raises(TableError, match=naming("'other'", "'ids'", "'plain'")):
            fleet.shrink("other", min_norm=1.0)
        with pytest.raises(TableError, match=naming("'plain'")):
            fleet.shrink("plain")
        with pytest.raises(TableError, match=r"where|condition"):
            fleet.shrink("ids", where="norm >")
        with pytest.raises(TableError, match=naming("max_share", 0)):
            fleet.shrink("ids", min_norm=1.0, max_share=2.0)
        assert fleet.shrink("plain", min_norm=1.0) == {"plain": 0}
        part.worker.client.pull("plain", np.arange(1000)).result()
        with pytest.raises(TableError, match=naming("max_share=0.5")):
            fleet.shrink("plain", min_norm=10.0)
        assert fleet.shrink("plain", min_norm=10.0, max_share=1.0) == {"plain": 1000}
        for seconds in (-1, MAX_TIME + 1, float("nan"), float("inf"), "now"):
            with pytest.raises(FleetError, match="time"):
                fleet.set_time(seconds)
        assert fleet.set_time(MAX_TIME) == {}
        assert part.worker._servers.num_rows("ids") == 10
        assert fleet.shrink() == {"ids": 10}  # by that time


def test_a_limit_below_the_number_of_servers_is_an_error_and_the_servers_go_on() -> None:
    model = Scorer(shrink=Shrink(max_rows=50))
    with slotted.job(model, num_servers=3) as part:
        part.worker.client.pull("ids", np.arange(10)).result()
        with pytest.raises(TableError, match=naming(3)):
            fleet.shrink("ids", max_rows=2)
        assert part.worker._servers.num_rows("ids") == 10
        assert fleet.shrink("ids", max_rows=3) == {"ids": 7}
        assert part.worker._servers.num_rows("ids") == 3


def test_tables_shrink_by_their_own_policies_and_count_what_goes() -> None:
    model = Scorer(fleet.CountFilterEntry(2), Shrink(delete_after_unseen_days=1, every_hours=24, max_share=1.0))
    with slotted.job(model, num_servers=2) as part:
        fleet.set_time(100 * 86_400)
        for _ in range(2):
            step(part.model, part.optimizer, make_batch(3))
        step(part.model, part.optimizer, make_batch(4))
        num = len(make_batch(3)["ids"].unique())
        tables = [server["tables"]["ids"] for server in fleet.stats()["servers"]]
        both = set(make_batch(4)["ids"].flatten().tolist()) - set(make_batch(3)["ids"].flatten().tolist())
        assert sum(table["rows"] for table in tables) == num
        assert sum(table["candidates"] for table in tables) == len(both)
        assert fleet.set_time(100 * 86_400 + 3600) == {}
        assert fleet.set_time(101 * 86_400) == {"ids": 0}  # a day later to the second: not yet more than a day
        assert fleet.set_time(102 * 86_400) == {"ids": num}
        tables = [server["tables"]["ids"] for server in fleet.stats()["servers"]]
        assert sum(table["evicted"] for table in tables) == num
        assert [table["candidates"] for table in tables] == [0, 0]
