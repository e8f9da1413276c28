"""Rows of a chain of saves: each that is alive once, with its newest content, against a plain dict."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import DENSE, IDS, ITEMS, PLAIN, Chain, assert_holds, held
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import CheckpointError
from torchfleet.ps.checkpoint import chain as chains
from torchfleet.ps.checkpoint.chain import KeySet, live_candidates, live_rows, statistics_of
from torchfleet.ps.checkpoint.lock import alone
from torchfleet.ps.checkpoint.manifest import DONEFILE, Manifest, read_manifest, write_donefile, write_manifest

KEYS = [0, 1, 2, 3, 5, 8, 2**63 - 1, 2**63, 2**64 - 1, 77, 78, 79]

pairs = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 10**6)), max_size=9)
some_keys = st.lists(st.sampled_from(KEYS), max_size=5, unique=True)


@st.composite
def links(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Arguments of Chain.save: a full save and up to five deltas, by one to three servers each."""
    made = []
    for i in range(draw(st.integers(1, 6))):
        ids = [(key % 100, number) for key, number in draw(pairs)]
        link: dict[str, Any] = {
            "num_servers": draw(st.integers(1, 3)),
            "rows": {ITEMS.name: draw(pairs), PLAIN.name: draw(pairs), IDS.name: ids},
            "candidates": {ITEMS.name: draw(pairs)},
        }
        if i:
            link["gone"] = {ITEMS.name: draw(some_keys), PLAIN.name: draw(some_keys)}
            link["candidates_gone"] = {ITEMS.name: draw(some_keys)}
        made.append(link)
    return made


@pytest.fixture
def place() -> Iterator[str]:
    yield fresh("memory://chain")
    fresh("memory://chain")


def fresh(place: str) -> str:
    """Empty: all tests of a process share what is in memory://, and any of them may have run before."""
    memory = fsspec.filesystem("memory")
    if memory.exists("/chain"):
        memory.rm("/chain", recursive=True)
    return place


def of(chain: Chain, table: str = PLAIN.name, **options: Any) -> dict[int, Any]:
    assert chain.manifest is not None
    return held(live_rows(chain.storage, chain.manifest, table, **options))


