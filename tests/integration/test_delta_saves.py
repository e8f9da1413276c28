"""A full save and its deltas, loaded, are the live tables exactly: after any traffic, beside traffic, after saves that
failed, on any number of servers; and deltas that could continue nothing are refused, with nothing lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.grids import first_of
from support.messages import naming
from support.policy_fleets import Direct, Tables
from support.policy_oracle import DAY, HOUR

import torchfleet as fleet
from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Manifest, read_manifest
from torchfleet.ps.checkpoint.part_reader import read_part
from torchfleet.ps.server.saves import table_saving
from torchfleet.ps.server.saves.table_loading import load_model
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.policy import CountFilterEntry, ShowClickEntry, Shrink, WindowCountEntry, combined
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker import model_saving as saving_model
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

UNIFORM = Initializer("uniform", -1.0, 1.0)
START = 20_000 * DAY
KEPT = TableSpec(  # every statistic, candidates, counters of a window
    "kept",
    dim=2,
    rule=Rule("adam", lr=0.125),
    initializer=UNIFORM,
    entry=combined([CountFilterEntry(2), WindowCountEntry(1, 48.0, 1), ShowClickEntry("show", "click", 0.5)]),
    shrink=Shrink(
        delete_after_unseen_days=2, ttl_days=5, max_rows=10**5, where="slot == 3 or delta < 0", max_share=1.0
    ),
)
PLAIN = TableSpec("plain", dim=3, rule=Rule("adagrad", lr=0.5), initializer=UNIFORM)
WINDOW = TableSpec("window", dim=1, rule=Rule("sgd", lr=0.5), entry=WindowCountEntry(3, 24.0, 1))
IDS = TableSpec("ids", "array", dim=2, size=60, rule=Rule("adam", lr=0.25), initializer=UNIFORM)
DENSE = TableSpec("dense", "dense", size=11, rule=Rule("adam", lr=0.25))
CAPPED = TableSpec("capped", dim=1, rule=Rule("sgd", lr=1.0), initializer=UNIFORM, shrink=Shrink(max_rows=60))
ALL = [KEPT, PLAIN, WINDOW, IDS, DENSE]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "model")


class Traffic:
    """Random requests to all tables, with as many keys as a fleet of a few dozen rows likes."""

    def __init__(self, seed: int, specs: list[TableSpec] = ALL, num_keys: int = 60) -> None:
        self._rng = np.random.default_rng(seed)
        self._specs = {spec.name: spec for spec in specs}
        self._keys = self._rng.integers(0, 2**64, num_keys, np.uint64)
        self._keys[:2] = [0, 2**64 - 1]
        self._now = START

    def run(self, client: Client, num: int) -> None:
        for _ in range(num):
            self.one(client)

    def one(self, client: Client) -> None:
        """A step of training, or now and then the passing of time, a shrink, rows dropped or set."""
        dice = self._rng.random()
        if dice < 0.1:
            self._now += int(self._rng.choice([60, 7 * HOUR, DAY]))
            client.set_clock(self._now)
        elif dice < 0.17 and "kept" in self._specs:
            policies = [Shrink(), Shrink(max_rows=25), Shrink(delete_after_unseen_days=0.5), Shrink(where="slot == 2")]
            client.shrink("kept", policies[self._rng.integers(4)])
        elif dice < 0.25:
            for name, spec in self._specs.items():
                if spec.kind != "dense":
                    client.erase(name, self._keys_of(spec, 6))
        elif dice < 0.3 and "plain" in self._specs:
            client.assign("plain", self._keys_of(PLAIN, 3), self._floats(3, 3))
        else:
            self._step(client)

    def _step(self, client: Client) -> None:
        grads: dict[str, Any] = {}
        for name, spec in self._specs.items():
            if spec.kind == "dense":
                grads[name] = self._floats(spec.size)
                continue
            keys = np.unique(self._keys_of(spec, 8))
            client.pull(name, keys).result()
            block = self._floats(len(keys), spec.dim)
            if spec.entry.show:
                block = np.concatenate([block, self._rng.integers(0, 4, (len(keys), 3)).astype(np.float32)], axis=1)
            grads[name] = keys, block
        client.push_tables(grads).result()

    def _keys_of(self, spec: TableSpec, num: int) -> np.ndarray:
        if spec.kind == "array":
            return self._rng.integers(0, spec.size, num).astype(np.uint64)
        return self._rng.choice(self._keys, num)

    def _floats(self, *shape: int) -> np.ndarray:
        return self._rng.normal(size=shape).astype(np.float32)


def begin(specs: list[TableSpec], num_servers: int, folder: str | None = None) -> Tables:
    tables = Tables(specs, num_servers, folder)
    if folder is None:
        tables.client.set_clock(START)
    return tables


def held(tables: Tables) -> dict[str, Any]:
    """What a save must bring back. The delta score is what was gathered since a save, and begins anew with each."""
    return tables.everything(without=["delta"])


def assert_loads(folder: str, live: Tables | dict[str, Any], specs: list[TableSpec] = ALL, on: Any = (1, 2, 3)) -> None:
    """On any number of servers the model there is what is live."""
    expected = held(live) if isinstance(live, Tables) else live
    for num_servers in on:
        assert held(Tables(specs, num_servers, folder)) == expected, f"on {num_servers} servers"


def manifest_of(folder: str) -> Manifest:
    return read_manifest(Storage(folder))


def written(folder: str, table: str) -> set[int]:
    """Keys whose rows the last save has written."""
    storage, link = Storage(folder), manifest_of(folder).links()[-1]
    files = [read_part(storage, link.save, part) for part in link.parts_of(table)]
    return {key for arrays in files for key in arrays["keys"].tolist()}


# After traffic


@pytest.mark.parametrize("seed", first_of([1, 0, 2]))
def test_base_and_deltas_are_the_live_tables_whatever_the_servers(seed: int, folder: str) -> None:
    """Saves of both kinds, and restarts from the chain on another number of servers, which goes on with deltas."""
    rng, traffic = np.random.default_rng(seed), Traffic(seed)
    tables = begin(ALL, 1 + seed % 3)
    for round_number in range(6):
        traffic.run(tables.client, int(rng.integers(0, 9)))
        tables.save(folder, "delta" if round_number and rng.random() < 0.85 else "full")
        assert_loads(folder, tables)
        if rng.random() < 0.5:
            before = held(tables)
            tables = begin(ALL, int(rng.integers(1, 4)), folder)
            assert held(tables) == before


def test_a_delta_holds_what_changed_and_no_more(folder: str) -> None:
    tables = begin([PLAIN, KEPT, IDS], 2)
    keys = np.arange(50, dtype=np.uint64)
    for _ in range(2):
        tables.client.pull("kept", keys).result()
    tables.client.pull("plain", keys).result()
    tables.client.pull("ids", keys).result()
    tables.save(folder)
    tables.client.push("plain", keys[:3], np.ones((3, 3), np.float32)).result()
    tables.client.pull("plain", keys[:20]).result()  # changes nothing where no statistics are kept
    tables.client.pull("plain", keys[:20], create=False).result()
    tables.client.pull("kept", keys[:4]).result()  # seen
    tables.client.pull("kept", [100, 101]).result()  # counted
    tables.client.erase("kept", keys[10:15])
    tables.client.erase("kept", keys[15:16])
    for _ in range(2):
        tables.client.pull("kept", keys[15:16]).result()  # gone and come back
    tables.client.erase("ids", keys[:6])
    manifest = tables.save(folder, "delta")
    link = manifest.links()[-1]
    num = {(name, kind): sum(part.rows for part in link.parts_of(name, kind)) for name in ("plain", "kept", "ids")
           for kind in ("rows", "gone", "candidates", "candidates_gone")}  # fmt: skip
    assert {what: rows for what, rows in num.items() if rows} == {
        ("plain", "rows"): 3,
        ("kept", "rows"): 5,
        ("kept", "gone"): 5,
        ("kept", "candidates"): 2,
        ("kept", "candidates_gone"): 1,
        ("ids", "gone"): 6,
    }
    assert_loads(folder, tables, [PLAIN, KEPT, IDS])
    empty = tables.save(folder, "delta").links()[-1]
    assert sum(part.rows for part in empty.parts if part.kind != "sketch") == 0
    assert_loads(folder, tables, [PLAIN, KEPT, IDS])


@pytest.mark.parametrize("num_servers", first_of([3, 1]))
def test_tables_that_never_had_a_row_go_through_a_chain(num_servers: int, folder: str) -> None:
    tables = begin(ALL, num_servers)
    tables.save(folder)
    for _ in range(2):
        tables.save(folder, "delta")
        assert_loads(folder, tables)
    tables.client.pull("kept", [1]).result()
    tables.save(folder, "delta")
    assert_loads(folder, tables)
    tables = begin(ALL, 2, folder)
    tables.client.pull("kept", [1]).result()
    tables.save(folder, "delta")
    assert_loads(folder, tables)


# Beside traffic


class Slice(Direct):
    """A channel that lets others act after every slice of work."""

    def __init__(self, server: Server, between: Callable[[], None]) -> None:
        super().__init__(server)
        self._between = between

    def work(self) -> bool:
        worked = super().work()
        if worked:
            self._between()
        return worked


@contextlib.contextmanager
def traffic_between_slices(tables: Tables, between: Callable[[Client], None]) -> Iterator[None]:
    """While this lasts, `between` is called with another client after every slice of what tables.client asks for."""
    others = [Direct(server, patient=False) for server in tables.servers]
    other = Client(others, patience=Patience(30.0, 0), worker=1)
    for spec in tables.specs:
        other.attach(spec)
    channels = [Slice(server, lambda: between(other)) for server in tables.servers]
    calm, tables.client = tables.client, Client(channels, patience=Patience(30.0, 0))
    for spec in tables.specs:
        tables.client.attach(spec)
    yield
    tables.client = calm


@pytest.mark.parametrize("seed", first_of([1, 0, 2]))
def test_what_changes_during_a_save_is_in_the_next(seed: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows appear, change, go and come back between the slices. What is loaded of a row is something that it was since
    the save began; a row that was there throughout is there; and the next delta makes all of it exact."""
    monkeypatch.setattr(table_saving, "SLICE", 12)
    monkeypatch.setattr(table_saving, "PART_BYTES", 300)  # several files of a table
    rng, traffic = np.random.default_rng(seed), Traffic(seed, [KEPT, PLAIN, IDS])
    tables = begin([KEPT, PLAIN, IDS], 1 + seed % 3)
    traffic.run(tables.client, 20)
    history: dict[str, dict[int, list[Any]]] = {}

    def note() -> None:
        there = {name: tables.rows(name) for name in ("kept", "plain", "ids")}
        for name, rows in there.items():
            for key, row in rows.items():
                row.pop("delta", None)
                history.setdefault(name, {}).setdefault(key, []).append(row)
        lasting.append({name: set(rows) for name, rows in there.items()})

    def between(client: Client) -> None:
        for _ in range(int(rng.integers(0, 3))):
            traffic._step(client)
            if rng.random() < 0.5:
                for name in ("kept", "plain", "ids"):
                    client.erase(name, traffic._keys_of(next(s for s in tables.specs if s.name == name), 3))
            note()

    for kind in ("full", "delta", "delta"):
        lasting: list[dict[str, set[int]]] = []
        history.clear()
        note()
        with traffic_between_slices(tables, between):
            tables.save(folder, kind)
        loaded = Tables([KEPT, PLAIN, IDS], 2, folder)
        for name in ("kept", "plain", "ids"):
            found = loaded.rows(name)
            for row in found.values():
                row.pop("delta", None)
            assert set.intersection(*(there[name] for there in lasting)) | written(folder, name) <= set(found)
            assert all(row in history[name].get(key, []) for key, row in found.items())
        tables.save(folder, "delta")
        assert_loads(folder, tables, [KEPT, PLAIN, IDS])
        if seed % 2:
            tables = begin([KEPT, PLAIN, IDS], int(rng.integers(1, 4)), folder)


