"""Two models side by side: counts and differences against plain dicts, whatever the chains and servers behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from support.chains import ITEMS, PLAIN, SPECS, Chain, Contents
from support.messages import lines_naming, names, naming
from support.searches import examples
from test_chain import links

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.observe.commands import command
from torchfleet.ps.checkpoint.compaction import compact
from torchfleet.ps.checkpoint.comparison import Comparison, compare
from torchfleet.ps.checkpoint.manifest import Parameter, read_manifest, write_manifest
from torchfleet.ps.checkpoint.matching import Difference
from torchfleet.ps.tables.settings.policy import AdmissionEntry
from torchfleet.ps.tables.settings.spec import Rule


def forget() -> None:
    memory = fsspec.filesystem("memory")
    for folder in ("/a", "/b", "/c"):
        if memory.exists(folder):
            memory.rm(folder, recursive=True)


def made(dirname: str, saves: list[dict[str, Any]], **options: Any) -> Chain:
    chain = Chain(dirname, **options)
    for save in saves:
        chain.save(**save)
    return chain


def expected(a: Contents, b: Contents, dim: int) -> Difference:
    """By hand, key by key."""
    found, apart = Difference(others={}), []
    found.only_in_a, found.only_in_b = len(a.keys() - b.keys()), len(b.keys() - a.keys())
    for key in a.keys() & b.keys():
        one, two = (np.frombuffer(content.get("rows", b""), np.float32) for content in (a[key], b[key]))
        is_same = one[:dim].tobytes() == two[:dim].tobytes()
        found.equal, found.changed = found.equal + is_same, found.changed + (not is_same)
        others = {"state": one[dim:].tobytes() != two[dim:].tobytes()}
        others |= {name: a[key][name] != b[key][name] for name in a[key] if name != "rows"}
        for name in (name for name, differs in others.items() if differs):
            found.others[name] = found.others.get(name, 0) + 1
        apart += np.abs(one[:dim].astype(np.float64) - two[:dim]).tolist()
    found.largest, found.mean = max(apart, default=0.0), float(np.mean(apart)) if apart else 0.0
    return found


def assert_same(found: Difference, wanted: Difference) -> None:
    assert msgspec.structs.replace(found, largest_at=None, mean=0.0) == msgspec.structs.replace(wanted, mean=0.0)
    assert found.mean == pytest.approx(wanted.mean)
    assert (found.largest_at is None) == (not found.changed)


def difference(a: str, b: str, **options: Any) -> Comparison:
    found = compare(a, b, **options)
    turned = compare(b, a, **options)
    assert found.is_equal == turned.is_equal
    assert (found.only_in_a, found.only_in_b) == (turned.only_in_b, turned.only_in_a)
    return found


class TestRows:
    @pytest.mark.slow
    @given(links(), links())
    @settings(max_examples=examples(8))
    def test_any_two_chains(self, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
        forget()
        a, b = made("memory://a", first), made("memory://b", second)
        found = difference("memory://a", "memory://b")
        for spec in SPECS[:3]:
            rows = found.tables[spec.name].rows
            assert rows is not None
            assert_same(rows, expected(a.rows[spec.name], b.rows[spec.name], spec.dim))
        candidates = found.tables[ITEMS.name].candidates
        assert candidates is not None
        assert_same(candidates, expected(a.candidates[ITEMS.name], b.candidates[ITEMS.name], 0))

    @given(links())
    @settings(max_examples=examples(4))
    def test_a_chain_equals_itself_compacted_and_resharded(self, saves: list[dict[str, Any]]) -> None:
        forget()
        made("memory://a", saves)
        compact("memory://a", "memory://b")
        assert difference("memory://a", "memory://b").is_equal

    @pytest.mark.parametrize("max_bytes", [100, 1000, 10**9])
    def test_in_little_memory_it_is_done_in_rounds(self, max_bytes: int) -> None:
        forget()
        a = made("memory://a", [{"num_servers": 3, "rows": {PLAIN.name: [(key, key) for key in range(60)]}}])
        b = made("memory://b", [{"num_servers": 2, "rows": {PLAIN.name: [(key, 5) for key in range(3, 66)]}}])
        found = compare("memory://a", "memory://b", max_bytes).tables[PLAIN.name].rows
        assert found is not None
        assert_same(found, expected(a.rows[PLAIN.name], b.rows[PLAIN.name], 1))
        assert (found.only_in_a, found.only_in_b, found.changed, found.equal) == (3, 6, 56, 1)
        assert (found.largest, found.largest_at) == (54.0, 59)

    def test_the_key_of_the_largest_difference_is_signed_as_in_exports(self) -> None:
        forget()
        made("memory://a", [{"num_servers": 1, "rows": {PLAIN.name: [(2**64 - 1, 9), (4, 1)]}}])
        made("memory://b", [{"num_servers": 1, "rows": {PLAIN.name: [(2**64 - 1, 1), (4, 2)]}}])
        rows = compare("memory://a", "memory://b").tables[PLAIN.name].rows
        assert rows is not None
        assert (rows.largest, rows.largest_at, rows.mean) == (8.0, -1, 4.5)


SAVE: dict[str, Any] = {
    "num_servers": 2,
    "rows": {PLAIN.name: [(key, key) for key in range(5)], ITEMS.name: [(1, 1)]},
    "candidates": {ITEMS.name: [(7, 7)]},
}


def changed(dirname: str, table: str, **fields: Any) -> None:
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    tables = [msgspec.structs.replace(saved, **fields) if saved.name == table else saved for saved in manifest.tables]
    write_manifest(storage, msgspec.structs.replace(manifest, tables=tables))


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    """Two that are equal, though not saved by as many servers."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    made(a, [SAVE])
    made(b, [{**SAVE, "num_servers": 3}])
    assert compare(a, b).is_equal
    return a, b