class TestLiveRows:
    @pytest.mark.slow
    @given(links())
    @settings(max_examples=examples(15))
    def test_any_chain_gives_what_a_dict_holds(self, saves: list[dict[str, Any]]) -> None:
        chain = Chain(fresh("memory://chain"))
        for save in saves:
            chain.save(**save)
            assert_holds("memory://chain", chain)

    def test_gone_and_back_in_one_delta_is_there(self, place: str) -> None:
        chain = Chain(place)
        chain.save(2, {PLAIN.name: [(1, 10), (2, 20)]})
        chain.save(2, {PLAIN.name: [(1, 11)]}, gone={PLAIN.name: [1, 2]})
        assert {key: np.frombuffer(found["rows"], np.float32)[0] for key, found in of(chain).items()} == {1: 11.0}

    @pytest.mark.parametrize("rows_per_file", [1, 2, 10])
    @pytest.mark.parametrize("full", [True, False], ids=["full", "delta"])
    def test_of_a_row_twice_in_one_save_the_later_stands(self, place: str, rows_per_file: int, full: bool) -> None:
        chain = Chain(place, rows_per_file=rows_per_file)
        chain.save(1, {PLAIN.name: [(1, 1)]})
        chain.save(1, {PLAIN.name: [(1, 10), (2, 20), (1, 30), (3, 1), (1, 40), (2, 50)]}, full=full)
        found = of(chain)
        assert {key: np.frombuffer(one["rows"], np.float32)[0] for key, one in found.items()} == {1: 40, 2: 50, 3: 1}

    def test_more_keys_than_a_map_takes_at_a_time(self, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chains, "_CHUNK", 7)
        chain = Chain(place, rows_per_file=40)
        chain.save(2, {PLAIN.name: [(key, key) for key in range(100)] + [(key, 1) for key in range(0, 100, 3)]})
        chain.save(2, {PLAIN.name: [(key, key + 1) for key in range(50, 120)]}, gone={PLAIN.name: list(range(30))})
        assert_holds(place, chain)
        assert sorted(of(chain)) == list(range(30, 120))

    def test_chosen_keys_only(self, place: str) -> None:
        chain = Chain(place)
        chain.save(2, {PLAIN.name: [(key, key) for key in range(20)]})
        chain.save(3, {PLAIN.name: [(key, 1) for key in range(5)]}, gone={PLAIN.name: [8, 9]})
        whole = of(chain)
        even = of(chain, choose=lambda keys: keys % np.uint64(2) == 0)
        assert even == {key: content for key, content in whole.items() if key % 2 == 0}
        assert sorted(even) == [0, 2, 4, 6, 10, 12, 14, 16, 18]

    def test_a_table_without_rows_gives_empty_arrays_of_its_shape(self, place: str) -> None:
        chain = Chain(place)
        chain.save(2, {})
        chain.save(2, {})
        found = list(live_rows(chain.storage, chain.manifest, ITEMS.name))  # type: ignore[arg-type]
        assert found
        for keys, arrays in found:
            assert len(keys) == 0
            assert arrays["rows"].shape == (0, 6)
            assert arrays["seen"].shape == (0,)

    def test_keys_can_be_written_to(self, place: str) -> None:
        """Compiled functions know memory that may be written to from memory that may not."""
        chain = Chain(place)
        chain.save(1, {PLAIN.name: [(1, 1)]})
        for keys, _ in live_rows(chain.storage, chain.manifest, PLAIN.name):  # type: ignore[arg-type]
            keys[:] = 0

    def test_a_dense_table_is_refused_before_anything_is_read(self, place: str) -> None:
        chain = Chain(place)
        chain.save(1, {})
        with pytest.raises(CheckpointError, match=naming("'dense.0'", "items/ä", "plain", "ids")):
            live_rows(chain.storage, chain.manifest, "dense.0")  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=naming("'itmes'")):
            live_rows(chain.storage, chain.manifest, "itmes")  # type: ignore[arg-type]

    def test_statistics_of_a_table_are_those_its_policies_look_at(self, place: str) -> None:
        chain = Chain(place)
        manifest = chain.save(1, {})
        assert statistics_of(manifest, ITEMS.name) == ("seen", "born", "tick", "show", "click", "slot")
        assert statistics_of(manifest, PLAIN.name) == statistics_of(manifest, "dense.0") == ()
        assert statistics_of(msgspec.structs.replace(manifest, kind="inference"), ITEMS.name) == ()


class TestMemory:
    """One server's keys at a time, if all saves were made by the same number of servers."""

    @pytest.fixture
    def sizes(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        made: list[int] = []

        class Counted(KeySet):
            def __init__(self, max_keys: int, num_expected: int) -> None:
                made.append(max_keys)
                super().__init__(max_keys, num_expected)

        monkeypatch.setattr(chains, "KeySet", Counted)
        return made

    @pytest.mark.parametrize(("servers", "num"), [((4, 4), 4), ((4, 3), 1), ((4,), 4)])
    def test_sets_of_keys(self, place: str, sizes: list[int], servers: tuple[int, ...], num: int) -> None:
        chain = Chain(place)
        for i, num_servers in enumerate(servers):
            chain.save(num_servers, {PLAIN.name: [(key, key) for key in range(40)]}, gone={PLAIN.name: [3] * i})
        assert len(of(chain)) == 40
        assert len(sizes) == num
        assert sum(sizes) == 40 * len(servers) + len(servers) - 1


class TestDamage:
    def part_files(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("*.safetensors"))

    @pytest.fixture
    def chain(self, tmp_path: Path) -> Chain:
        made = Chain(str(tmp_path / "model"))
        made.save(2, {PLAIN.name: [(key, key) for key in range(9)], ITEMS.name: [(1, 1)]})
        made.save(2, {PLAIN.name: [(key, 1) for key in range(3)]}, gone={PLAIN.name: [5, 6]})
        made.save(1, {PLAIN.name: [(7, 2)]}, candidates={ITEMS.name: [(5, 5)]}, candidates_gone={ITEMS.name: [6]})
        return made

    def read_all(self, chain: Chain) -> None:
        manifest = read_manifest(chain.storage)
        for name in (PLAIN.name, ITEMS.name, IDS.name):
            held(live_rows(chain.storage, manifest, name))
            held(live_candidates(chain.storage, manifest, name))

    def test_every_file_of_every_link_is_checked(self, chain: Chain) -> None:
        files = [path for path in self.part_files(Path(chain.storage.path)) if "dense" not in path.name]
        assert any(".gone." in path.name for path in files)
        self.read_all(chain)
        for path in files:
            whole = path.read_bytes()
            for data in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), None):
                path.unlink() if data is None else path.write_bytes(data)
                with pytest.raises(CheckpointError, match=naming(f"{path.parent.name}/{path.name}")):
                    self.read_all(chain)
            path.write_bytes(whole)
        self.read_all(chain)

    def test_a_missing_folder_is_named(self, chain: Chain) -> None:
        chain.storage.remove_folder("save-000002")
        with pytest.raises(CheckpointError, match=naming("save-000002/")):
            self.read_all(chain)

    def changed(self, chain: Chain, **fields: Any) -> Manifest:
        assert chain.manifest is not None
        tables = [
            msgspec.structs.replace(table, **({} if table.is_dense else fields)) for table in chain.manifest.tables
        ]
        return msgspec.structs.replace(chain.manifest, tables=tables)

    def test_rows_of_another_width_are_refused(self, chain: Chain) -> None:
        write_manifest(chain.storage, self.changed(chain, dim=3))
        with pytest.raises(CheckpointError, match=naming("/plain.rows.0-00000.safetensors", "float32")):
            self.read_all(chain)

    def test_another_number_of_rows_is_refused(self, chain: Chain) -> None:
        assert chain.manifest is not None
        parts = [
            part if part.table == DENSE.name else msgspec.structs.replace(part, rows=part.rows + 1)
            for part in chain.manifest.parts
        ]
        write_manifest(chain.storage, msgspec.structs.replace(chain.manifest, parts=parts))
        with pytest.raises(CheckpointError, match=naming("(2,)", "uint64", "(1,)")):
            self.read_all(chain)