@pytest.mark.parametrize("num_servers", first_of([2, 1]))
def test_a_shrink_between_the_slices_of_a_delta_loses_nothing(
    num_servers: int, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_saving, "SLICE", 7)
    tables = begin([KEPT], num_servers)
    traffic = Traffic(5, [KEPT])
    traffic.run(tables.client, 20)
    tables.save(folder)

    def between(client: Client) -> None:
        traffic._step(client)
        for index in range(num_servers):
            table = tables.table("kept", index)
            some = [key for key in tables.rows("kept") if key in {*traffic._keys.tolist()[:30]}]
            own = [key for key in some if len(table.absent(np.array([key], np.uint64))) == 0]
            table.erase(np.array(own[:2], np.uint64))

    for _ in range(3):
        traffic.run(tables.client, 3)
        with traffic_between_slices(tables, between):
            tables.save(folder, "delta")
    tables.save(folder, "delta")
    assert_loads(folder, tables, [KEPT])


@pytest.mark.parametrize("seed", range(3))
def test_a_table_at_its_capacity_comes_back_as_it_was(seed: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go and others come while it is saved: a link of the chain then holds more keys than the table ever had, and
    which of them are too many only the next link says. Loading must not guess."""
    monkeypatch.setattr(table_saving, "SLICE", 10)
    rng = np.random.default_rng(seed)
    tables = begin([CAPPED], 1)
    tables.client.pull("capped", np.arange(60)).result()

    def step(client: Client) -> None:
        there = sorted(tables.rows("capped"))
        client.erase("capped", rng.choice(there, 2, replace=False))
        keys = np.concatenate(
            [rng.integers(100, 10**6, 2), rng.choice(sorted(tables.rows("capped")), 2, replace=False)]
        )
        client.pull("capped", keys).result()
        client.push("capped", keys, np.ones((4, 1), np.float32)).result()

    for kind in ("full", "delta", "delta", "delta"):
        with traffic_between_slices(tables, step):
            tables.save(folder, kind)
        step(tables.client)
    tables.save(folder, "delta")
    assert held(Tables([CAPPED], 1, folder)) == held(tables)
    assert len(tables.rows("capped")) == 60


# Saves that fail


def no_room_for(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the disk is full for the files of this server."""
    write = Storage.write

    def fail(self: Storage, name: str, buffers: Any) -> None:
        if f".{server}-" in name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, buffers)

    monkeypatch.setattr(Storage, "write", fail)