class TestSettings:
    @pytest.mark.parametrize(
        ("table", "fields", "is_comparable"),
        [
            (PLAIN.name, {"rule": {"name": "sgd", "lr": 0.5}}, True),
            (PLAIN.name, {"step": 77}, True),
            (PLAIN.name, {"seed": 3}, True),
            (ITEMS.name, {"entry": msgspec.to_builtins(AdmissionEntry(probability=0.5))}, True),
            (ITEMS.name, {"shrink": {"max_rows": 7}}, True),
            (PLAIN.name, {"dim": 2}, False),
            ("dense.0", {"step": 5}, False),
        ],
        ids=str,
    )
    def test_settings_that_differ_are_told(
        self, models: tuple[str, str], table: str, fields: dict[str, Any], is_comparable: bool
    ) -> None:
        changed(models[1], table, **fields)
        found = difference(*models)
        assert not found.is_equal
        assert set(found.tables[table].settings) - {"statistics"} == set(fields)
        assert (found.tables[table].rows is not None) == is_comparable

    def test_tables_and_parameters_that_only_one_has(self, models: tuple[str, str]) -> None:
        storage = Storage(models[1])
        manifest = read_manifest(storage)
        tables = [table for table in manifest.tables if table.name != PLAIN.name]
        layout = [Parameter("w", [2, 2], 0), Parameter("bias", [3], 4)]
        tables = [msgspec.structs.replace(table, parameters=layout) if table.is_dense else table for table in tables]
        parts = [part for part in manifest.parts if part.table != PLAIN.name]
        write_manifest(storage, msgspec.structs.replace(manifest, tables=tables, parts=parts, num_files=len(parts)))
        found = difference(*models)
        assert (found.only_in_a, found.only_in_b) == (["b", PLAIN.name], ["bias"])
        assert not found.is_equal

    def test_parameters_of_another_shape(self, models: tuple[str, str]) -> None:
        changed(models[1], "dense.0", parameters=[Parameter("w", [4], 0), Parameter("b", [3], 4)])
        found = difference(*models)
        assert found.shapes == {"w": ([2, 2], [4])}
        assert not found.is_equal


