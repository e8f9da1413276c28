"""The fleet command: what it shows of a saved model, what it exports, and what it says of damage and mistakes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from support import chains, processes
from support.extras import Late
from support.fleets import Fleet, in_process, in_threads
from support.messages import lines_naming, names, naming
from support.scripts.saved_models import save

from torchfleet.base.errors import CheckpointError
from torchfleet.base.monitor import progress
from torchfleet.base.storage import Storage
from torchfleet.observe.commands import command
from torchfleet.observe.commands.drawing import _TITLES, bars
from torchfleet.ps.checkpoint.export import export_table
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.net.keys import KeyFolder, keygen
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

pa, pq = Late("pyarrow"), Late("pyarrow.parquet")

ADAM = Rule("adam", lr=0.125)
ITEMS = TableSpec("items", dim=3, rule=ADAM)
LONG = TableSpec("towers.deep.embeddings.item_category_and_brand", dim=1, rule=ADAM)
EMPTY = TableSpec("empty", dim=2, rule=ADAM)
DENSE = TableSpec("dense.0", "dense", size=5, rule=ADAM)
KEYS = np.array([0, 5, -1, 2**62, -(2**63), 2**63 - 1, *range(100, 150)])


def numbers(num: int, dim: int) -> np.ndarray:
    """Float32 numbers of every size, the awkward ones among them."""
    rng = np.random.default_rng(0)
    made = rng.integers(0, 2**32, 20 * num * dim, np.uint32).view(np.float32)
    made = made[np.isfinite(made)][: num * dim]
    made[:7] = [0.1, 1 / 3, 1e-45, 3.4028235e38, -0.0, 16777217.0, 1.17549435e-38]
    return made.reshape(num, dim)


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return numbers(len(KEYS), 3)


def make_model(folder: str, values: np.ndarray, specs: list[TableSpec], with_state: bool = True) -> None:
    with in_process(2) as fleet:
        client = fleet.client()
        for spec in specs:
            client.create_table(spec)
        state = np.repeat(np.arange(len(KEYS), dtype=np.float32)[:, None], 6, axis=1)
        client.assign("items", KEYS, np.concatenate([values, state], axis=1))
        for spec in specs:
            if spec.kind == "sparse" and spec not in (ITEMS, EMPTY):
                client.pull(spec.name, np.arange(30)).result()
        save(client, specs, folder, with_state)


@pytest.fixture
def model(tmp_path: Path, values: np.ndarray) -> str:
    make_model(str(tmp_path / "model"), values, [ITEMS, DENSE])
    return str(tmp_path / "model")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a user does, without a terminal."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    line = [sys.executable, "-m", "torchfleet.observe.commands", *arguments]
    return processes.run(line, stderr=subprocess.PIPE, timeout=200, env=environment)


# Export


def by_key(keys: Any, rows: Any) -> dict[int, bytes]:
    found = {int(key): np.asarray(row, np.float32).tobytes() for key, row in zip(keys, rows, strict=True)}
    assert len(found) == len(keys)
    return found


def read_text(path: Path) -> dict[int, bytes]:
    lines = [line.split(" ") for line in path.read_text().splitlines()]
    return by_key([key for key, *_ in lines], [[float(value) for value in rest] for _, *rest in lines])


def read_parquet(path: Path) -> dict[int, bytes]:
    table = pq.read_table(path)
    return by_key(table["key"].to_pylist(), table["values"].to_pylist())


@pytest.mark.parametrize(("form", "read"), [("text", read_text), ("parquet", read_parquet)], ids=["text", "parquet"])
def test_an_exported_table_has_every_row_to_the_bit(
    form: str, read: Any, model: str, values: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows"
    assert command.main(["export", model, "items", str(path), "--format", form]) == 0
    assert names(capsys.readouterr().out, len(KEYS), "'items'", path)
    assert read(path) == by_key(KEYS, values)
    assert sorted(os.listdir(tmp_path)) == ["model", "rows"]


@pytest.mark.parametrize(("form", "read"), [("text", read_text), ("parquet", read_parquet)], ids=["text", "parquet"])
def test_a_whole_model_is_exported_as_plain_files(
    form: str, read: Any, model: str, values: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plain"
    assert command.main(["export", model, "--out", str(out), "--format", form]) == 0
    found = json.loads((out / "model.json").read_text())
    assert {path.name for path in out.iterdir()} == {"model.json", "parameters.safetensors", found["tables"][0]["file"]}
    assert [(table["name"], table["rows"]) for table in found["tables"]] == [("items", len(KEYS))]
    assert read(out / found["tables"][0]["file"]) == by_key(KEYS, values)
    assert lines_naming(capsys.readouterr().out, len(KEYS), "'items'")
    assert command.main(["export", model, "--out", str(out)]) == 1
    assert names(capsys.readouterr().err, out)


@pytest.mark.parametrize(("form", "read"), [("text", read_text), ("parquet", read_parquet)], ids=["text", "parquet"])
@pytest.mark.parametrize("place", ["memory://rows", "memory://exports/{form}/rows", "file://{folder}/rows"])
def test_a_table_is_exported_to_any_path_that_fsspec_opens(
    place: str, form: str, read: Any, model: str, values: np.ndarray, tmp_path: Path
) -> None:
    path, here = place.format(form=form, folder=tmp_path), tmp_path / "here"
    assert command.main(["export", model, "--table", "items", "--out", path, "--format", form]) == 0
    with fsspec.open(path, "rb") as file:
        here.write_bytes(file.read())
    assert read(here) == by_key(KEYS, values)
    with pytest.raises(FileNotFoundError):
        fsspec.open(f"{path}.tmp", "rb").open()


@pytest.mark.parametrize("form", ["text", "parquet"])
def test_an_export_to_a_store_that_fails_leaves_what_was_there(
    form: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = every_part(model)[-1]
    path.write_bytes(path.read_bytes()[:-1])
    with fsspec.open("memory://exports/failed", "wb") as file:
        file.write(b"before")
    assert command.main(["export", model, "items", "memory://exports/failed", "--format", form]) == 1
    assert lines_naming(capsys.readouterr().err, path.name)
    with fsspec.open("memory://exports/failed", "rb") as file:
        assert file.read() == b"before"
    assert not fsspec.filesystem("memory").exists("/exports/failed.tmp")


@pytest.mark.parametrize(("form", "read"), [("text", read_text), ("parquet", read_parquet)], ids=["text", "parquet"])
def test_with_state_it_stands_behind_the_values(
    form: str, read: Any, model: str, values: np.ndarray, tmp_path: Path
) -> None:
    path = tmp_path / "rows"
    assert command.main(["export", model, "items", str(path), "--format", form, "--with_state"]) == 0
    found = read(path)
    for i, key in enumerate(KEYS.tolist()):
        row = np.frombuffer(found[key], np.float32)
        assert row[:3].tobytes() == values[i].tobytes()
        assert row[3:].tolist() == [i] * 6


def test_parquet_columns_are_int64_and_lists_of_float32(model: str, tmp_path: Path) -> None:
    assert command.main(["export", model, "items", str(tmp_path / "rows.parquet")]) == 0
    schema = pq.read_schema(tmp_path / "rows.parquet")
    assert schema.names == ["key", "values"]
    assert schema.field("key").type == pa.int64()
    assert schema.field("values").type.value_type == pa.float32()


def test_the_ending_of_the_file_says_the_format(model: str, tmp_path: Path) -> None:
    for name in ("rows.csv", "rows.txt", "rows.parquet", "rows"):
        assert command.main(["export", model, "items", str(tmp_path / name)]) == 0
    text = (tmp_path / "rows.txt").read_text()
    head, _, lines = (tmp_path / "rows.csv").read_text().partition("\n")
    assert head == "key,value_0,value_1,value_2"
    assert lines.replace(",", " ") == text
    assert (tmp_path / "rows").read_bytes() == (tmp_path / "rows.parquet").read_bytes()


def test_an_ending_that_says_no_format_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["export", model, "items", str(tmp_path / "rows.json")]) == 1
    assert names(capsys.readouterr().err, ".csv", ".json", "--format")
    assert command.main(["export", model, "items", str(tmp_path / "rows.json"), "--format", "text"]) == 0
    assert read_text(tmp_path / "rows.json").keys() == set(KEYS.tolist())


@pytest.mark.parametrize("form", ["text", "parquet"])
def test_a_table_without_state_or_without_rows_can_be_exported(form: str, values: np.ndarray, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    make_model(folder, values, [ITEMS, EMPTY, DENSE], with_state=False)
    assert export_table(folder, "items", str(tmp_path / "rows"), form, with_state=True) == len(KEYS)
    assert export_table(folder, "empty", str(tmp_path / "none"), form) == 0
    assert (read_text if form == "text" else read_parquet)(tmp_path / "none") == {}


# Inspect


def test_inspect_shows_every_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["inspect", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    items = next(line for line in lines if " items " in line)
    dense = next(line for line in lines if " dense.0 " in line)
    size = sum(path.stat().st_size for path in Path(model).rglob("items*"))
    assert [cell.strip() for cell in items.strip("│ ").split("│")] == [
        "items", "sparse", "3", str(len(KEYS)), f"{size:,}", "adam", "0", "2",
    ]  # fmt: skip
    assert dense.split("│")[4].strip() == "5"
    assert any(names(line, "save-000001", 2) for line in lines)
    assert lines[0].endswith("by 2 servers")


@pytest.mark.slow
def test_long_names_are_shown_whole_without_a_terminal(values: np.ndarray, tmp_path: Path) -> None:
    """In a pipe or a log there is no width to fit to."""
    folder = str(tmp_path / ("a_folder_with_quite_a_long_name_" * 3) / "model")
    make_model(folder, values, [ITEMS, LONG, DENSE])
    done = run("inspect", folder)
    assert done.returncode == 0, done.stderr
    assert LONG.name in done.stdout
    assert folder in done.stdout


@pytest.mark.parametrize("name", ["run[adam]", "run[/b]", "run[bold]x"])
def test_brackets_in_names_are_shown_as_they_are(
    name: str, values: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = TableSpec(name, dim=1, rule=ADAM)
    make_model(str(tmp_path / "m"), values, [ITEMS, table])
    assert command.main(["inspect", str(tmp_path / "m")]) == 0
    assert name in capsys.readouterr().out
    (tmp_path / "m").rename(tmp_path / name.replace("/", "_"))
    assert command.main(["inspect", str(tmp_path / name.replace("/", "_"))]) == 0


def test_check_reads_every_file(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["inspect", model, "--check"]) == 0
    assert "4 files" in capsys.readouterr().out


def every_part(model: str) -> list[Path]:
    return sorted(Path(model).rglob("*.safetensors"))


@pytest.fixture
def without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a line of progress would come before an error."""
    monkeypatch.setattr(progress, "_FIRST", 1e9)


