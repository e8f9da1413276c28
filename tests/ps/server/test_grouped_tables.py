"""Requests for many small tables: one kernel for all of them answers, and changes, what each table would have."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from support.cases import each_of
from support.messages import naming

from torchfleet.base.errors import TableError
from torchfleet.ps.net.transport import InProcess
from torchfleet.ps.net.wire import BOUNDED, DENSE_BACK, VERSIONS
from torchfleet.ps.server import commands, kept_pushes
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.tables.table_group import TableGroup
from torchfleet.ps.worker.client.client import Client

SIZES = range(3, 3 + 7 * 11, 7)
RULES = {
    "sgd": Rule("sgd"),
    "adagrad": Rule("adagrad", lr_decay=0.1, low=-0.5, high=0.5),
    "adam": Rule("adam"),
    "momentum has no kernel": Rule("sgd", momentum=0.9),
    "decay has no kernel": Rule("sgd", weight_decay=0.1),
}


class Job:
    """A client of one server with many small tables and a block."""

    def __init__(self, rule: Rule) -> None:
        self.server = Server()
        self.client = Client([InProcess(self.server).connect()])
        first = Initializer("normal", 0.0, 1.0)
        self.specs = [
            TableSpec(f"t{size}", "array", dim=1 + 4 * (i % 2), size=size, rule=rule, initializer=first)
            for i, size in enumerate(SIZES)
        ]
        unbounded = msgspec.structs.replace(rule, low=-math.inf, high=math.inf)
        for spec in (*self.specs, TableSpec("block", "dense", size=101, rule=unbounded)):
            self.client.create_table(spec)
        self.client.set_dense("block", np.ones(101, np.float32))

    def pull(self, keys: dict[str, Any], create: bool = True) -> list[Any]:
        found = self.client.pull_tables(keys, create).result()
        return [*(found.rows[name].copy() for name in keys), found.versions]

    def push(self, grads: dict[str, Any], versions: dict[str, Any], is_bounded: bool = False) -> list[Any]:
        rates = dict.fromkeys(list(grads)[::2], 0.1)
        flags, settings = DENSE_BACK | VERSIONS | (BOUNDED if is_bounded else 0), [1] if is_bounded else []
        found = self.client.push_tables(grads, rates, versions, flags, settings=settings).result()
        return [found["block"].copy(), found.versions]

    def train(self, num_steps: int, repeat: bool = False, is_bounded: bool = False) -> list[Any]:
        """All that its requests were answered."""
        rng, answers = np.random.default_rng(0), list[Any]()
        for step in range(num_steps):
            drawn = {spec.name: rng.integers(0, spec.size, 20).astype(np.uint64) for spec in self.specs}
            keys = drawn if repeat else {name: np.unique(found) for name, found in drawn.items()}
            answers += self.pull(keys, create=step != 1)
            grads: dict[str, Any] = {"block": rng.normal(size=101).astype(np.float32)}
            for spec in self.specs:
                own = keys[spec.name]
                grads[spec.name] = own, rng.normal(size=(len(own), spec.dim)).astype(np.float32)
            answers += self.push(grads, answers[len(answers) - 1], is_bounded)
        return [*answers, self.tables()]

    def tables(self) -> dict[str, Any]:
        return {name: (t["step"], t["rows"], t["staleness"]) for name, t in self.client.stats()[0]["tables"].items()}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which requests a group has answered."""
    found: list[str] = []
    read, checked = TableGroup.read, TableGroup.checked

    def noted_read(self: TableGroup, *args: Any) -> bool:
        is_done = read(self, *args)
        found.extend(["pull"] * is_done)
        return is_done

    def noted_checked(self: TableGroup, *args: Any) -> Any:
        made = checked(self, *args)
        found.extend(["push"] * (made is not None))
        return made

    monkeypatch.setattr(TableGroup, "read", noted_read)
    monkeypatch.setattr(TableGroup, "checked", noted_checked)
    return found


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a function while every request is answered table by table."""

    def run(work: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(kept_pushes, "push_grouped", lambda *_: None)
            patch.setattr(commands, "push_grouped", lambda *_: None)
            patch.setattr(commands, "pull_grouped", lambda *_: None)
            patch.setattr(Client, "_joined_requests", lambda *_: None)
            return work()

    return run


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()
        else:
            assert one == other


@each_of("rule", RULES.values())
def test_answers_and_tables_are_those_of_each_table_by_itself(rule: Rule, used: list[str], apart: Any) -> None:
    used.clear()
    found = Job(rule).train(12)
    has_kernel = rule.name != "sgd" or not (rule.momentum or rule.weight_decay)
    assert used.count("push") == (11 if has_kernel else 0)  # the second step makes rows that its pull did not make
    used.clear()
    expected = apart(lambda: Job(rule).train(12))
    assert not used
    assert_same(found, expected)


def test_keys_that_repeat_are_summed(used: list[str], apart: Any) -> None:
    found = Job(Rule("adagrad")).train(6, repeat=True)
    assert "push" not in used
    assert_same(found, apart(lambda: Job(Rule("adagrad")).train(6, repeat=True)))


def test_pushes_that_a_bound_may_hold_are_the_same(used: list[str], apart: Any) -> None:
    found = Job(Rule("adagrad")).train(6, is_bounded=True)
    assert used.count("push") == 2 * 5  # checked when it comes, and when it is applied
    assert_same(found, apart(lambda: Job(Rule("adagrad")).train(6, is_bounded=True)))


def test_rows_that_exist_are_read_together_and_new_ones_table_by_table(used: list[str]) -> None:
    job = Job(Rule("adagrad"))
    every = {spec.name: np.arange(spec.size, dtype=np.uint64) for spec in job.specs}
    first = job.pull(every)
    assert used == []
    assert_same(job.pull(every), first)
    assert used == ["pull"]
    assert job.tables()["t3"][1] == 3


@pytest.mark.parametrize("what", ["pull", "push"])
def test_an_id_outside_of_a_table_is_refused_as_by_the_table(what: str) -> None:
    job = Job(Rule("adagrad"))
    keys = {spec.name: np.zeros(1, np.uint64) for spec in job.specs}
    keys["t10"] = np.array([10], np.uint64)
    before = job.tables()
    grads = {spec.name: (keys[spec.name], np.ones((1, spec.dim), np.float32)) for spec in job.specs}
    with pytest.raises(TableError, match=naming("'t10'", 10)):
        job.pull(keys) if what == "pull" else job.client.push_tables(grads).result()
    assert job.tables() == before


def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing() -> None:
    job = Job(Rule("adagrad"))
    every = {spec.name: np.arange(spec.size, dtype=np.uint64) for spec in job.specs}
    before = job.pull(every)
    grads = {spec.name: (every[spec.name], np.ones((spec.size, spec.dim), np.float32)) for spec in job.specs}
    grads["t10"][1][3] = np.nan
    for are_finite in (False, True):  # found by the client, and by the server
        with pytest.raises(TableError, match=naming("'t10'")):
            job.client.push_tables(grads, are_finite=are_finite).result()
    assert_same(job.pull(every), before)


def test_a_block_beside_small_tables_is_checked_too() -> None:
    job = Job(Rule("adagrad"))
    every = {spec.name: np.arange(spec.size, dtype=np.uint64) for spec in job.specs}
    before = job.pull(every)
    grads: dict[str, Any] = {"block": np.full(101, np.inf, np.float32)}
    grads |= {spec.name: (every[spec.name], np.ones((spec.size, spec.dim), np.float32)) for spec in job.specs}
    with pytest.raises(TableError, match=naming("'block'")):
        job.client.push_tables(grads, are_finite=True).result()
    assert_same(job.pull(every), before)


def test_changed_rows_are_noted_for_saves_and_told_to_followers(used: list[str]) -> None:
    job = Job(Rule("adagrad"))
    table = next(table for table in job.server.state.tables.values() if table.spec.name == "t17")
    assert isinstance(table, SparseTable)
    every = {spec.name: np.arange(spec.size, dtype=np.uint64) for spec in job.specs}
    job.pull(every)
    for _ in range(2):  # the second has nothing to write
        table.begin_save(is_committed=True)
    told: list[Any] = []
    table.watch = lambda number, keys, _at=None: told.append((number, keys.tolist()))
    some = {spec.name: np.array([2, 0], np.uint64) for spec in job.specs}
    job.client.push_tables({s.name: (some[s.name], np.ones((2, s.dim), np.float32)) for s in job.specs}).result()
    assert used[-1] == "push"
    table.begin_save(is_committed=True)
    saved = [keys for keys, _, _ in table.chunks(save="delta")]
    assert np.concatenate(saved).tolist() == [0, 2]
    assert told == [(table.spec.number, [2, 0])]


def test_tables_that_are_made_anew_are_not_mistaken_for_the_former_ones() -> None:
    job = Job(Rule("adagrad"))
    every = {spec.name: np.arange(spec.size, dtype=np.uint64) for spec in job.specs}
    first = job.pull(every)
    grads = {spec.name: (every[spec.name], np.ones((spec.size, spec.dim), np.float32)) for spec in job.specs}
    job.client.push_tables(grads).result()
    job.server.state.remake_tables()
    again = job.pull(every)
    assert_same(again[:-1], first[:-1])
