"""Features belong to the model: a job gives them once, its saves carry them, and jobs that go on from one keep them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import clean_facade
from support.messages import naming
from support.paths import SUPPORT

import torchfleet as fleet
from torchfleet import online
from torchfleet.base.errors import CheckpointError, ModelError

CITY = fleet.Feature("city", vocabulary=["Berlin", "Paris"])
PRICE = fleet.Feature("price", buckets=[1.0, 2.5], missing=3)
FEATURES = [CITY, PRICE]
OTHER_CITY = fleet.Feature("city", vocabulary=["Berlin", "Rome"])


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with clean_facade():
        yield


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleDict({name: fleet.nn.SparseEmbedding(2, name=name) for name in ("city", "price")})

    def forward(self, city: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.tables["city"](city) + self.tables["price"](price)).sum(dim=(1, 2))
        return found


def begin(load: Path | None = None, features: list[fleet.Feature] | None = None) -> torch.nn.Module:
    """A job of one process, after one step."""
    fleet.init()
    model = fleet.distributed_model(Model(), features=features)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker(None if load is None else str(load))
    model(torch.tensor([[1]]), torch.tensor([[2]])).sum().backward()
    optimizer.step()
    return model


def served(folder: Path) -> dict[str, Any]:
    """By feature: what `fleet serve` knows of it."""
    (found,) = folder.rglob("serving.json") if not (folder / "serving.json").exists() else [folder / "serving.json"]
    return {
        feature["name"]: (feature.get("vocabulary"), feature.get("buckets"), feature.get("missing"))
        for feature in json.loads(found.read_text())["features"]
    }


ALL = {"city": (["Berlin", "Paris"], None, None), "price": (None, [1.0, 2.5], 3)}


def saved_with_features(folder: Path) -> Path:
    begin(features=FEATURES)
    fleet.save_persistables(str(folder))
    fleet.stop_worker()
    assert served(folder) == ALL
    return folder


@pytest.mark.slow
def test_a_job_that_goes_on_keeps_the_features_in_all_its_saves(tmp_path: Path) -> None:
    first = saved_with_features(tmp_path / "first")
    begin(first)
    fleet.save_persistables(str(first), mode=1)
    fleet.save_persistables(str(tmp_path / "second"))
    fleet.save_inference_model(str(tmp_path / "third"))
    fleet.stop_worker()
    begin(tmp_path / "second", FEATURES)  # they may be given again
    fleet.save_persistables(str(tmp_path / "fourth"))
    for name in ("second", "third", "fourth"):
        assert served(tmp_path / name) == ALL


@pytest.mark.slow
def test_features_that_a_save_was_given_belong_to_the_model_from_then_on(tmp_path: Path) -> None:
    begin()
    fleet.save_inference_model(str(tmp_path / "one"), features=FEATURES)
    fleet.save_persistables(str(tmp_path / "two"))
    assert served(tmp_path / "one") == served(tmp_path / "two") == ALL
    with pytest.raises(ModelError, match=naming("city", "Rome", "replace_features")):
        fleet.save_inference_model(str(tmp_path / "one"), features=[OTHER_CITY])


@pytest.mark.slow
def test_a_job_with_other_features_than_those_of_its_save_is_refused(tmp_path: Path) -> None:
    folder = saved_with_features(tmp_path / "saved")
    with pytest.raises(ModelError, match=naming("city", "Paris", "Rome", "replace_features")):
        begin(folder, [OTHER_CITY])


@pytest.mark.slow
def test_a_save_that_would_lose_features_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = saved_with_features(tmp_path / "saved")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    begin()
    with pytest.raises(ModelError, match=naming("city", "price", folder, "replace_features")):
        fleet.save_persistables(str(folder))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    fleet.save_persistables(str(tmp_path / "elsewhere"))


@pytest.mark.slow
def test_features_are_replaced_where_that_is_said(tmp_path: Path) -> None:
    folder = saved_with_features(tmp_path / "saved")
    begin(folder)
    fleet.replace_features([OTHER_CITY])
    fleet.save_persistables(str(folder))
    fleet.stop_worker()
    expected = {"city": (["Berlin", "Rome"], None, None), "price": (None, None, None)}
    assert served(folder) == expected
    begin(folder)
    fleet.save_persistables(str(folder), mode=1)
    assert served(folder) == expected


@pytest.mark.slow
def test_a_feature_that_is_no_input_is_refused_at_the_first_call() -> None:
    with pytest.raises(ModelError, match=naming("town", "city", "price")):
        begin(features=[CITY, fleet.Feature("town")])


@pytest.mark.slow
def test_prepare_takes_features_too(tmp_path: Path) -> None:
    model = Model()
    model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), features=FEATURES)
    model(torch.tensor([[1]]), torch.tensor([[2]]))
    fleet.save_persistables(str(tmp_path / "saved"))
    assert served(tmp_path / "saved") == ALL


class Hours:
    """Three parts of one day."""

    def next(self, position: Any) -> online.Part | None:
        hour = 0 if position is None else position + 1
        return online.Part(f"20261115/{hour:02}", 1e9 + 3600 * hour, "20261115", hour, hour) if hour < 3 else None

    def is_over(self, position: Any) -> bool:
        return True

    def files_of(self, part: online.Part, worker: int, num_workers: int) -> list[str]:
        return []

    def done(self, part: online.Part) -> None:
        pass


@pytest.mark.slow
def test_an_endless_job_keeps_them_in_full_saves_and_deltas(tmp_path: Path) -> None:
    """Its second life does not give them again."""
    for life, features in enumerate([FEATURES, None]):
        fleet.init()
        model = fleet.distributed_model(Model(), features=features)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fleet.init_worker(online.model_to_load(str(tmp_path)))

        def train(part: online.Part, files: list[str], model: Any = model, optimizer: Any = optimizer) -> None:
            model(torch.tensor([[1]]), torch.tensor([[part.hour]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        reports = online.train_passes(Hours(), str(tmp_path), train, max_passes=1 + life)
        assert [report.deltas for report in reports] == ([0], [1, 2])[life]
        fleet.stop_worker()
        assert served(tmp_path) == ALL


def test_wrong_features_are_refused() -> None:
    fleet.init()
    for wrong in ("city", CITY, [CITY, CITY], ["city"]):
        with pytest.raises(ModelError, match=naming("features")):
            fleet.distributed_model(Model(), features=wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_save_from_before_brings_its_features(tmp_path: Path) -> None:
    """It has them beside its network only; the next save has them in its manifest, too."""

    class Former(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("city", "price", "user")
            self.tables = torch.nn.ModuleDict({name: fleet.nn.SparseEmbedding(2, name=name) for name in names})

        def forward(self, city: torch.Tensor, price: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
            ids = {"city": city, "price": price, "user": user}
            found: torch.Tensor = sum(self.tables[name](ids[name]).sum(dim=(1, 2)) for name in ids)
            return found

    def go_on(folder: str) -> None:
        fleet.init()
        model = fleet.distributed_model(Former())
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fleet.init_worker(folder)
        model(*[torch.tensor([[1]])] * 3)

    go_on(str(SUPPORT / "recorded" / "served"))
    fleet.save_persistables(str(tmp_path / "next"))
    fleet.stop_worker()
    expected = {"city": (["Berlin", "Paris"], None, None), "price": (None, [0.1, 0.7, 1.1], None)}
    assert served(tmp_path / "next") == {**expected, "user": (None, None, None)}
    (user,) = (one for one in json.loads(next(tmp_path.rglob("serving.json")).read_text())["features"][2:])
    assert (user["hash_size"], user["hash_seed"]) == (1000, 7)


def of_ranks(load: Path | None = None, features: list[fleet.Feature] | None = None) -> None:
    fleet.init(is_collective=True)
    model = fleet.distributed_model(torch.nn.Linear(2, 1), features=features)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if load is not None:
        fleet.load(str(load))


@pytest.mark.slow
def test_a_collective_job_keeps_features_alike(tmp_path: Path) -> None:
    of_ranks(features=FEATURES)
    fleet.save(str(tmp_path / "one"))
    fleet.reset()
    of_ranks(tmp_path / "one")
    fleet.save(str(tmp_path / "two"))
    fleet.reset()
    with pytest.raises(ModelError, match=naming("city", "Paris", "Rome", "replace_features")):
        of_ranks(tmp_path / "two", [OTHER_CITY])
    fleet.reset()
    of_ranks()
    with pytest.raises(CheckpointError, match=naming("city", "price", tmp_path / "two")):
        fleet.save(str(tmp_path / "two"))
    fleet.replace_features([])
    fleet.save(str(tmp_path / "two"))
    fleet.reset()
    of_ranks(tmp_path / "two", [OTHER_CITY])
    fleet.reset()
