"""Every admission and eviction policy against an oracle in plain Python (policy_oracle.py): the same random stream of
pulls, pushes, times, shrinks, saves, restarts on another number of servers, and crashes back to the last save."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.fleets import in_threads
from support.messages import naming
from support.policy_fleets import Tables
from support.policy_oracle import DAY, HOUR, Condition, Oracle
from support.searches import examples

from torchfleet.base.errors import FleetError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.tables import eviction
from torchfleet.ps.tables.rows.row_statistics import is_pushed
from torchfleet.ps.tables.settings import clock as clock_module
from torchfleet.ps.tables.settings import policy
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.policy import (
    AdmissionEntry,
    CountFilterEntry,
    PredicateEntry,
    ProbabilityEntry,
    ShowClickEntry,
    WindowCountEntry,
    combined,
)
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

DIM, LR, FIRST = 2, 0.5, 1.0
LARGE = 10**6  # rows: a table declared so notes the order of lookups, and never evicts by itself
START = 19_000 * DAY + 5 * HOUR
Shrink = functools.partial(policy.Shrink, max_share=1.0)  # tables are small here, and may lose all their rows
NOTHING = Shrink()


@dataclass(frozen=True)
class Case:
    """Policies of a table, and what shrinks its stream calls; conditions as text and in Python."""

    entry: AdmissionEntry | list[AdmissionEntry] | None = None
    shrink: Shrink = NOTHING
    predicate: Condition | None = None
    where: Condition | None = None
    asked: tuple[tuple[Shrink, Condition | None], ...] = ()  # of fleet.shrink
    goes_back: bool = True  # the clock, at times


def where(text: str, condition: Condition) -> tuple[Shrink, Condition]:
    return Shrink(where=text), condition


SHOWS = ShowClickEntry("show", "click", show_click_decay_rate=0.75)
LASTING = ShowClickEntry("show", "click", 1.0, nonclick_weight=0.3, click_weight=1.7)
EVERYTHING = Shrink(
    delete_after_unseen_days=6,
    ttl_days=11,
    max_rows=LARGE,
    where="delta > 1e9 or slot > 1e9",
)

CASES = {
    # admission
    "count": Case(CountFilterEntry(3)),
    "probability": Case(ProbabilityEntry(0.4)),
    "window": Case(WindowCountEntry(3, hours=20.0, max_bytes=1 << 20), goes_back=False),
    "show and click": Case(SHOWS),
    "predicate on count": Case(
        PredicateEntry("count >= 2 and not count == 3"), predicate=lambda v: v["count"] in (2, 4)
    ),
    "predicate on every name": Case(
        [
            SHOWS,
            PredicateEntry(
                "count >= 5 or show > 2.5 and click < 2 or score >= 1.5 or age_days > 3 or unseen_days > 2 or slot == 4"
            ),
        ],
        predicate=lambda v: (
            v["count"] >= 5
            or (v["show"] > 2.5 and v["click"] < 2)
            or v["score"] >= 1.5
            or v["age_days"] > 3
            or v["unseen_days"] > 2
            or v["slot"] == 4
        ),
    ),
    "slot alone": Case(
        PredicateEntry("slot == 2 or count > 4"),
        Shrink(where="slot == 3"),
        predicate=lambda v: v["slot"] == 2 or v["count"] > 4,
        where=lambda v: v["slot"] == 3,
    ),
    "count and probability": Case([ProbabilityEntry(0.6), CountFilterEntry(2)]),
    "count and window": Case([WindowCountEntry(2, 12.0, 1 << 20), CountFilterEntry(3)], goes_back=False),
    "all at once": Case(
        [
            ProbabilityEntry(0.8),
            WindowCountEntry(2, 30.0, 1 << 20),
            CountFilterEntry(2),
            LASTING,
            PredicateEntry("show + click >= 2 and sqrt(count) < 100"),
        ],
        Shrink(delete_after_unseen_days=4),
        predicate=lambda v: v["show"] + v["click"] >= 2,
        goes_back=False,
    ),
    # eviction
    "unseen": Case(shrink=Shrink(delete_after_unseen_days=2)),
    "unseen, counted": Case(CountFilterEntry(2), Shrink(delete_after_unseen_days=0.5)),
    "time to live": Case(CountFilterEntry(2), Shrink(ttl_days=1.5)),
    "score": Case(SHOWS, Shrink(delete_threshold=0.5)),
    "score without decay": Case([LASTING, CountFilterEntry(2)], Shrink(delete_threshold=0.3)),
    "capacity": Case(
        CountFilterEntry(2), Shrink(max_rows=LARGE), asked=tuple((Shrink(max_rows=n), None) for n in (7, 16, 30))
    ),
    "capacity in bytes": Case(
        shrink=Shrink(max_bytes=1 << 24), asked=((Shrink(max_bytes=500), None), (Shrink(max_bytes=800), None))
    ),
    "norm": Case(
        shrink=Shrink(min_norm=1.0),
        asked=tuple((policy, None) for policy in (NOTHING, Shrink(min_norm=0.25), Shrink(min_norm=math.sqrt(2)))),
    ),
    "where": Case(
        SHOWS,
        EVERYTHING,
        where=lambda v: False,
        asked=(
            where("show < 0.5 and click == 0", lambda v: v["show"] < 0.5 and v["click"] == 0),
            where("click / max(show, 1) > 0.6", lambda v: v["click"] / max(v["show"], 1) > 0.6),
            where("score < 0.2", lambda v: v["score"] < 0.2),
            where("delta == 0 and unseen_days > 1", lambda v: v["delta"] == 0 and v["unseen_days"] > 1),
            where("slot == 2", lambda v: v["slot"] == 2),
            where("abs(age_days - 3) < 0.5", lambda v: abs(v["age_days"] - 3) < 0.5),
            where("unseen_days > 2.25", lambda v: v["unseen_days"] > 2.25),
            where(
                "norm >= 3 or -log(norm) > 1", lambda v: v["norm"] >= 3 or (v["norm"] == 0 or -math.log(v["norm"]) > 1)
            ),
            (Shrink(delete_after_unseen_days=3, max_rows=20), None),
        ),
    ),
    "schedule": Case(
        [LASTING, CountFilterEntry(2)],
        Shrink(delete_after_unseen_days=1, where="click > 3", every_hours=6),
        where=lambda v: v["click"] > 3,
    ),
    "schedule to capacity": Case(shrink=Shrink(delete_after_unseen_days=5, max_rows=LARGE, every_hours=24)),
}


def names_kept(spec: TableSpec) -> tuple[list[str], list[str]]:
    """Statistics of a row and of a candidate: what the policies look at, and no more."""
    columns = {"unseen_days": "seen", "age_days": "born", "slot": "slot", "tick": "tick", "delta": "delta"}
    shown = {"seen", "show", "click"} if spec.entry.show else set()
    row = {column for name, column in columns.items() if name in spec.shrink.names}
    looked_at = spec.entry.names | spec.shrink.names
    candidate = {columns[name] for name in ("unseen_days", "age_days", "slot") if name in looked_at}
    return sorted(row | shown), sorted(candidate | shown | {"count"})


class Stream:
    """A table on servers in this process and its oracle, through the same events."""

    def __init__(self, case: Case, seed: int, folder: str) -> None:
        self._case, self._folder, self._rng = case, folder, np.random.default_rng(seed)
        self.spec = TableSpec(
            "t",
            dim=DIM,
            rule=Rule("sgd", lr=LR),
            initializer=Initializer("constant", FIRST),
            entry=combined(case.entry),
            shrink=case.shrink,
        )
        self.oracle = Oracle(
            self.spec.entry, self.spec.shrink, DIM, LR, FIRST, case.predicate, case.where, len(names_kept(self.spec)[0])
        )
        self._row_names, self._candidate_names = names_kept(self.spec)
        keys = self._rng.integers(0, 2**64, 70, np.uint64)
        keys[:3] = [0, 1, 2**64 - 1]
        self._keys = np.unique(keys)
        self._weights = 1.0 / np.arange(1, len(self._keys) + 1)  # some are hot, most are rare
        self._last: Oracle | None = None  # as it was at the last save
        self._begin(int(self._rng.integers(1, 4)))
        self.set_time(START)

    def _begin(self, num_servers: int, loads: bool = False) -> None:
        self.tables = Tables([self.spec], num_servers, self._folder if loads else None)
        self.client = self.tables.client

    # Events

    def train(self) -> None:
        keys = self._some_keys()
        found = self.client.pull("t", keys).result()
        assert found.tolist() == self.oracle.pull(keys.tolist()).tolist()
        if self._rng.random() < 0.2:
            return  # looked up, and not learned from
        if self._rng.random() < 0.2:
            [self.save, self.shrink, self.pass_time][self._rng.integers(3)]()  # by others, before the push arrives
        repeated = np.concatenate([keys, self._rng.choice(keys, 3)])
        grads = (self._rng.integers(-8, 9, (len(repeated), DIM)) / 8).astype(np.float32)
        shows = None
        wide = grads
        if is_pushed(self.spec):
            show = self._rng.integers(0, 3, len(repeated))
            click = np.minimum(show, self._rng.integers(0, 2, len(repeated)))
            shows = np.stack([show, click, self._rng.integers(0, 6, len(repeated))], axis=1)
            wide = np.concatenate([grads, shows.astype(np.float32)], axis=1)
            shows = [tuple(line) for line in shows.tolist()]
        self.client.push("t", repeated, wide).result()
        self.oracle.push(repeated.tolist(), grads, shows)

    def predict(self) -> None:
        keys = self._some_keys()
        assert self.client.pull("t", keys, create=False).result().tolist() == self.oracle.read(keys.tolist()).tolist()

    def pass_time(self) -> None:
        step = int(self._rng.choice([60, HOUR, 5 * HOUR, DAY, 3 * DAY], p=[0.3, 0.3, 0.2, 0.15, 0.05]))
        if self._case.goes_back and self._rng.random() < 0.1:
            step = -step // 2
        self.set_time(self.oracle.now + step)

    def set_time(self, now: int) -> None:
        dropped = self.client.set_clock(now)
        assert sum(dropped.values()) == self.oracle.set_time(now, self.tables.num_servers)

    def shrink(self) -> None:
        asked = self._case.asked
        policy, condition = asked[self._rng.integers(len(asked))] if asked else (Shrink(), None)
        if not policy.drops_any:
            policy, condition = self.spec.shrink, self._case.where
            if not policy.drops_any:
                return
            dropped = self.client.shrink("", Shrink())  # the table's own
        else:
            dropped = self.client.shrink("t", policy)
        assert dropped == {"t": self.oracle.evict(policy, condition, self.tables.num_servers)}

    def save(self) -> None:
        kind: Any = "delta" if self._last is not None and self._rng.random() < 0.75 else "full"
        self.tables.save(self._folder, kind)
        self.oracle.saved()
        self._last = copy.deepcopy(self.oracle)

    def restart(self) -> None:
        """On any number of servers, with all that was learned."""
        self.save()
        self.crash()

    def crash(self) -> None:
        """Back to the last save."""
        if self._last is None:
            return
        self.oracle = copy.deepcopy(self._last)
        self._begin(int(self._rng.integers(1, 4)), loads=True)
        self.client.set_clock(self.oracle.now)

    def run(self, num_events: int) -> None:
        events = [self.train, self.predict, self.pass_time, self.shrink, self.save, self.restart, self.crash]
        shares = np.array([0.55, 0.05, 0.2, 0.08, 0.05, 0.05, 0.02])
        for number in range(num_events):
            event = events[self._rng.choice(len(events), p=shares)]
            event()
            try:
                self.compare()
            except AssertionError as error:
                raise AssertionError(f"after event {number}, {event.__name__}: {error}") from None
        self.restart()
        self.compare()

    # What the servers hold

    def compare(self) -> None:
        rows = {key: self._kept(known, self._row_names) for key, known in self.oracle.rows.items()}
        assert self.tables.rows("t") == rows
        candidates = {key: self._kept(known, self._candidate_names) for key, known in self.oracle.candidates.items()}
        assert self.tables.candidates("t") == candidates
        assert {self.tables.table("t", i).step for i in range(self.tables.num_servers)} == {self.oracle.step}

    @staticmethod
    def _kept(known: Any, names: Sequence[str]) -> dict[str, Any]:
        value = {} if known.value is None else {"value": known.value.tolist()}
        return {**value, **{name: np.asarray(getattr(known, name)).tolist() for name in names}}

    def _some_keys(self) -> np.ndarray:
        num = int(self._rng.integers(1, 12))
        return self._rng.choice(self._keys, num, replace=False, p=self._weights / self._weights.sum())


@pytest.mark.parametrize("seed", range(examples(1)))
@pytest.mark.parametrize("name", CASES)
def test_what_is_admitted_evicted_and_counted_equals_the_oracle(name: str, seed: int) -> None:
    folder = f"memory://policies/{name}/{seed}"
    stream = Stream(CASES[name], seed, folder)
    stream.run(90)
    assert read_manifest(Storage(folder)).table("t").rows == len(stream.oracle.rows)


# Beside requests, and by the wall clock


def make_table(**fields: Any) -> SparseTable:
    clock = Clock()
    clock.set(START)
    return SparseTable(TableSpec("t", **{"dim": 1, **fields}), 1 << 20, clock)


def keys_of(table: SparseTable) -> set[int]:
    return {key for keys, _, _ in table.chunks() for key in keys.tolist()}


def as_keys(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.uint64)


@pytest.mark.parametrize("policy", [Shrink(delete_after_unseen_days=1), Shrink(max_rows=60), Shrink(max_bytes=2000)])
@pytest.mark.parametrize("seed", range(examples(2)))
def test_rows_that_are_seen_before_their_slice_comes_stay(
    policy: Shrink, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where many were seen last at the same step, among which the border lies."""
    monkeypatch.setattr(eviction, "SLICE", 8)
    rng = np.random.default_rng(seed)
    table = make_table(shrink=Shrink(max_rows=LARGE, delete_after_unseen_days=1))
    for step in range(4):
        table.pull(as_keys(30 * step, 30 * step + 30))
        table.push(as_keys(0, 0), np.empty((0, 1), np.float32))
    table.clock.set(START + 2 * DAY)
    seen: set[int] = set()
    num_dropped = 0
    for num in eviction.shrink(table, policy):
        num_dropped += num
        if rng.random() < 0.3 and len(seen) < 15:
            some = np.array(sorted(keys_of(table)), np.uint64)
            tied = some[(some >= 60) & (some < 90)]  # of the step at which the border lies
            seen |= set((tied if rng.random() < 0.3 else rng.choice(some, 3)).tolist())
            table.pull(np.array(sorted(seen), np.uint64))
    assert seen <= keys_of(table)
    assert num_dropped == table.num_evicted == 120 - len(keys_of(table))
    if policy.max_rows is not None:
        assert len(keys_of(table)) == 60
    if policy.delete_after_unseen_days is not None:
        assert keys_of(table) == seen