class TestKeySet:
    @given(st.lists(st.lists(st.sampled_from(KEYS), max_size=20), max_size=5))
    @settings(max_examples=examples(20))
    def test_new_keys_are_told_and_of_equal_ones_the_last(self, batches: list[list[int]]) -> None:
        met, known = KeySet(1000, 3), set()
        for batch in batches:
            found = met.add(np.array(batch, np.uint64))
            last = {key: i for i, key in enumerate(batch)}
            assert found.tolist() == [key not in known and last[key] == i for i, key in enumerate(batch)]
            known.update(batch)

    def test_too_many_keys_are_an_error(self) -> None:
        met = KeySet(5, 0)
        with pytest.raises(CheckpointError, match="keys"):
            met.add(np.arange(2000, dtype=np.uint64))


class TestDonefile:
    def test_one_line_per_link_the_oldest_first(self, place: str) -> None:
        chain = Chain(place)
        for _ in range(3):
            write_donefile(chain.storage, chain.save(2, {}))
        lines = [json.loads(line) for line in chain.storage.read(DONEFILE).decode().splitlines()]
        assert lines == [
            {"number": 1, "parent": 0, "kind": "full", "folder": "save-000001", "time": 86_400.0},
            {"number": 2, "parent": 1, "kind": "delta", "folder": "save-000002", "time": 172_800.0},
            {"number": 3, "parent": 2, "kind": "delta", "folder": "save-000003", "time": 259_200.0},
        ]
        write_donefile(chain.storage, chain.save(2, {}, full=True))
        assert len(chain.storage.read(DONEFILE).splitlines()) == 1


class TestAlone:
    def test_a_second_one_waits(self, tmp_path: Path) -> None:
        chain = Chain(str(tmp_path))
        chain.save(1, {})
        happened: list[str] = []

        def second() -> None:
            with alone(chain.storage):
                happened.append("second")

        with alone(chain.storage):
            thread = threading.Thread(target=second)
            thread.start()
            thread.join(0.1)
            happened.append("first")
        thread.join()
        assert happened == ["first", "second"]

    @pytest.mark.parametrize("dirname", ["memory://nothing", "{tmp}/nothing"])
    def test_where_nothing_can_be_held_nobody_waits(self, dirname: str, tmp_path: Path) -> None:
        storage = Chain(dirname.format(tmp=tmp_path)).storage
        with alone(storage), alone(storage):
            pass
