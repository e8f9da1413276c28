"""A chain made into one full save: the same rows to the bit, killed at any moment, and beside other saves."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from support.chains import DENSE, IDS, ITEMS, PLAIN, Chain, assert_holds
from support.messages import naming
from support.scripts.saved_models import contents, load
from support.searches import examples
from test_chain import links

from torchfleet.base import storage as storages
from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint import compaction, part_writer
from torchfleet.ps.checkpoint.compaction import compact
from torchfleet.ps.checkpoint.manifest import DONEFILE, Manifest, read_manifest, remove_others
from torchfleet.ps.checkpoint.part_reader import read_dense, read_part
from torchfleet.ps.tables.settings.owners import owners_of
from torchfleet.ps.tables.settings.spec import TableSpec

SPECS = {spec.name: spec for spec in (ITEMS, PLAIN, IDS, DENSE)}
SAVES: list[dict[str, Any]] = [
    {"num_servers": 2, "rows": {PLAIN.name: [(key, key) for key in range(20)], ITEMS.name: [(1, 1), (2, 2)]}},
    {
        "num_servers": 2,
        "rows": {PLAIN.name: [(key, 100 + key) for key in range(5)], ITEMS.name: [(3, 3)]},
        "gone": {PLAIN.name: [8, 9], ITEMS.name: [1]},
        "candidates": {ITEMS.name: [(50, 1), (51, 2)]},
    },
    {"num_servers": 3, "rows": {PLAIN.name: [(8, 7)]}, "candidates_gone": {ITEMS.name: [50]}},
]


def made(dirname: str, saves: list[dict[str, Any]] = SAVES, **options: Any) -> Chain:
    chain = Chain(dirname, **options)
    for save in saves:
        chain.save(**save)
    return chain


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return made(str(tmp_path / "model"))


def assert_whole(dirname: str, chain: Chain) -> Manifest:
    """One full save with all that the oracle has, every row in a file of its owner."""
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    assert len(manifest.links()) == 1
    assert_holds(dirname, chain)
    assert chain.manifest is not None
    for field in ("number", "token", "time", "extra", "kind", "num_servers"):
        assert getattr(manifest, field) == getattr(chain.manifest, field), field
    for table, before in zip(manifest.tables, chain.manifest.tables, strict=True):
        assert table == before
        if table.kind == "dense":
            assert read_dense(storage, manifest, table).tobytes() == chain.dense[table.name].tobytes()
        else:
            owned = [part.shard for part in manifest.parts if part.table == table.name and part.kind == "rows"]
            assert sorted(set(owned)) == list(range(manifest.num_servers))
    for part in manifest.parts:
        arrays = read_part(storage, manifest.save, part)
        if part.kind in ("rows", "candidates") and "keys" in arrays:
            assert (owners_of(SPECS[part.table], arrays["keys"], manifest.num_servers) == part.shard).all()
            assert len(arrays["keys"]) == part.rows
    assert {part.kind for part in manifest.parts} <= {"rows", "candidates", "sketch"}
    assert len({part.file for part in manifest.parts}) == len(manifest.parts)
    return manifest


def forget(*folders: str) -> None:
    memory = fsspec.filesystem("memory")
    for folder in folders:
        if memory.exists(f"/{folder}"):
            memory.rm(f"/{folder}", recursive=True)


class TestContent:
    @pytest.mark.slow
    @given(links())
    @settings(max_examples=examples(8))
    def test_any_chain_stays_what_it_was(self, saves: list[dict[str, Any]]) -> None:
        forget("to_compact", "other")
        chain = made("memory://to_compact", saves)
        compact("memory://to_compact", "memory://other")
        assert_whole("memory://other", chain)
        assert_holds("memory://to_compact", chain)
        compact("memory://to_compact")
        assert_whole("memory://to_compact", chain)

    @pytest.mark.parametrize("num_servers", [1, 2, 3])
    def test_servers_load_it_as_they_load_the_chain(self, chain: Chain, tmp_path: Path, num_servers: int) -> None:
        compact(chain.storage.path, str(tmp_path / "other"))
        specs = [PLAIN, IDS, DENSE, ITEMS]
        before, after = (load(num_servers, specs, str(tmp_path / name)) for name in ("model", "other"))
        found = contents(before)
        assert found == contents(after)
        assert {name: set(found[name]) for name in chain.rows} == {name: set(rows) for name, rows in chain.rows.items()}

    @pytest.mark.parametrize("part_bytes", [1, 40, 1000])
    def test_files_of_a_limited_size(self, chain: Chain, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
        monkeypatch.setattr(part_writer, "PART_BYTES", part_bytes)
        compact(chain.storage.path)
        manifest = assert_whole(chain.storage.path, chain)
        assert all(part.rows <= part_bytes // 12 + 3 for part in manifest.parts if part.table == PLAIN.name)

    def test_small_files_become_large_ones(self, chain: Chain) -> None:
        manifest = compact(chain.storage.path)
        assert len([part for part in manifest.parts if part.table == PLAIN.name]) == 3

    def test_the_newest_sketch_is_in_it(self, tmp_path: Path) -> None:
        chain = made(str(tmp_path / "model"), SAVES[:1])
        chain.write_sketch(ITEMS, np.full((8, 64), 1, np.uint8))
        chain.save(**SAVES[2])
        blocks = np.arange(8 * 64, dtype=np.uint8).reshape(8, 64)
        chain.write_sketch(ITEMS, blocks)
        manifest = compact(chain.storage.path)
        sketch = [part for part in manifest.parts if part.kind == "sketch"]
        found = [read_part(chain.storage, manifest.save, part)["blocks"] for part in sketch]
        assert [part.start for part in sketch] == [0, 2, 5]
        assert np.array_equal(np.concatenate(found), blocks)

    def test_saves_with_other_statistics_go_to_files_of_their_own(self, tmp_path: Path) -> None:
        """A table that began to keep a statistic within the chain."""
        chain = made(str(tmp_path / "model"), SAVES[:1])
        assert chain.manifest is not None
        base = chain.manifest.links()[0]
        chain.save(**SAVES[1])
        chain.save(1, {ITEMS.name: [(60, 1)]})
        storage = chain.storage
        for part in base.parts_of(ITEMS.name):  # rewritten without statistics
            arrays = read_part(storage, base.save, part)
            buffers = compaction.part_file.encode({name: arrays[name] for name in ("keys", "rows")})
            storage.write(f"{base.save}/{part.file}", buffers)
        crcs = {
            part.file: compaction.part_file.checksum([storage.read(f"{base.save}/{part.file}")]) for part in base.parts
        }
        sizes = {part.file: len(storage.read(f"{base.save}/{part.file}")) for part in base.parts}
        parts = [msgspec.structs.replace(part, crc32=crcs[part.file], bytes=sizes[part.file]) for part in base.parts]
        base = msgspec.structs.replace(base, parts=parts)
        compaction.write_manifest(
            storage, msgspec.structs.replace(chain.manifest, base=[base, *chain.manifest.base[1:]])
        )
        for key in (2,):  # of the base, and still there
            chain.rows[ITEMS.name][key] = {"rows": chain.rows[ITEMS.name][key]["rows"]}
        compact(storage.path)
        assert_holds(storage.path, chain)

    def test_one_full_save_is_left_alone(self, tmp_path: Path) -> None:
        chain = made(str(tmp_path / "model"), SAVES[:1])
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert compact(chain.storage.path) == chain.manifest
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def test_a_compacted_model_goes_on_with_deltas(self, chain: Chain) -> None:
        chain.manifest = compact(chain.storage.path)
        delta = chain.save(2, {PLAIN.name: [(2, 5), (99, 9)]}, gone={PLAIN.name: [3]})
        assert [link.number for link in delta.links()] == [3, 5]
        assert_holds(chain.storage.path, chain)
        compact(chain.storage.path)
        assert_whole(chain.storage.path, chain)


class TestFolders:
    def test_in_place_the_old_folders_go(self, chain: Chain) -> None:
        manifest = compact(chain.storage.path)
        assert sorted(os.listdir(chain.storage.path)) == [DONEFILE, "manifest.json", manifest.save]
        assert manifest == read_manifest(chain.storage)
        lines = [json.loads(line) for line in chain.storage.read(DONEFILE).decode().splitlines()]
        assert lines == [{"number": 3, "parent": 0, "kind": "full", "folder": manifest.save, "time": 259_200.0}]

    def test_elsewhere_the_chain_stays(self, chain: Chain, tmp_path: Path) -> None:
        before = sorted(os.listdir(chain.storage.path))
        manifest = compact(chain.storage.path, str(tmp_path / "other"))
        assert sorted(os.listdir(chain.storage.path)) == before
        assert sorted(os.listdir(tmp_path / "other")) == [DONEFILE, "manifest.json", manifest.save]

    def test_a_copy_elsewhere_can_be_served(self, chain: Chain, tmp_path: Path) -> None:
        chain.storage.write("serving.json", [b"{}"])
        compact(chain.storage.path, str(tmp_path / "other"))
        assert (tmp_path / "other" / "serving.json").read_bytes() == b"{}"

    def test_an_older_copy_elsewhere_is_replaced(self, chain: Chain, tmp_path: Path) -> None:
        other = str(tmp_path / "other")
        compact(chain.storage.path, other)
        chain.save(1, {PLAIN.name: [(1, 4)]})
        manifest = compact(chain.storage.path, other)
        assert_whole(other, chain)
        assert sorted(os.listdir(other)) == [DONEFILE, "manifest.json", manifest.save]

    def test_the_same_folder_by_another_name_is_in_place(self, chain: Chain, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "model")
        compact(chain.storage.path, str(tmp_path / "link"))
        assert_whole(chain.storage.path, chain)
        assert len(list(chain.storage.folders())) == 1

    def test_progress_is_shown(self, chain: Chain) -> None:
        shown: list[str] = []
        compact(chain.storage.path, show=shown.append)
        assert any(text.startswith("plain: ") for text in shown)

    @pytest.mark.parametrize("dirname", ["{tmp}/nothing", "foo://model", ""])
    def test_no_model_is_an_error(self, dirname: str, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError):
            compact(dirname.format(tmp=tmp_path))


class TestMeanwhile:
    """Somebody saves to the folder while it is compacted."""

    @pytest.fixture
    def at_the_end(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
        """Give it what happens when all files are written and the manifest is not."""

        def arrange(happen: Callable[[], None]) -> None:
            replace = compaction._replace

            def after(*arguments: Any) -> Manifest:
                happen()
                return replace(*arguments)

            monkeypatch.setattr(compaction, "_replace", after)

        return arrange

    def test_a_delta_stays_behind_the_full_save(self, chain: Chain, at_the_end: Any) -> None:
        def two_deltas() -> None:
            chain.save(1, {PLAIN.name: [(70, 1), (2, 2)]}, gone={PLAIN.name: [4]})
            chain.save(3, {PLAIN.name: [(4, 4)]}, gone={PLAIN.name: [70]})

        at_the_end(two_deltas)
        manifest = compact(chain.storage.path)
        assert manifest == read_manifest(chain.storage)
        assert [(link.number, link.parent) for link in manifest.links()] == [(3, 0), (5, 3), (6, 5)]
        assert manifest.token == chain.manifest.token  # type: ignore[union-attr]
        assert_holds(chain.storage.path, chain)
        assert sorted(chain.storage.folders()) == sorted(link.save for link in manifest.links())

    def test_a_full_save_wins(self, chain: Chain, at_the_end: Any) -> None:
        at_the_end(lambda: chain.save(2, {PLAIN.name: [(1, 4)]}, full=True) and None)
        with pytest.raises(CheckpointError, match=naming(chain.storage.path)):
            compact(chain.storage.path)
        assert read_manifest(chain.storage) == chain.manifest
        assert_holds(chain.storage.path, chain)
        assert not [name for name in chain.storage.folders() if len(name) == len("save-") + 12]

    def test_a_save_that_is_being_made_is_not_touched_nor_what_it_stands_on(
        self, chain: Chain, at_the_end: Any
    ) -> None:
        at_the_end(lambda: chain.storage.write("save-000007/half", [b"half"]))
        compact(chain.storage.path)
        assert chain.storage.read("save-000007/half") == b"half"
        assert_whole(chain.storage.path, chain)
        chain.save(2, {PLAIN.name: [(3, 4)]})  # a delta of the chain as it was
        assert_holds(chain.storage.path, chain)
        assert len(read_manifest(chain.storage).links()) == 4
        remove_others(chain.storage, read_manifest(chain.storage))
        assert_holds(chain.storage.path, chain)
        assert len(list(chain.storage.folders())) == 4

    def test_if_its_own_folder_is_removed_the_chain_stays(self, chain: Chain, at_the_end: Any) -> None:
        before = read_manifest(chain.storage)

        def remove() -> None:
            (name,) = [name for name in chain.storage.folders() if len(name) == len("save-") + 12]
            chain.storage.remove_folder(name)

        at_the_end(remove)
        with pytest.raises(CheckpointError, match=naming(chain.storage.path)):
            compact(chain.storage.path)
        assert read_manifest(chain.storage) == before
        assert_holds(chain.storage.path, chain)


class TestFailures:
    @pytest.mark.parametrize("link", range(3))
    def test_a_damaged_file_is_named_and_nothing_changes(self, chain: Chain, link: int) -> None:
        assert chain.manifest is not None
        folder = chain.manifest.links()[link].save
        path = sorted(Path(chain.storage.path, folder).glob("plain.rows*"))[0]
        path.write_bytes(path.read_bytes()[:-1])
        before = sorted(chain.storage.folders())
        with pytest.raises(CheckpointError, match=naming(path.name)):
            compact(chain.storage.path)
        assert sorted(chain.storage.folders()) == before
        assert read_manifest(chain.storage) == chain.manifest

    def test_a_full_disk_is_an_error_of_ours(self, chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
        before = sorted(chain.storage.folders())
        write = Storage.write

        def fail(self: Storage, name: str, buffers: Any) -> None:
            if name.endswith("00000.safetensors") and "plain" in name:
                raise OSError(28, "No space left on device")
            write(self, name, buffers)

        monkeypatch.setattr(Storage, "write", fail)
        with pytest.raises(CheckpointError, match=naming("OSError", "No space left")):
            compact(chain.storage.path)
        assert sorted(chain.storage.folders()) == before
        assert_holds(chain.storage.path, chain)

    def test_an_error_after_the_manifest_does_not_remove_the_model(
        self, chain: Chain, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(compaction, "write_donefile", fail)
        with pytest.raises(KeyboardInterrupt):
            compact(chain.storage.path)
        assert_whole(chain.storage.path, chain)


def killed(dirname: str, last: int) -> bool:
    """Compact in a process that kills itself at its `last` operation on the disk; whether it came to that."""
    child = os.fork()
    if not child:
        try:
            _die_at(last)
            compact(dirname)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def _die_at(last: int) -> None:
    num = 0

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal num
            num += 1
            if num >= last:
                os.kill(os.getpid(), signal.SIGKILL)
            return getattr(os, name)(*arguments, **options)

        return call

    def remove(path: str, ignore_errors: bool) -> None:
        nonlocal num
        for file in sorted(os.listdir(path)):
            num += 1
            if num >= last:
                os.kill(os.getpid(), signal.SIGKILL)
            os.remove(os.path.join(path, file))
        os.rmdir(path)

    own = {name: counted(name) for name in ("makedirs", "fsync", "replace")}
    storages.os = SimpleNamespace(**{**vars(os), **own})  # type: ignore[assignment]
    storages.shutil = SimpleNamespace(rmtree=remove)  # type: ignore[assignment]


class TestKilled:
    @pytest.fixture
    def small(self, tmp_path: Path) -> Chain:
        specs: tuple[TableSpec, ...] = (ITEMS, DENSE)
        return made(str(tmp_path / "model"), [{**save, "num_servers": 1} for save in SAVES], specs=specs)

    @pytest.mark.slow
    def test_at_any_moment_the_model_is_whole(self, small: Chain, tmp_path: Path) -> None:
        """The chain up to the moment the manifest is replaced, the full save from then on; and it can be done again."""
        compact(small.storage.path, str(tmp_path / "warm"))  # kernels are loaded here, once for all children
        last, lengths = 0, []
        while last < 1000:
            last += 1
            copy = str(tmp_path / f"copy{last}")
            shutil.copytree(small.storage.path, copy)
            if not killed(copy, last):
                break
            lengths.append(len(read_manifest(Storage(copy)).links()))
            assert_holds(copy, small)
            compact(copy)
            assert_whole(copy, small)
        assert lengths == sorted(lengths, reverse=True)
        assert {1, 3} == set(lengths)
        assert len(lengths) > 20

    def test_what_a_killed_one_left_goes_with_the_next(self, small: Chain) -> None:
        assert killed(small.storage.path, 8)
        assert len(list(small.storage.folders())) == 4
        manifest = compact(small.storage.path)
        assert list(small.storage.folders()) == [manifest.save]