def test_rows_on_the_border_of_a_capacity_may_be_seen_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two slices of the search for the least recent, rows that are as old as the border are looked up."""
    monkeypatch.setattr(eviction, "SLICE", 20)
    for moment in range(40):
        table = make_table(shrink=Shrink(max_rows=LARGE))
        for step in range(4):
            table.pull(as_keys(25 * step, 25 * step + 25))
            table.push(as_keys(0, 0), np.empty((0, 1), np.float32))
        there = as_keys(0, 0)
        for number, _ in enumerate(eviction.shrink(table, Shrink(max_rows=60))):
            if number == moment:
                there = np.array(sorted(keys_of(table) & set(range(25, 50))), np.uint64)
                table.pull(there)
        assert len(keys_of(table)) == 60
        assert set(there.tolist()) <= keys_of(table)


def test_a_shrink_in_slices_drops_what_one_in_one_piece_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a capacity, by lookups of which many are equally old, in a table with freed rows."""
    left = []
    for size in (1, 7, 8192):
        monkeypatch.setattr(eviction, "SLICE", size)
        rng = np.random.default_rng(3)
        table = make_table(shrink=Shrink(max_rows=LARGE))
        for _ in range(5):
            table.pull(rng.integers(0, 2**64, 40, np.uint64))
            table.push(as_keys(0, 0), np.empty((0, 1), np.float32))
        for limit in (150, 149, 97, 3):
            table.erase(np.array(sorted(keys_of(table))[:2], np.uint64))
            before = len(keys_of(table))
            assert sum(eviction.shrink(table, Shrink(max_rows=limit))) == max(0, before - limit)
            left.append(keys_of(table))
    assert left[:4] == left[4:8] == left[8:]
    assert [len(keys) for keys in left[:4]] == [150, 148, 97, 3]


