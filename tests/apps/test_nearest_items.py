"""Indexes of nearest items, against a plain computation over all pairs; and the commands that make and search them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.extras import imported
from support.fleets import in_process
from support.messages import names, naming
from support.scripts.saved_models import save

import torchfleet as fleet
from torchfleet.apps import nearest_items
from torchfleet.apps.nearest_items import METRICS, Metric, build_index, load_index
from torchfleet.base.errors import CheckpointError, FleetError, MissingPackage
from torchfleet.observe.commands import command
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

DIM, NUM = 4, 60
IDS = np.random.default_rng(0).permutation(np.array([-(2**63), -5, 2**63 - 1, *range(100, 100 + NUM - 3)]))
VECTORS = np.random.default_rng(1).normal(size=(NUM, DIM)).astype(np.float32)


def scores_of(queries: np.ndarray, metric: str) -> np.ndarray:
    q, v = queries.astype(np.float64), VECTORS.astype(np.float64)
    if metric == "l2":
        return -((q[:, None] - v[None]) ** 2).sum(axis=2)
    if metric == "cosine":
        q, v = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (q, v))
    return q @ v.T


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("chunk", [7, 1 << 16])
def test_the_exact_index_finds_the_nearest_of_all(
    metric: Metric, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest_items, "_CHUNK", chunk)
    assert build_index(str(tmp_path / "index"), IDS, VECTORS, "exact", metric) == NUM
    index = load_index(str(tmp_path / "index"))
    queries = np.random.default_rng(2).normal(size=(5, DIM)).astype(np.float32)
    expected = scores_of(queries, metric)
    order = np.argsort(-expected, axis=1)[:, :10]
    found = index.search(queries, 10)
    assert found.ids.tolist() == IDS[order].tolist()
    np.testing.assert_allclose(found.scores, np.take_along_axis(expected, order, 1), rtol=1e-4, atol=1e-5)


def test_neighbours_of_an_item_are_not_itself(tmp_path: Path) -> None:
    build_index(str(tmp_path / "index"), IDS, VECTORS, metric="ip")
    index = load_index(str(tmp_path / "index"))
    found = index.neighbours(IDS[:3], 5)
    expected = scores_of(VECTORS[:3], "ip")
    expected[np.arange(3), np.arange(3)] = -np.inf
    assert found.ids.tolist() == IDS[np.argsort(-expected, axis=1)[:, :5]].tolist()
    few = index.neighbours(IDS[:1], NUM + 5)
    assert (few.ids[0, : NUM - 1] != IDS[0]).all()
    assert few.scores[0, NUM - 1 :].tolist() == [-np.inf] * 6
    with pytest.raises(FleetError, match=naming(12345)):
        index.neighbours([12345])
    with pytest.raises(FleetError, match=naming("no such item")):
        index.neighbours(["no such item"])


def test_an_item_with_the_id_of_the_fillers_has_neighbours(tmp_path: Path) -> None:
    build_index(str(tmp_path / "index"), [-1, 5, 7], np.array([[1, 0], [0, 1], [1, 1]], np.float32), metric="ip")
    index = load_index(str(tmp_path / "index"))
    found = index.neighbours([-1, 5], 4)
    assert found.ids.tolist() == [[7, 5, -1, -1], [7, -1, -1, -1]]
    assert found.scores.tolist() == [[1, 0, -np.inf, -np.inf], [1, 0, -np.inf, -np.inf]]


def test_ids_may_be_strings(tmp_path: Path) -> None:
    build_index(str(tmp_path / "index"), ["a", "b", "c"], np.eye(3, dtype=np.float32) + 0.1)
    found = load_index(str(tmp_path / "index")).neighbours(["a"], 2)
    assert set(found.ids[0].tolist()) == set(fleet.hash_strings(["b", "c"]).tolist())


def test_what_is_no_index_or_has_other_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=naming("index")):
        load_index(str(tmp_path))
    folder = tmp_path / "index"
    build_index(str(folder), IDS, VECTORS)
    np.save(folder / "ids.npy", np.arange(3))
    with pytest.raises(CheckpointError, match=naming(NUM)):
        load_index(str(folder))
    np.save(folder / "ids.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(CheckpointError, match=naming("index")):
        load_index(str(folder))
    with pytest.raises(CheckpointError, match=naming("new")):
        build_index(str(folder), IDS, VECTORS)


WRONG: dict[str, tuple[Any, ...]] = {
    "an id twice": ([1, 1], np.ones((2, 3))),
    "too few ids": ([1], np.ones((2, 3))),
    "no items": ([], np.ones((0, 3))),
    "a nan": ([1], np.full((1, 3), np.nan)),
    "another kind": ([1], np.ones((1, 3)), "tree"),
    "another metric": ([1], np.ones((1, 3)), "exact", "hamming"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_indexed_is_an_error_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError):
        build_index(str(tmp_path / "index"), *WRONG[case])
    assert list(tmp_path.iterdir()) == []


OTHERS = ["faiss", "hnswlib"]


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("metric", METRICS)
def test_other_libraries_find_nearly_the_same(kind: Any, metric: Metric, tmp_path: Path) -> None:
    imported(kind)
    for name, own in (("index", kind), ("exact", "exact")):
        build_index(str(tmp_path / name), IDS, VECTORS, own, metric)
    found, expected = (load_index(str(tmp_path / name)).search(VECTORS, 10) for name in ("index", "exact"))
    shared = [len(set(a) & set(b)) for a, b in zip(found.ids.tolist(), expected.ids.tolist(), strict=True)]
    assert np.mean(shared) > 9.5
    np.testing.assert_allclose(found.scores[:, 0], expected.scores[:, 0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_library_that_is_missing_is_named(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(MissingPackage, match=naming(kind, "torchfleet[index]")):
        build_index(str(tmp_path / "index"), IDS, VECTORS, kind)
    assert list(tmp_path.iterdir()) == []


def test_a_table_is_exported_as_an_index_and_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = TableSpec("items", dim=DIM, rule=Rule("adam", lr=0.1))
    with in_process(2) as made:
        client = made.client()
        client.create_table(items)
        state = np.ones((NUM, 2 * DIM), np.float32)
        client.assign("items", IDS, np.concatenate([VECTORS, state], axis=1))
        save(client, [items], str(tmp_path / "model"), True)
    model, folder = str(tmp_path / "model"), str(tmp_path / "index")
    assert (
        command.main(["export", model, "--table", "items", "--index", "exact", "--metric", "ip", "--out", folder]) == 0
    )
    assert names(capsys.readouterr().out, NUM, "'items'", folder)
    assert command.main(["nearest", folder, "--id", str(IDS[7]), "--top", "3", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["ids"] == load_index(folder).neighbours(IDS[7:8], 3).ids[0].tolist()
    assert command.main(["nearest", folder, "--vector", "1,0,0,0", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == load_index(folder).search([[1, 0, 0, 0]], 2).ids[0].tolist()
    assert command.main(["nearest", folder, "--string", "nothing"]) == 1
    assert command.main(["export", model, "--table", "items", "--metric", "ip", "--out", folder]) == 1
    assert command.main(["export", model, "--index", "exact", "--out", f"{folder}2"]) == 1
    assert command.main(["export", model, "items", folder, "--index", "exact", "--with_state"]) == 1
