"""The fleet command: what it shows of a saved model, what it exports, and what it says of damage and mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fleets import in_process
from scripts.saved_models import save

from torchfleet import command
from torchfleet.checkpoint.export import export_table
from torchfleet.errors import CheckpointError
from torchfleet.tables.spec import Rule, TableSpec

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
    return subprocess.run(
        [sys.executable, "-m", "torchfleet.command", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


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
    assert capsys.readouterr().out == f"{len(KEYS)} rows of 'items' in {path}\n"
    assert read(path) == by_key(KEYS, values)
    assert sorted(os.listdir(tmp_path)) == ["model", "rows"]


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
    assert any("save-000001: full, by 2 servers" in line for line in lines)


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
    assert "4 files are whole" in capsys.readouterr().out


def every_part(model: str) -> list[Path]:
    return sorted(Path(model).rglob("*.safetensors"))


@pytest.mark.parametrize("number", range(4))
def test_check_names_a_damaged_file(number: int, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = every_part(model)[number]
    whole = path.read_bytes()
    for data, what in [(whole[:-1], "damaged"), (whole[:-1] + bytes([whole[-1] ^ 1]), "damaged"), (None, "missing")]:
        path.unlink() if data is None else path.write_bytes(data)
        assert command.main(["inspect", model]) == 0  # which reads the manifest only
        capsys.readouterr()
        assert command.main(["inspect", model, "--check"]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("fleet: ")
        assert f"{path.name} is {what}" in captured.err
        assert "are whole" not in captured.out


# Mistakes


@pytest.mark.parametrize("form", ["text", "parquet"])
def test_an_export_that_fails_leaves_what_was_there(
    form: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = every_part(model)[-1]
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "rows").write_text("before")
    assert command.main(["export", model, "items", str(tmp_path / "rows"), "--format", form]) == 1
    assert f"{path.name} is damaged" in capsys.readouterr().err
    assert (tmp_path / "rows").read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["model", "rows"]


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no model": (["inspect", "{folder}"], "no saved model in"),
    "no folder": (["inspect", "{folder}/nothing"], "no saved model in"),
    "no model to export": (["export", "{folder}", "items", "{folder}/rows"], "no saved model in"),
    "an unknown table": (
        ["export", "{model}", "itmes", "{folder}/rows"],
        r"no table 'itmes' in it; it has items, dense.0",
    ),
    "a dense table": (
        ["export", "{model}", "dense.0", "{folder}/rows"],
        "'dense.0' is dense: it has no rows to export",
    ),
    "no such place": (["export", "{model}", "items", "{folder}/no/rows"], "export to"),
    "no such place for text": (["export", "{model}", "items", "{folder}/no/rows", "--format", "text"], "export to"),
    "a folder in the way": (["export", "{model}", "items", "{model}"], "export to"),
    "an empty path": (["inspect", ""], "expected the path of a folder"),
    "a protocol that nobody knows": (["inspect", "foo://model"], "foo"),
}


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
        [],
        ["nonsense"],
        ["inspect"],
        ["export", "m"],
        ["export", "m", "t", "p", "--format", "csv"],
        ["inspect", "m", "-x"],
    ],
    ids=str,
)
def test_a_wrong_command_line_is_exit_code_2_and_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    assert "usage: fleet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["inspect", "export", "docs/checkpoints.md"]),
        (["inspect", "--help"], ["--check"]),
        (["export", "--help"], ["--format", "--with_state", "parquet", "text"]),
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


def test_an_unknown_format_is_refused_by_the_function_too(model: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="one of parquet, text, found 'csv'"):
        export_table(model, "items", str(tmp_path / "rows"), "csv")


def test_without_pyarrow_it_is_said_what_to_install(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert command.main(["export", model, "items", str(tmp_path / "rows")]) == 1
    assert "pip install 'torchfleet[parquet]'" in capsys.readouterr().err
    assert command.main(["export", model, "items", str(tmp_path / "rows"), "--format", "text"]) == 0


def test_the_installed_command_does_it_all(model: str, tmp_path: Path) -> None:
    """As a process: exit codes, and no traceback."""
    done = run("inspect", model, "--check")
    assert done.returncode == 0, done.stderr
    assert "items" in done.stdout
    done = run("inspect", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