def test_the_wall_clock_shrinks_tables_when_another_stretch_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [float(START)]
    monkeypatch.setattr(clock_module.time, "time", lambda: now[0])
    monkeypatch.setattr(clock_module.time, "clock_gettime", lambda which: now[0] - START)
    spec = TableSpec("t", shrink=Shrink(delete_after_unseen_days=0.5, every_hours=8))
    tables = Tables([spec], 2)
    tables.client.pull("t", np.arange(20)).result()
    for hours, num_left in (
        (1, 20),
        (5, 20),
        (12, 20),
        (13, 20),
        (20, 0),
    ):  # 5 o'clock at first; stretches at 8, 16, 24
        now[0] = START + HOUR * hours
        tables.client.ping()  # a server looks at the clock now and then
        assert len(tables.rows("t")) == num_left, f"after {hours} hours"
    tables.client.set_clock(START)  # from here on the job says how late it is
    tables.client.pull("t", np.arange(5)).result()
    now[0] += 100 * DAY
    tables.client.ping()
    assert len(tables.rows("t")) == 5


def test_times_begin_when_a_model_without_them_is_loaded() -> None:
    """A table that is declared with a policy later: its rows and candidates count as seen and made at the load."""
    folder = "memory://policies/later"
    before = Tables([TableSpec("t", entry=CountFilterEntry(2))], 2)
    before.client.set_clock(START)
    for keys in ([1, 2], [1, 3]):
        before.client.pull("t", keys).result()
    before.save(folder)
    later = TableSpec("t", entry=CountFilterEntry(2), shrink=Shrink(delete_after_unseen_days=2, ttl_days=3))
    tables = Tables([later], 3, folder)
    for now, num_rows, num_candidates in ((START + 2 * DAY, 1, 2), (START + 2 * DAY + 1, 0, 0)):
        tables.client.set_clock(now)
        tables.client.shrink("t", Shrink())
        assert (len(tables.rows("t")), len(tables.candidates("t"))) == (num_rows, num_candidates)