def die(*_: Any) -> None:
    raise KeyboardInterrupt("worker 0 is gone")


@pytest.mark.parametrize("failure", first_of(["no manifest", "disk of server 1", "no donefile"]))
def test_the_next_delta_has_what_failed_ones_held(failure: str, folder: str) -> None:
    """Several fail one after another, full ones among them; the model that was there stays the model."""
    traffic, tables = Traffic(2), begin(ALL, 2)
    traffic.run(tables.client, 10)
    tables.save(folder)
    error, text = (
        (CheckpointError, "No space left") if failure == "disk of server 1" else (KeyboardInterrupt, "is gone")
    )
    for kind in ("delta", "delta", "full", "delta", "full"):
        before, number = held(tables), manifest_of(folder).number
        for failing in (kind, "delta"):
            traffic.run(tables.client, 4)
            with pytest.MonkeyPatch.context() as patch:
                if failure == "disk of server 1":
                    no_room_for(1, patch)
                else:
                    patch.setattr(saving_model, "write_manifest" if failure == "no manifest" else "write_donefile", die)
                with pytest.raises(error, match=text):
                    tables.save(folder, failing)
            if failure == "no donefile":  # without it the save was made: the manifest is what counts
                before, number = held(tables), manifest_of(folder).number
            assert manifest_of(folder).number == number
            assert_loads(folder, before, on=(3,))
        tables.client.erase("plain", traffic._keys[:30])
        traffic.run(tables.client, 2)
        tables.save(folder, "delta")
        assert_loads(folder, tables)
    lines = [json.loads(line) for line in Path(folder, "donefile.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [link.number for link in manifest_of(folder).links()]
    last = tables.save(folder)  # which removes the remains of those that failed
    assert sorted(os.listdir(folder)) == ["donefile.jsonl", "manifest.json", last.save]


def test_a_crash_after_a_failed_delta_goes_back_to_the_last_whole_save(folder: str) -> None:
    traffic, tables = Traffic(1), begin(ALL, 2)
    traffic.run(tables.client, 10)
    tables.save(folder)
    before = held(tables)
    traffic.run(tables.client, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving_model, "write_manifest", die)
        with pytest.raises(KeyboardInterrupt):
            tables.save(folder, "delta")
    tables = begin(ALL, 3, folder)
    assert held(tables) == before
    traffic.run(tables.client, 5)
    tables.save(folder, "delta")
    assert_loads(folder, tables)


# Deltas that could continue nothing


def changed(spec: TableSpec, **fields: Any) -> TableSpec:
    return msgspec.structs.replace(spec, **fields)


def refuses(tables: Tables, folder: str, *values: str) -> None:
    """It says what to do, and neither the model there nor the tables have changed."""
    before = held(tables)
    there = held(Tables(tables.specs, 1, folder)) if Path(folder, "manifest.json").exists() else None
    manifest = Path(folder, "manifest.json").read_bytes() if there is not None else None
    with pytest.raises(CheckpointError, match=naming("mode=0", *values)):
        tables.save(folder, "delta")
    assert held(tables) == before
    if there is not None:
        assert Path(folder, "manifest.json").read_bytes() == manifest
        assert held(Tables(tables.specs, 1, folder)) == there


def test_a_delta_needs_a_full_save_in_its_folder(folder: str) -> None:
    traffic, tables = Traffic(2), begin(ALL, 2)
    traffic.run(tables.client, 8)
    refuses(tables, folder, folder)
    tables.save(folder)
    traffic.run(tables.client, 3)
    refuses(tables, folder + "-other", f"{folder}-other")
    tables.save(folder, "delta")  # the refusal has taken nothing from it
    assert_loads(folder, tables)


def test_a_delta_continues_the_last_save_only(folder: str) -> None:
    """A full save elsewhere begins another chain; the old folder is continued by a full save."""
    traffic, tables, other = Traffic(3), begin(ALL, 2), folder + "-other"
    traffic.run(tables.client, 8)
    tables.save(folder)
    traffic.run(tables.client, 3)
    tables.save(other)
    traffic.run(tables.client, 3)
    refuses(tables, folder)
    tables.save(other, "delta")
    assert_loads(other, tables)
    tables.save(folder)
    traffic.run(tables.client, 3)
    refuses(tables, other)
    tables.save(folder, "delta")
    assert_loads(folder, tables)


def test_a_full_save_elsewhere_that_failed_costs_no_row(folder: str) -> None:
    traffic, tables = Traffic(3), begin(ALL, 2)
    traffic.run(tables.client, 8)
    tables.save(folder)
    traffic.run(tables.client, 3)
    with pytest.MonkeyPatch.context() as patch:
        no_room_for(1, patch)
        with pytest.raises(CheckpointError):
            tables.save(folder + "-other")
    traffic.run(tables.client, 3)
    with contextlib.suppress(CheckpointError):  # refused, or whole
        tables.save(folder, "delta")
        assert_loads(folder, tables)
    tables.save(folder)
    assert_loads(folder, tables)


def test_servers_that_did_not_load_the_model_cannot_continue_it(folder: str) -> None:
    traffic, tables = Traffic(4), begin(ALL, 2)
    traffic.run(tables.client, 8)
    tables.save(folder)
    refuses(begin(ALL, 2), folder)
    partly = begin(ALL, 1)
    load_model(partly.servers[0].state, folder, ["plain"])
    refuses(partly, folder)
    behind = begin(ALL, 2, folder)
    traffic.run(tables.client, 2)
    tables.save(folder, "delta")
    refuses(behind, folder)


def test_a_save_for_prediction_is_no_base_and_breaks_no_chain_elsewhere(folder: str) -> None:
    traffic, tables, other = Traffic(5), begin(ALL, 2), folder + "-served"
    traffic.run(tables.client, 8)
    tables.save(folder)
    traffic.run(tables.client, 3)
    tables.save(other, "inference")
    refuses(tables, other, "save-000001")
    traffic.run(tables.client, 3)
    tables.save(folder, "delta")
    assert_loads(folder, tables)
    tables.save(folder, "inference")  # takes the place of the chain
    traffic.run(tables.client, 3)
    refuses(tables, folder, "save-")
    tables.save(folder)
    traffic.run(tables.client, 3)
    tables.save(folder, "delta")
    assert_loads(folder, tables)


@pytest.mark.parametrize(
    "other",
    [
        changed(KEPT, rule=Rule("adagrad", lr=0.5)),
        changed(KEPT, entry=combined([CountFilterEntry(5), ShowClickEntry("show", "click")])),
        changed(KEPT, shrink=Shrink(delete_after_unseen_days=2)),
        changed(KEPT, format=RowFormat("bfloat16")),
        changed(KEPT, format=RowFormat("int8")),
        None,
    ],
    ids=["optimizer", "entry", "shrink", "bfloat16", "int8", "one table more"],
)
def test_tables_that_are_declared_otherwise_load_and_need_a_full_save(other: TableSpec | None, folder: str) -> None:
    traffic, tables = Traffic(6, [KEPT]), begin([KEPT], 2)
    traffic.run(tables.client, 15)
    tables.save(folder)
    traffic.run(tables.client, 5)
    tables.save(folder, "delta")
    specs = [KEPT, PLAIN] if other is None else [other]
    if other is None:
        changed_tables = begin(specs, 2)
        for server in changed_tables.servers:
            load_model(server.state, folder, ["kept"])
    else:
        changed_tables = begin(specs, 2, folder)
    values = {key: row["value"][:2] for key, row in tables.rows("kept").items()}
    loaded = {key: row["value"][:2] for key, row in changed_tables.rows("kept").items()}
    assert loaded.keys() == values.keys() if specs[0].format.is_narrow else loaded == values
    before = held(changed_tables)
    with pytest.raises(CheckpointError, match=naming("mode=0")):
        changed_tables.save(folder, "delta")
    assert held(changed_tables) == before
    changed_tables.save(folder)
    traffic.run(changed_tables.client, 5) if other is None or other.entry.show else None
    changed_tables.save(folder, "delta")
    assert_loads(folder, changed_tables, specs)


# What stands beside the rows


def test_the_chain_is_told_by_manifest_and_donefile(folder: str) -> None:
    traffic, tables = Traffic(7), begin(ALL, 2)
    traffic.run(tables.client, 5)
    for number, kind in enumerate(["full", "delta", "delta"], start=1):
        manifest = tables.save(folder, kind, {"part": number})
        assert (manifest.number, manifest.parent) == (number, number - 1 if kind == "delta" else 0)
        assert fleet.saved_extra(folder) == {"part": number}
        traffic.run(tables.client, 3)
    now = tables.servers[0].state.clock.now
    lines = [json.loads(line) for line in Path(folder, "donefile.jsonl").read_text().splitlines()]
    assert [(line["number"], line["parent"], line["kind"], line["folder"]) for line in lines] == [
        (1, 0, "full", "save-000001"),
        (2, 1, "delta", "save-000002"),
        (3, 2, "delta", "save-000003"),
    ]
    assert all(START <= line["time"] <= now for line in lines)
    tables.save(folder)  # the old chain is over
    (line,) = Path(folder, "donefile.jsonl").read_text().splitlines()
    assert json.loads(line) == {"number": 4, "parent": 0, "kind": "full", "folder": "save-000004", "time": now}
    assert sorted(os.listdir(folder)) == ["donefile.jsonl", "manifest.json", "save-000004"]
    assert fleet.saved_extra(folder) == {}


def test_extra_is_what_json_can_hold(folder: str) -> None:
    tables = begin([PLAIN], 1)
    assert fleet.saved_extra(folder) is None
    extra = {"offsets": {"topic": [1, 2**53, None]}, "name": "ä", "deep": [{"x": 1.5}], "flag": True}
    tables.save(folder, extra=extra)
    assert fleet.saved_extra(folder) == extra
    for bad in ({"x": object()}, {"x": {1: {2}}, "y": lambda: 0}):
        with pytest.raises(CheckpointError, match=naming("extra=", "JSON")):
            tables.save(folder, "delta", bad)
    assert fleet.saved_extra(folder) == extra


def test_a_file_of_any_link_that_is_damaged_is_named(folder: str) -> None:
    traffic, tables = Traffic(8), begin(ALL, 2)
    for kind in ("full", "delta", "delta"):
        traffic.run(tables.client, 8)
        tables.save(folder, kind)
    for link in manifest_of(folder).links():
        part = next(part for part in link.parts if part.rows and part.table == "kept" and part.shard == 0)
        path = Path(folder, link.save, part.file)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=naming(f"{link.save}/{part.file}")):
            Tables(ALL, 2, folder)
        path.unlink()
        with pytest.raises(CheckpointError, match=naming(f"{link.save}/{part.file}")):
            Tables(ALL, 1, folder)
        path.write_bytes(whole)
    assert_loads(folder, tables)


def test_counters_of_another_window_are_left_out_and_rows_are_not(folder: str) -> None:
    tables = begin([WINDOW], 2)
    for _ in range(3):
        tables.client.pull("window", [1, 2, 3]).result()
    tables.client.pull("window", [4, 5]).result()
    tables.save(folder)
    other = changed(WINDOW, entry=WindowCountEntry(3, 12.0, 1))
    loaded = Tables([other], 1, folder)
    assert set(loaded.rows("window")) == {1, 2, 3}
    assert loaded.sketch("window") == bytes(len(loaded.sketch("window")))
    assert (
        Tables([WINDOW], 3, folder).sketch("window") == tables.sketch("window") != bytes(len(tables.sketch("window")))
    )