class TestOthers:
    def test_dense_parameters_by_name(self, tmp_path: Path) -> None:
        a, b = str(tmp_path / "a"), str(tmp_path / "b")
        made(a, [SAVE])
        made(b, [SAVE, {"num_servers": 3, "rows": {}}])  # dense values are one larger after each save
        found = difference(a, b)
        assert found.parameters["w"] == Difference(changed=4, largest=1.0, largest_at=0, mean=1.0, others={"state": 4})
        assert found.parameters["b"].changed == 3
        assert found.tables[PLAIN.name].rows == Difference(equal=5, others={})

    def test_the_counters_of_a_window(self, tmp_path: Path) -> None:
        window = {"entry": {"window_count": 2, "window_hours": 1.0, "window_bytes": 1}}
        blocks = np.arange(5040 * 64, dtype=np.uint8).reshape(5040, 64)
        for name, num_servers, first in (("a", 2, 1), ("b", 3, 1), ("c", 1, 2)):
            chain = made(str(tmp_path / name), [{**SAVE, "num_servers": num_servers}])
            changed(chain.storage.path, ITEMS.name, **window)
            chain.manifest = read_manifest(chain.storage)
            blocks[0, 0] = first
            chain.write_sketch(ITEMS, blocks)
        a, b, c = (str(tmp_path / name) for name in "abc")
        assert difference(a, b).is_equal
        assert not difference(a, c).tables[ITEMS.name].is_sketch_equal
        assert not difference(a, c).is_equal

    def test_saved_with_and_without_state(self, tmp_path: Path, models: tuple[str, str]) -> None:
        """What one lacks is told by num_states; values are compared."""
        plain = str(tmp_path / "plain")
        chain = made(plain, [SAVE], specs=[msgspec.structs.replace(ITEMS, rule=Rule("sgd"))])
        table = difference(models[0], chain.storage.path).tables[ITEMS.name]
        assert "num_states" in table.settings
        assert table.rows == Difference(equal=1, others={})

    def test_saved_for_training_and_for_prediction(self, models: tuple[str, str]) -> None:
        """What only one has kept is told once, and not for every row."""
        storage = Storage(models[1])
        write_manifest(storage, msgspec.structs.replace(read_manifest(storage), kind="inference"))
        table = difference(*models).tables[ITEMS.name]
        assert table.settings == {"statistics": (("seen", "born", "tick", "show", "click", "slot"), ())}
        assert table.rows == Difference(equal=1, others={})


class TestMistakes:
    def test_a_damaged_file_is_named(self, models: tuple[str, str]) -> None:
        path = sorted(Path(models[1]).rglob("plain*"))[0]
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=naming(path.name)):
            compare(*models)

    def test_no_memory_at_all(self, models: tuple[str, str]) -> None:
        with pytest.raises(CheckpointError, match="max_bytes"):
            compare(*models, max_bytes=0)


class TestCommand:
    def test_equal_models_are_status_0(self, models: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["diff", *models]) == 0
        shown = capsys.readouterr().out
        assert lines_naming(shown, "plain", 5, 0)
        assert lines_naming(shown, "w", 4, 0)
        assert "equal" in shown.splitlines()[-1]

    def test_different_models_are_status_1(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        a, b = str(tmp_path / "a"), str(tmp_path / "b")
        made(a, [SAVE])
        rows = {PLAIN.name: [(1, 1), (2, 12), (30, 3)], ITEMS.name: [(1, 2)]}
        made(b, [{"num_servers": 1, "rows": rows, "candidates": {ITEMS.name: [(8, 8)]}}])
        changed(b, ITEMS.name, shrink={"max_rows": 3})
        assert command.main(["diff", a, b]) == 1
        shown = capsys.readouterr().out
        for line in (
            f"A: {a}",
            "plain: 1 rows equal, 1 changed, 3 only in A, 1 only in B",
            "    largest difference 10 (key 2), mean absolute difference 5",
            "items/ä: 0 rows equal, 1 changed, 0 only in A, 0 only in B",
            "    state differs in 1",
            "    click differs in 1",
            "items/ä: candidates: 0 rows equal, 0 changed, 1 only in A, 1 only in B",
            "the models differ",
        ):
            assert line in shown.splitlines()
        assert lines_naming(shown, "items/ä", "shrink")

    def test_json_says_the_same(self, models: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        changed(models[1], PLAIN.name, seed=4)
        assert command.main(["diff", *models, "--json", "--max_gb", "0.001"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["equal"] is False
        assert found["tables"][PLAIN.name]["settings"] == {"seed": [0, 4]}
        assert found["tables"][PLAIN.name]["rows"]["equal"] == 5
        assert found["parameters"]["w"]["equal"] == 4

    @pytest.mark.parametrize("which", [0, 1])
    def test_an_error_is_status_2(
        self, models: tuple[str, str], tmp_path: Path, which: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = [models[0], str(tmp_path / "nothing")]
        assert command.main(["diff", *(given if which else given[::-1])]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("fleet: ")
        assert names(captured.err, tmp_path / "nothing")
        assert captured.out == ""

    @pytest.mark.parametrize(
        "arguments", [["a"], ["a", "b", "c"], *(["a", "b", "--max_gb", x] for x in ("0", "-1", "nan", "x", "inf"))]
    )
    def test_a_wrong_command_line_is_status_2(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            command.main(["diff", *arguments])
        assert caught.value.code == 2
        assert "--help" in capsys.readouterr().err