def test_an_error_in_a_slice_is_the_answer_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a socket, where no caller would notice that it has ended."""

    def fail(*_: Any) -> Any:
        yield 1
        raise ValueError("this slice was told to fail")

    with in_threads(["tcp://127.0.0.1:0"]) as threads:
        client = threads.client()
        client.create_table(TableSpec("t", shrink=Shrink(delete_after_unseen_days=1, every_hours=1)))
        client.set_clock(START)
        client.pull("t", [1, 2]).result()
        monkeypatch.setattr(eviction, "shrink", fail)
        for ask in (lambda: client.shrink("t", Shrink()), lambda: client.set_clock(START + DAY)):
            with pytest.raises(FleetError, match=naming("ValueError: this slice was told to fail")):
                ask()
        monkeypatch.undo()
        assert client.set_clock(START + 3 * DAY) == {"t": 2}


@pytest.mark.parametrize("num_copies", [1, 5, 20])
def test_a_new_key_that_repeats_takes_the_room_of_one_row(num_copies: int) -> None:
    table = make_table(shrink=Shrink(max_rows=40))
    table.look_up(np.arange(40, dtype=np.uint64))
    keys = np.full(num_copies, 99, np.uint64)
    table.assign(keys, np.ones((num_copies, table.spec.dim), np.float32))
    assert table.num_rows == 40
    assert table.num_evicted == 1


def test_what_is_checked_can_be_set_however_often_its_keys_repeat() -> None:
    table = make_table(shrink=Shrink(max_rows=10))
    table.look_up(np.arange(10, dtype=np.uint64))
    keys = np.repeat(np.arange(100, 110, dtype=np.uint64), 4)
    values = np.ones((len(keys), table.spec.dim), np.float32)
    table.check_assign(keys, values)
    table.assign(keys, values)
    assert table.num_rows == 10
    assert not len(table.absent(keys))
