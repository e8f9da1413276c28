"""On a store that cannot replace a file in one step, a save that is cut at any moment leaves a whole model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import jobs
from support.cut_store import CutStore, Operations
from support.extras import needs
from support.fake_webhdfs import FakeHdfs, fake_webhdfs
from support.grids import first_of
from support.messages import naming
from support.one_number import Model, held, set_all

import torchfleet as fleet
from torchfleet.base.errors import CheckpointError, FleetError, ServerBusy
from torchfleet.base.storage import Storage
from torchfleet.observe.commands import command
from torchfleet.ps.checkpoint.compaction import compact
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.checkpoint.manifest_file import FILE
from torchfleet.ps.server import long_work
from torchfleet.ps.server.state.state import State
from torchfleet.ps.worker.client import connection

FOLDER = "cut://store/model"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[jobs.Part]:
    monkeypatch.setenv("FLEET_SAVE_ROOTS", "/,cut://")  # servers must be told of a store like this one
    CutStore.store.clear()
    with jobs.one_worker(Model(), num_servers=2) as made:
        yield made


def saved(part: jobs.Part, kind: str) -> list[str]:
    """Save, or compact; returns what the store was asked to do."""
    CutStore.operations = Operations()
    if kind == "compact":
        compact(FOLDER)
    else:
        part.worker.save(FOLDER, kind)
    return CutStore.operations.done


def cut_at(part: jobs.Part, kind: str, point: int) -> bool:
    """Whether it had come to its end before."""
    CutStore.operations = Operations(point)
    try:
        part.worker.save(FOLDER, kind) if kind != "compact" else compact(FOLDER)
    except (FleetError, OSError):
        return False
    finally:
        CutStore.operations = Operations()
    return True


def names() -> list[str]:
    storage = Storage(FOLDER)
    return sorted([*storage.files(), *storage.folders()])


@pytest.mark.parametrize("kind", first_of(["delta", "full"]))
def test_a_save_cut_at_any_operation_leaves_the_old_model_or_the_new_one(part: jobs.Part, kind: str) -> None:
    set_all(part, 1)
    saved(part, "full")
    set_all(part, 2)
    operations = saved(part, kind)
    last, seen = 2, set()
    for point in range(1, len(operations) + 1):
        set_all(part, last + 1)
        is_acknowledged = cut_at(part, kind, point)
        found = held(part, FOLDER)
        expected = (last + 1,) if is_acknowledged else (last, last + 1)
        assert found in expected, f"cut at operation {point}: {operations[point - 1]}"
        seen.add(found - last)
        last = int(found)
        if point % 10 == 0:  # else several cuts come one after the other
            set_all(part, last + 1)
            saved(part, kind)
            last += 1
            assert held(part, FOLDER) == last
    assert seen == {0, 1}
    set_all(part, 1000)
    saved(part, "full")
    assert held(part, FOLDER) == 1000
    assert len(names()) == 4  # manifest, the numbered one, donefile, one save


def test_a_server_that_was_too_busy_for_a_cut_save_does_not_begin_it_after_the_next(
    part: jobs.Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_PAUSE", 0.01)
    set_all(part, 1)
    saved(part, "full")
    point = next(i for i, operation in enumerate(saved(part, "delta"), 1) if ".0-" in operation)  # a file of server 0
    check, asked = long_work.check_queue, []

    def refuse_second(state: State, *request: Any) -> None:
        if id(state) not in asked:
            asked.append(id(state))
            if len(asked) == 2:
                raise ServerBusy("too many requests over whole tables")
        check(state, *request)

    set_all(part, 2)
    monkeypatch.setattr(long_work, "check_queue", refuse_second)
    assert not cut_at(part, "delta", point)
    assert len(asked) == 2
    saved(part, "delta")
    time.sleep(5 * connection.BUSY_PAUSE)
    part.worker.client.ping()
    set_all(part, 3)
    saved(part, "delta")
    assert held(part, FOLDER) == 3


def test_cuts_one_after_the_other_while_manifests_are_written_lose_nothing(part: jobs.Part) -> None:
    """manifest.json is cut off, then the numbered one of the next save, and of the one after."""
    set_all(part, 1)
    saved(part, "full")
    operations = saved(part, "full")
    pointer = next(i for i, what in enumerate(operations) if what.startswith(f"write /store/model/{FILE}"))
    numbered = next(i for i, what in enumerate(operations) if what.startswith("write /store/model/manifest-"))
    set_all(part, 2)
    cut_at(part, "full", pointer + 3)  # the old one is removed
    assert held(part, FOLDER) == 2
    for number in range(3, 7):
        set_all(part, number)
        cut_at(part, "full", numbered + number)
        assert held(part, FOLDER) in (2, number - 1, number)


def test_a_compaction_cut_at_any_operation_leaves_the_model(part: jobs.Part) -> None:
    def chain() -> None:
        set_all(part, 1)
        saved(part, "full")
        set_all(part, 2)
        saved(part, "delta")

    chain()
    for point in range(1, len(saved(part, "compact")) + 1):
        if not read_manifest(Storage(FOLDER)).base:
            chain()
        cut_at(part, "compact", point)
        assert held(part, FOLDER) == 2, f"cut at operation {point}"


def test_a_first_save_that_is_cut_leaves_no_model_or_a_whole_one(part: jobs.Part) -> None:
    set_all(part, 1)
    operations = saved(part, "full")
    found = set()
    for point in range(1, len(operations) + 1):
        CutStore.store.clear()
        cut_at(part, "full", point)
        if fleet.saved_extra(FOLDER) is None:
            with pytest.raises(FleetError, match=naming("manifest.json")):
                held(part, FOLDER)
            found.add("none")
        else:
            assert held(part, FOLDER) == 1
            found.add("whole")
    assert found == {"none", "whole"}


class TestReading:
    def broken(self, part: jobs.Part) -> dict[str, bytes]:
        """manifest.json is cut off; the files of manifests by name."""
        set_all(part, 1)
        saved(part, "full")
        storage = Storage(FOLDER)
        found = {name: storage.read(name) for name in storage.files() if name.startswith("manifest")}
        storage.write(FILE, [found[FILE][:50]])
        return found

    def test_a_cut_manifest_is_told_of_and_the_one_that_was_to_replace_it_is_read(
        self, part: jobs.Part, capsys: pytest.CaptureFixture[str]
    ) -> None:
        files = self.broken(part)
        assert sorted(files) == ["manifest-000001.json", FILE]
        assert files[FILE] == files["manifest-000001.json"]
        assert held(part, FOLDER) == 1
        assert f"{FOLDER}/{FILE}" in capsys.readouterr().err

    def test_an_older_manifest_is_never_read(self, part: jobs.Part) -> None:
        files = self.broken(part)
        Storage(FOLDER).write("manifest-000002.json", [files[FILE][:-1]])
        with pytest.raises(CheckpointError, match=naming("manifest-000002.json")):
            held(part, FOLDER)

    def test_a_whole_manifest_stands_whatever_is_beside_it(self, part: jobs.Part) -> None:
        files = self.broken(part)
        storage = Storage(FOLDER)
        storage.write(FILE, [files[FILE]])
        storage.write("manifest-000009.json", [b"garbage"])
        assert held(part, FOLDER) == 1
        set_all(part, 2)
        saved(part, "delta")
        assert held(part, FOLDER) == 2
        assert [name for name in names() if name.startswith("manifest-")] == ["manifest-000010.json"]

    def test_a_store_that_keeps_something_else_than_was_written_is_told_of(
        self, part: jobs.Part, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_all(part, 1)
        saved(part, "full")
        set_all(part, 2)
        write = Storage.write

        def half(storage: Storage, name: str, buffers: list[bytes]) -> None:
            write(storage, name, [buffers[0][:99]] if name.startswith("manifest-") else buffers)

        with monkeypatch.context() as patch:
            patch.setattr(Storage, "write", half)
            with pytest.raises(CheckpointError, match=naming(FOLDER)):
                part.worker.save(FOLDER, "full")
        assert held(part, FOLDER) == 1


class TestWebHdfs:
    """By fsspec's client, against a stand-in for the REST API of a cluster."""

    @pytest.fixture
    def hdfs(self) -> Iterator[FakeHdfs]:
        needs("requests")  # which fsspec's webhdfs uses
        with fake_webhdfs() as made:
            yield made

    @pytest.fixture
    def part(self, hdfs: FakeHdfs, monkeypatch: pytest.MonkeyPatch) -> Iterator[jobs.Part]:
        monkeypatch.setenv("FLEET_SAVE_ROOTS", f"webhdfs://{hdfs.address}")
        with jobs.one_worker(Model(), num_servers=2) as made:
            yield made

    def test_full_saves_deltas_and_compaction_load_whole(
        self, part: jobs.Part, hdfs: FakeHdfs, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = f"webhdfs://{hdfs.address}/user/model"
        for number, kind in ((1, "full"), (2, "full"), (3, "delta")):
            set_all(part, number)
            part.worker.save(folder, kind)
            assert held(part, folder) == number
        compact(folder)
        assert held(part, folder) == 3
        assert command.main(["inspect", folder, "--check"]) == 0
        assert command.main(["export", folder, "words", f"webhdfs://{hdfs.address}/rows", "--format", "text"]) == 0
        assert hdfs.files["/rows"].count(b" 3 3\n") == 20
        assert "manifest" not in capsys.readouterr().err
        assert not [path for path in hdfs.files if path.endswith(".tmp")]

    @pytest.mark.parametrize("name", first_of(["manifest.json.tmp", "manifest-000002.json.tmp"]))
    def test_a_connection_cut_in_the_middle_of_a_manifest_leaves_the_old_model(
        self, part: jobs.Part, hdfs: FakeHdfs, name: str
    ) -> None:
        folder = f"webhdfs://{hdfs.address}/user/model"
        set_all(part, 1)
        part.worker.save(folder, "full")
        set_all(part, 2)
        hdfs.cut_name = name
        with pytest.raises(CheckpointError, match=naming(folder)):
            part.worker.save(folder, "full")
        hdfs.cut_name, hdfs.is_cut = "", False
        assert held(part, folder) == 1
        set_all(part, 3)
        part.worker.save(folder, "delta")
        assert held(part, folder) == 3
