"""Saves of narrow rows: into tables of any type, through chains, compaction, export, comparison; and damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.policy_fleets import Tables

import torchfleet as fleet
from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.chain import live_rows
from torchfleet.ps.checkpoint.compaction import compact
from torchfleet.ps.checkpoint.comparison import compare
from torchfleet.ps.checkpoint.export import export_table
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.checkpoint.manifest_check import check_manifest
from torchfleet.ps.tables.rows.codecs import codec_of
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding

FORMATS = {
    "float32": RowFormat(),
    "bfloat16": RowFormat("bfloat16"),
    "float16": RowFormat("float16"),
    "int8": RowFormat("int8"),
    "learned": RowFormat("int8", "learned"),
}
NARROW = [name for name in FORMATS if name != "float32"]
DIM, NUM = 6, 90
FIRST = Initializer("uniform", -0.5, 0.5)


def spec_of(name: str, rule: str = "rowwise_adagrad") -> TableSpec:
    return TableSpec("t", dim=DIM, rule=Rule(rule, lr=0.1), initializer=FIRST, format=FORMATS[name])


def trained(spec: TableSpec, num_servers: int = 2, seed: int = 0) -> Tables:
    tables = Tables([spec], num_servers)
    train(tables, seed)
    return tables


def train(tables: Tables, seed: int) -> None:
    dice = np.random.default_rng(seed)
    for _ in range(5):
        keys = np.unique(dice.integers(0, NUM, 40).astype(np.uint64))
        tables.client.pull("t", keys).result()
        tables.client.push("t", keys, dice.normal(size=(len(keys), DIM)).astype(np.float32)).result()


def values(tables: Tables) -> dict[int, list[float]]:
    return {key: row["value"] for key, row in tables.rows("t").items()}


@pytest.mark.parametrize("num_servers", [1, 2, 3])
@pytest.mark.parametrize("name", NARROW)
def test_a_chain_loads_bit_by_bit_and_goes_on(name: str, num_servers: int, tmp_path: Path) -> None:
    spec, folder = spec_of(name), str(tmp_path / "m")
    tables = trained(spec)
    tables.save(folder)
    train(tables, 1)
    tables.save(folder, "delta")
    again = Tables([spec], num_servers, folder)
    assert again.everything() == tables.everything()
    assert compact(folder).base == []
    assert Tables([spec], num_servers, folder).everything() == tables.everything()
    train(again, 2)
    again.save(folder, "delta")
    assert Tables([spec], 2, folder).everything() == again.everything()


@pytest.mark.parametrize("now", list(FORMATS))
@pytest.mark.parametrize("was", list(FORMATS))
def test_a_save_loads_into_a_table_of_another_type(was: str, now: str, tmp_path: Path, capfd: Any) -> None:
    """Into float32 exactly; into narrower types to the nearest; state as it was."""
    folder = str(tmp_path / "m")
    tables = trained(spec_of(was))
    tables.save(folder)
    capfd.readouterr()
    loaded, exact = values(Tables([spec_of(now)], 1, folder)), values(tables)
    assert ("nearest" in capfd.readouterr().err) == (now not in ("float32", was))
    assert loaded.keys() == exact.keys()
    keys = sorted(exact)
    found, wanted = (np.array([rows[key] for key in keys], np.float32) for rows in (loaded, exact))
    assert np.array_equal(found[:, DIM:], wanted[:, DIM:])
    if now in ("float32", was):
        assert np.array_equal(found, wanted)
    elif now != "learned":
        codec = codec_of(FORMATS[now].dtype, DIM)
        words, wide = np.zeros((len(keys), codec.num_words), np.uint32), np.empty((len(keys), DIM), np.float32)
        codec.narrow(np.array(keys, np.uint64), np.ascontiguousarray(wanted[:, :DIM]), words)
        codec.widen(words, wide)
        assert np.array_equal(found[:, :DIM], wide)
    else:
        assert np.abs(found[:, :DIM] - wanted[:, :DIM]).max() < 0.01 * np.abs(wanted[:, :DIM]).max()


@pytest.mark.parametrize("name", NARROW)
def test_another_rule_keeps_the_values(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "m")
    tables = trained(spec_of(name))
    tables.save(folder)
    loaded = values(Tables([spec_of(name, "adam")], 2, folder))
    assert {key: row[:DIM] for key, row in loaded.items()} == {key: row[:DIM] for key, row in values(tables).items()}
    assert not any(any(row[DIM:]) for row in loaded.values())


@pytest.mark.parametrize("name", NARROW)
def test_files_are_narrow_and_other_programs_read_them(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = str(tmp_path / "m")
    tables = trained(spec_of(name), 1)
    tables.save(folder)
    manifest = read_manifest(Storage(folder))
    arrays = load_file(f"{folder}/{manifest.save}/{manifest.parts[0].file}")
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.int8)
    assert arrays["row_values"].dtype == dtype
    wide = arrays["row_values"].float() * (arrays["scale"][:, None] if dtype == torch.int8 else 1)
    wanted = values(tables)
    for key, row in zip(arrays["keys"].tolist(), wide, strict=True):
        assert row.tolist() == wanted[key][:DIM]


@pytest.mark.parametrize("name", NARROW)
def test_exports_comparisons_and_prediction_have_the_values(name: str, tmp_path: Path) -> None:
    folder, other = str(tmp_path / "m"), str(tmp_path / "o")
    tables = trained(spec_of(name))
    tables.save(folder)
    wanted = values(tables)
    rows = {k: r for keys, arrays in live_rows(Storage(folder), read_manifest(Storage(folder)), "t")
            for k, r in zip(keys.tolist(), arrays["rows"].tolist(), strict=True)}  # fmt: skip
    assert rows == wanted
    assert export_table(folder, "t", str(tmp_path / "rows.txt"), "text") == len(wanted)
    train(tables, 3)
    tables.save(other)
    found = compare(folder, other).tables["t"]
    assert found.settings.keys() <= {"step"}
    assert found.rows is not None
    assert found.rows.changed > 0
    assert compare(folder, folder).is_equal
    embedding = torch.nn.Sequential(SparseEmbedding(DIM, name="t"))
    model = fleet.load_inference_model(folder, embedding)
    keys = torch.tensor(sorted(wanted)[:20])
    assert model(keys).tolist() == [wanted[key][:DIM] for key in keys.tolist()]


def test_a_save_for_prediction_has_no_state(tmp_path: Path) -> None:
    folder = str(tmp_path / "m")
    tables = trained(spec_of("bfloat16"), 1)
    tables.save(folder, "inference")
    found = values(Tables([spec_of("bfloat16")], 1, folder))
    assert {key: row[:DIM] for key, row in found.items()} == {key: row[:DIM] for key, row in values(tables).items()}


def test_a_manifest_without_types_is_float32_and_one_of_unknown_types_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "m")
    trained(spec_of("float32"), 1).save(folder)
    manifest = read_manifest(Storage(folder))
    saved = manifest.tables[0]
    assert "format" not in msgspec.to_builtins(saved)
    assert saved.spec().format == RowFormat()
    wrong = msgspec.structs.replace(saved, format={"dtype": "float12"})
    with pytest.raises(CheckpointError, match="float12"):
        check_manifest(msgspec.structs.replace(manifest, tables=[wrong]), "here")