@pytest.mark.usefixtures("without_progress")
@pytest.mark.parametrize("number", range(4))
def test_check_names_a_damaged_file(number: int, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = every_part(model)[number]
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), None):
        path.unlink() if data is None else path.write_bytes(data)
        assert command.main(["inspect", model]) == 0  # which reads the manifest only
        capsys.readouterr()
        assert command.main(["inspect", model, "--check"]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("fleet: ")
        assert path.name in captured.err
        assert not re.search(r"\d files", captured.out)


# Mistakes


@pytest.mark.parametrize("form", ["text", "parquet"])
def test_an_export_that_fails_leaves_what_was_there(
    form: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = every_part(model)[-1]
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "rows").write_text("before")
    assert command.main(["export", model, "items", str(tmp_path / "rows"), "--format", form]) == 1
    assert lines_naming(capsys.readouterr().err, path.name)
    assert (tmp_path / "rows").read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["model", "rows"]


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no model": (["inspect", "{folder}"], "no saved model in"),
    "no folder": (["inspect", "{folder}/nothing"], "no saved model in"),
    "no model to export": (["export", "{folder}", "items", "{folder}/rows"], "no saved model in"),
    "an unknown table": (
        ["export", "{model}", "itmes", "{folder}/rows"],
        "the saved model has no table 'itmes'; its tables are items, dense.0",
    ),
    "a dense table": (
        ["export", "{model}", "dense.0", "{folder}/rows"],
        "'dense.0' is dense: it has no rows to export",
    ),
    "no such place": (["export", "{model}", "items", "{folder}/no/rows"], "export to"),
    "no such place for text": (["export", "{model}", "items", "{folder}/no/rows", "--format", "text"], "export to"),
    "a path that ends like a folder": (["export", "{model}", "items", "{folder}/"], "expected the path of a file"),
    "no such store": (["export", "{model}", "items", "nosuch://x/rows"], "nosuch://x cannot be opened"),
    "a folder in the way": (["export", "{model}", "items", "{model}"], "export to"),
    "an unknown table to look into": (
        ["inspect", "{model}", "--table", "itmes"],
        "no table 'itmes'; its tables are items",
    ),
    "a dense table to look into": (["inspect", "{model}", "--table", "dense.0"], "'dense.0' is dense"),
    "keys for a folder": (["inspect", "{model}", "--keys", "{folder}"], "--keys is not for a saved model"),
    "check of a server": (["inspect", "tcp://127.0.0.1:1", "--check"], "--check is not for a running server"),
    "no folder of keys": (["inspect", "tcp://127.0.0.1:1", "--keys", "{folder}/keys"], "no folder of keys at"),
    "nothing to compact": (["compact", "{folder}/nothing"], "no saved model in"),
    "nowhere to compact to": (["compact", "{model}", "--output", "/proc/nothing"], "cannot write to /proc/nothing"),
    "an empty path": (["inspect", ""], "expected the path of a folder"),
    "a protocol that nobody knows": (["inspect", "foo://model"], "foo"),
}


@pytest.mark.usefixtures("without_progress")
@pytest.mark.parametrize(("arguments", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_on_stderr_and_exit_code_1(
    arguments: list[str], text: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(folder=tmp_path, model=model) for argument in arguments]
    assert command.main(given) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fleet: ")
    assert text in captured.err
    assert sorted(os.listdir(tmp_path)) == ["model"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["inspect"],
        ["export", "m"],
        ["export", "m", "t"],
        ["export", "m", "--table", "t"],
        ["export", "m", "t", "p", "--out", "p"],
        ["export", "m", "t", "--table", "t", "--out", "p"],
        ["export", "m", "t", "p", "--format", "xml"],
        ["inspect", "m", "-x"],
        ["inspect", "m", "--top", "0"],
        ["inspect", "m", "--top", "x"],
        ["inspect", "m", "--top", "1001"],
        ["compact"],
        ["compact", "m", "--output"],
    ],
    ids=str,
)
def test_a_wrong_command_line_is_exit_code_2_and_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    error, cure = capsys.readouterr().err.splitlines()
    assert error.startswith("fleet")
    assert "--help" in cure


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["inspect", "diff", "compact", "export", "fleet docs checkpoints", "fleet inspect tcp://"]),
        (["inspect", "--help"], ["--check", "--table", "--histograms", "--top", "--keys", "--json", "tcp://"]),
        (["export", "--help"], ["--format", "--with_state", "--with_statistics", "parquet", "text"]),
        (["compact", "--help"], ["--output"]),
        (["diff", "--help"], ["status 0", "--max_gb", "--json"]),
    ],
    ids=str,
)
def test_help_names_what_there_is(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for word in words:
        assert word in shown


def test_without_arguments_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([])
    shown = capsys.readouterr().err
    for word in ("inspect", "diff", "compact", "export", "examples:"):
        assert word in shown


def test_an_unknown_format_is_refused_by_the_function_too(model: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=naming("parquet", "text", "csv", "'xml'")):
        export_table(model, "items", str(tmp_path / "rows"), "xml")


def test_without_pyarrow_it_is_said_what_to_install(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert command.main(["export", model, "items", str(tmp_path / "rows")]) == 1
    assert "pip install 'torchfleet[parquet]'" in capsys.readouterr().err
    assert command.main(["export", model, "items", str(tmp_path / "rows"), "--format", "text"]) == 0


@pytest.mark.slow
def test_the_installed_command_does_it_all(model: str, tmp_path: Path) -> None:
    """As a process: exit codes, and no traceback."""
    done = run("inspect", model, "--check")
    assert done.returncode == 0, done.stderr
    assert "items" in done.stdout
    done = run("inspect", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


# Chains


@pytest.fixture
def chain(tmp_path: Path) -> chains.Chain:
    """A full save and two deltas: items 1, 2, 3 and 9, of which 9 is the last; 2**64 - 1 is a candidate."""
    made = chains.Chain(str(tmp_path / "chain"))
    items = chains.ITEMS.name
    made.save(2, {items: [(1, 10), (2, 20), (3, 30), (4, 40)], "plain": [(5, 5)]})
    made.save(2, {items: [(2, 21)]}, gone={items: [4]}, candidates={items: [(2**64 - 1, 2), (77, 1)]})
    made.save(3, {items: [(9, 86_400)]}, candidates_gone={items: [77]}, extra={"pass": "2026-01-01"})
    return made


def cells(shown: str, word: str) -> list[str]:
    """Of the first line of a table that has this word in a cell of its own."""
    for line in shown.splitlines():
        found = [cell.strip() for cell in line.strip("│ ").split("│")]
        if word in found:
            return found
    raise AssertionError(f"{word} is nowhere in {shown}")


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """As JSON."""
    assert command.main(["inspect", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_shows_the_chain(chain: chains.Chain, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["inspect", chain.storage.path, "--check"]) == 0
    shown = capsys.readouterr().out
    size = sum(path.stat().st_size for path in Path(chain.storage.path, "save-000002").iterdir())
    num = len(list(Path(chain.storage.path, "save-000002").iterdir()))
    assert cells(shown, "save-000002") == [
        "2", "1", "delta", "save-000002", "2", "1", "1", "2", f"{size:,}", str(num), "1970-01-03 00:00:00",
    ]  # fmt: skip
    assert cells(shown, "save-000001")[:3] == ["1", "0", "full"]
    assert 'extra: {"pass":"2026-01-01"}' in shown
    assert cells(shown, chains.ITEMS.name)[3] == "4"
    assert "count=3, show='show', click='click'" in shown
    assert "delete_after_unseen_days=3" in shown
    assert "seen, born, tick, show, click, slot" in shown
    assert f"{len(every_part(chain.storage.path))} files" in shown


def test_check_reads_every_link(chain: chains.Chain, capsys: pytest.CaptureFixture[str]) -> None:
    for path in every_part(chain.storage.path)[::7]:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert command.main(["inspect", chain.storage.path, "--check"]) == 1
        assert f"{path.parent.name}/{path.name}" in capsys.readouterr().err
        path.write_bytes(whole)


def test_json_has_the_same(chain: chains.Chain, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, chain.storage.path, "--check")
    assert [(link["number"], link["parent"], link["kind"], link["rows"]) for link in found["chain"]] == [
        (1, 0, "full", 5), (2, 1, "delta", 1), (3, 2, "delta", 1),
    ]  # fmt: skip
    assert found["tables"][0]["statistics"] == ["seen", "born", "tick", "show", "click", "slot"]
    assert found["tables"][0]["shrink"]["ttl_days"] == 9
    assert found["extra"] == {"pass": "2026-01-01"}
    assert found["whole_files"] == len(every_part(chain.storage.path))
    assert "summaries" not in found


def test_a_table_is_looked_into(chain: chains.Chain, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["inspect", chain.storage.path, "--table", chains.ITEMS.name]) == 0
    shown = capsys.readouterr().out
    for title in _TITLES.values():
        assert title in shown
    assert lines_naming(shown, chains.ITEMS.name, "score")
    assert cells(shown, "9")[0] == "9"
    assert lines_naming(shown, chains.ITEMS.name, 1)
    assert "plain: " not in shown
    assert command.main(["inspect", chain.storage.path, "--table", "plain", "--top", "1"]) == 0
    shown = capsys.readouterr().out
    assert lines_naming(shown, "plain", "norm")
    assert _TITLES["norm"] not in shown


def test_histograms_of_all_tables_that_have_rows(chain: chains.Chain, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, chain.storage.path, "--histograms", "--top", "2")["summaries"]
    assert list(found) == [chains.ITEMS.name, "plain", "ids"]
    items = found[chains.ITEMS.name]
    assert (items["rows"], items["candidates"], found["ids"]["rows"]) == (4, 1, 0)
    assert items["histograms"]["unseen_days"] == [{"from": 2, "to": 2, "rows": 4}]
    assert [line["key"] for line in items["top"]] == [9, 3]


def test_bars_are_as_long_as_what_they_count() -> None:
    bins = [{"from": 0, "to": 0, "rows": 10}, {"from": 1, "to": 1, "rows": 1000}, {"from": 3, "to": 4, "rows": 500}]
    lines = [line.replace("█", "#") for line in bars("age_days", bins)]
    assert [line.split() for line in lines] == [
        ["0", "10", "#"], ["1", "1,000", "#" * 40], ["2", "0"], ["3-4", "500", "#" * 20],
    ]  # fmt: skip
    reals = [{"from": None, "to": 0.0, "rows": 1}, {"from": 0.0, "to": 0.0, "rows": 2}]
    assert [line.split()[:-1] for line in bars("score", reals)] == [["below", "0", "1"], ["0", "2"]]
    (line,) = bars("score", [{"from": 2.0**40, "to": None, "rows": 3}])
    assert line.split()[:3] == ["from", "1.1e+12", "3"]


@pytest.mark.parametrize("form", ["text", "parquet"])
def test_a_chain_is_exported_with_its_statistics(form: str, chain: chains.Chain, tmp_path: Path) -> None:
    path, name = tmp_path / "rows", chains.ITEMS.name
    assert export_table(chain.storage.path, name, str(path), form, with_statistics=True) == 4
    columns = ["seen", "born", "tick", "show", "click", "slot"]
    if form == "text":
        found = {int(line.split()[0]): line.split()[1:] for line in path.read_text().splitlines()}
        assert found[9] == ["86400", "86400.125", *["86400"] * 6]
        assert found[2] == ["21", "21.125", *["21"] * 6]
        return
    table = pq.read_table(path)
    assert table.column_names == ["key", "values", *columns]
    assert [str(table.schema.field(name).type) for name in columns] == ["uint32"] * 3 + ["float"] * 2 + ["uint32"]
    lines = {line["key"]: line for line in table.to_pylist()}
    assert sorted(lines) == [1, 2, 3, 9]
    assert lines[2] == {"key": 2, "values": [21.0, 21.125], **dict.fromkeys(columns, 21)}


def test_export_says_which_statistics_there_are(
    chain: chains.Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for table, columns in ((chains.ITEMS.name, "seen, born, tick, show, click, slot"), ("plain", "statistics")):
        assert command.main(["export", chain.storage.path, table, str(tmp_path / "rows"), "--with_statistics"]) == 0
        assert names(capsys.readouterr().out, columns)


def test_compact_makes_one_of_the_chain(
    chain: chains.Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = chain.storage.path, str(tmp_path / "other")
    assert command.main(["compact", path, "--output", other]) == 0
    assert lines_naming(capsys.readouterr().out, 3, "save-000000000001", other)
    assert len(read_manifest(Storage(path)).links()) == 3
    assert command.main(["diff", path, other]) == 0
    capsys.readouterr()
    assert command.main(["compact", path]) == 0
    assert lines_naming(capsys.readouterr().out, 3, "save-000000000004", path)
    assert command.main(["compact", path]) == 0
    assert lines_naming(capsys.readouterr().out, path)
    assert command.main(["diff", path, other]) == 0
    chains.assert_holds(path, chain)


# Running servers


@pytest.fixture
def running() -> Iterator[Fleet]:
    """Two servers: 30 rows of items and 20 candidates, 50 rows of plain, a dense table."""
    with in_threads(["tcp://127.0.0.1:0"] * 2) as fleet:
        client = fleet.client()
        for spec in (chains.ITEMS, chains.PLAIN, chains.DENSE):
            client.create_table(spec)
        for start in (0, 10, 20, 30):
            client.pull(chains.ITEMS.name, np.arange(start, 50)).result()
        client.assign("plain", np.arange(50), np.arange(50, dtype=np.float32)[:, None])
        yield fleet


def endpoints_of(fleet: Fleet) -> str:
    return ",".join(server.endpoint for server in fleet.servers)


def test_inspect_of_running_servers(running: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    where = endpoints_of(running)
    assert command.main(["inspect", where]) == 0
    shown = capsys.readouterr().out
    assert all(lines_naming(shown, endpoint) for endpoint in where.split(","))
    assert cells(shown, "plain")[:3] == [where.split(",")[0], "plain", "sparse"]
    assert _TITLES["norm"] not in shown
    found = inspected(capsys, where, "--histograms", "--top", "3")
    assert list(found["servers"]) == where.split(",")
    assert list(found["summaries"]) == [chains.ITEMS.name, "plain"]
    items, plain = found["summaries"].values()
    assert (items["rows"], items["candidates"], plain["rows"]) == (30, 20, 50)
    assert [line["key"] for line in plain["top"]] == [49, 48, 47]
    assert plain["norm_max"] == 49.0


def test_a_running_table_is_looked_into(running: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["inspect", endpoints_of(running), "--table", "plain"]) == 0
    shown = capsys.readouterr().out
    assert lines_naming(shown, "plain", 50, "24.5", 49)
    assert lines_naming(shown, "plain", "norm")
    assert chains.ITEMS.name + ":" not in shown
    assert command.main(["inspect", endpoints_of(running), "--table", "itmes"]) == 1
    assert lines_naming(capsys.readouterr().err, "'itmes'", "tcp://127.0.0.1")
    assert command.main(["inspect", endpoints_of(running), "--table", "dense.0"]) == 1
    assert "'dense.0'" in capsys.readouterr().err


def test_servers_with_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keygen(tmp_path / "keys")
    with in_threads(["tcp://127.0.0.1:0"], KeyFolder(tmp_path / "keys")) as fleet:
        fleet.client().create_table(chains.PLAIN)
        assert command.main(["inspect", endpoints_of(fleet), "--keys", str(tmp_path / "keys")]) == 0
        assert cells(capsys.readouterr().out, "plain")[3] == "0"


def test_stats_shows_rows_of_sparse_tables_and_elements_of_dense_ones(
    running: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    client = running.client()
    client.attach(chains.PLAIN)
    client.push_tables({"plain": ([1], np.ones((1, 1), np.float32))}, versions={"plain": [0.0, 0.0]}).result()
    where = endpoints_of(running).replace("tcp://", "")
    assert command.main(["stats", where]) == 0
    shown = capsys.readouterr().out
    assert all(f"tcp://{place}" in shown for place in where.split(","))
    rows = [cells(line, "plain") for line in shown.splitlines() if " plain " in line]
    assert sum(int(row[3]) for row in rows) == 50
    assert [row[6:8] for row in rows] == [["1", "0: 1"]] * 2  # updates, staleness
    assert all(row[4] == "-" for row in rows)
    dense = [cells(line, "dense.0") for line in shown.splitlines() if " dense.0 " in line]
    assert [row[3] for row in dense] == ["-", "-"]
    assert sum(int(row[4]) for row in dense) == chains.DENSE.size
    assert command.main(["stats", where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["servers"]
    assert list(found) == endpoints_of(running).split(",")
    assert sum(server["tables"]["plain"]["rows"] for server in found.values()) == 50
    assert all(server["requests"] > 0 and server["workers"] == [] for server in found.values())


def test_stats_of_servers_with_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keygen(tmp_path / "keys")
    with in_threads(["tcp://127.0.0.1:0"], KeyFolder(tmp_path / "keys")) as fleet:
        fleet.client().create_table(chains.PLAIN)
        assert command.main(["stats", endpoints_of(fleet), "--key_dir", str(tmp_path / "keys")]) == 0
        assert cells(capsys.readouterr().out, "plain")[3] == "0"
        assert command.main(["stats", endpoints_of(fleet)]) == 1
        assert lines_naming(capsys.readouterr().err, endpoints_of(fleet), "--key_dir")


def test_stats_says_at_once_what_is_wrong_with_an_address(
    running: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["stats", "127.0.0.1"]) == 1
    assert "host:port" in capsys.readouterr().err
    assert command.main(["stats", "127.0.0.1:1"]) == 1
    assert "tcp://127.0.0.1:1" in capsys.readouterr().err
    keygen(tmp_path / "keys")
    first = endpoints_of(running).split(",")[0]
    assert command.main(["stats", first, "--key_dir", str(tmp_path / "keys")]) == 1
    assert lines_naming(capsys.readouterr().err, first)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            connection, _ = other.accept()
            connection.sendall(b"SSH-2.0-other\r\n")
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        place = f"127.0.0.1:{other.getsockname()[1]}"
        assert command.main(["stats", place]) == 1
        thread.join(10)
    assert f"tcp://{place}" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchfleet.observe.commands import inspect_servers
    from torchfleet.ps.worker.client.connection import Patience

    monkeypatch.setattr(inspect_servers, "_PATIENCE", Patience(timeout=0.5))
    assert command.main(["inspect", "tcp://127.0.0.1:1"]) == 1
    assert "tcp://127.0.0.1:1" in capsys.readouterr().err
