"""A file of features: training reads words, numbers and crosses as a request for the saved model does."""

from __future__ import annotations

import bisect
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import one_worker, sgd
from support.messages import naming
from support.saved_source import SavedModel

import torchfleet as fleet
from torchfleet.api.serving.description import read_description
from torchfleet.apps.serve.endpoints.inference_protocol import InferenceProtocol
from torchfleet.apps.serve.network import GraphNetwork
from torchfleet.apps.serve.samples import Joiner
from torchfleet.base.errors import DataError
from torchfleet.base.storage import Storage
from torchfleet.data import FeatureFile, Ragged
from torchfleet.data.feature_file import Cross
from torchfleet.data.features import Feature

TEXT = """
[[feature]]
name = "city"
vocabulary = ["Berlin", "Paris", "Köln"]

[[feature]]
name = "age"
buckets = [18, 30, 50.5]

[[feature]]
name = "user"
hash_size = 1000
hash_seed = 7

[[feature]]
name = "price"
dtype = "float32"
shape = [1]
default = [1.5]

[[cross]]
name = "city_age"
of = ["city", "age"]
size = 500
"""
CITIES, AGES, USERS = ["Paris", "Rome", "Köln", "Berlin"], [17.9, 18.0, 99.0, 30.0], ["u1", "u2", "u1", ""]
COLUMNS = {"city": CITIES, "age": AGES, "user": USERS}
BODY = {
    "feature": [
        {"name": "city", "vocabulary": ["Berlin", "Paris", "Köln"]},
        {"name": "age", "buckets": [18, 30, 50.5]},
        {"name": "user", "hash_size": 1000, "hash_seed": 7},
        {"name": "price", "dtype": "float32", "shape": [1], "default": [1.5]},
    ],
    "cross": [{"name": "city_age", "of": ["city", "age"], "size": 500}],
}


@pytest.fixture
def file(tmp_path: Path) -> FeatureFile:
    (tmp_path / "features.json").write_text(json.dumps(BODY))
    return fleet.data.read_features(tmp_path / "features.json")


def test_columns_become_places_in_the_vocabulary_buckets_and_hashes(file: FeatureFile) -> None:
    found = file.tensors(COLUMNS)
    assert found["city"].tolist() == [2, 0, 3, 1]
    assert found["age"].tolist() == [bisect.bisect_right([18, 30, 50.5], age) for age in AGES] == [0, 1, 3, 2]
    assert found["user"].tolist() == [fleet.hash_string(user, seed=7) % 1000 for user in USERS]
    assert found["price"].tolist() == [[1.5]] * 4
    assert [file.num_ids(name) for name in ("city", "age", "user", "city_age")] == [4, 4, 1000, 500]
    arrays = file.tensors({"city": np.array(CITIES), "age": np.array(AGES), "user": np.array(USERS, object)})
    assert all(torch.equal(arrays[name], found[name]) for name in found)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11, which reads TOML")
def test_toml_and_json_are_the_same_file(file: FeatureFile, tmp_path: Path) -> None:
    (tmp_path / "features.toml").write_text(TEXT)
    assert fleet.data.read_features(tmp_path / "features.toml") == file


def test_crosses_tell_combinations_apart(file: FeatureFile) -> None:
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    found = file.crossed({"city": pairs[:, 0], "age": pairs[:, 1]})["city_age"]
    assert found.min() >= 0
    assert found.max() < 500
    assert len(found.unique()) >= 14  # of 16, in 500 places
    swapped = file.crossed({"city": pairs[:, 1], "age": pairs[:, 0]})["city_age"]
    assert not torch.equal(found, swapped)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"feature": [{"name": "a", "vocabulary": ["x"], "hash_size": 5}]}, "hash_size"),
        ({"feature": [{"name": "a", "buckets": [2, 1]}]}, "buckets"),
        ({"feature": [{"name": "a", "vocabulary": ["x", "x"]}]}, "vocabulary"),
        ({"feature": [{"name": "a", "dtype": "float32", "buckets": [1]}]}, "float32"),
        ({"feature": [{"name": "a"}, {"name": "a"}]}, "a"),
        ({"feature": [{"name": "a"}], "cross": [{"name": "c", "of": ["a", "b"], "size": 5}]}, "b"),
        ({"feature": [{"name": "a"}], "cross": [{"name": "c", "of": ["a"], "size": 5}]}, "c"),
        ({"feature": [{"name": "a", "colour": 1}]}, "colour"),
        ({"features": []}, "features"),
    ],
)
def test_a_wrong_file_is_refused_by_name(body: dict[str, object], named: str, tmp_path: Path) -> None:
    (tmp_path / "features.json").write_text(json.dumps(body))
    with pytest.raises(DataError, match=naming(named)):
        fleet.data.read_features(tmp_path / "features.json")


def test_wrong_columns_are_refused(file: FeatureFile) -> None:
    with pytest.raises(DataError, match=naming("user")):
        file.tensors({"city": CITIES, "age": AGES})
    with pytest.raises(DataError, match=naming("price")):
        file.tensors({**COLUMNS, "price": ["dear"] * 4})
    with pytest.raises(DataError, match=naming("city")):
        file.tensors({**COLUMNS, "city": [0.5] * 4})


def file_of(*features: Feature, **more: Any) -> FeatureFile:
    return FeatureFile(list(features), **more)


def test_crosses_are_the_same_whether_a_column_or_the_default_gives_the_values() -> None:
    file = file_of(Feature("a"), Feature("b", default=[7]), crosses=[Cross("both", ["a", "b"], 500)])
    absent, given = (file.tensors({"a": [1, 2, 3], **more}) for more in ({}, {"b": [7, 7, 7]}))
    assert absent["b"].tolist() == [7, 7, 7]
    assert file.crossed(absent)["both"].shape == (3,)
    assert torch.equal(file.crossed(absent)["both"], file.crossed(given)["both"])


def test_a_cross_of_features_of_different_dimensions_is_refused() -> None:
    file = file_of(Feature("a"), Feature("b", shape=[1]), crosses=[Cross("both", ["a", "b"], 500)])
    with pytest.raises(DataError, match=naming("both", [1, 2], "a", "b")):
        file.crossed(file.tensors({"a": [1, 2, 3], "b": [7, 7, 7]}))


@pytest.mark.parametrize("shape", [[], [1], [2, 3]])
def test_features_with_a_shape_have_it_from_columns_and_from_defaults(shape: list[int]) -> None:
    size = math.prod(shape)
    file = file_of(Feature("n"), Feature("x", "float32", shape, default=list(range(size))))
    column = np.tile(np.arange(size, dtype=np.float32), (2, 1)).reshape((2,) if size == 1 else (2, *shape))
    absent, given = (file.tensors({"n": [1, 2], **more})["x"] for more in ({}, {"x": column}))
    assert given.shape == (2, *shape)
    assert torch.equal(absent, given)
    with pytest.raises(DataError, match=naming("x", [2, *shape], [2, 5])):
        file.tensors({"n": [1, 2], "x": np.zeros((2, 5))})


def test_a_default_of_several_values_is_a_row_per_sample() -> None:
    assert file_of(Feature("x", default=[4, 5])).tensors({"other": [0, 0]})["x"].tolist() == [[4, 5], [4, 5]]


def test_the_number_of_samples_is_needed_also_if_all_features_have_defaults() -> None:
    with pytest.raises(DataError, match=naming("column")):
        file_of(Feature("x", default=[1])).tensors({})


class Model(torch.nn.Module):
    def __init__(self, file: FeatureFile) -> None:
        super().__init__()
        self.file = file
        self.tables = torch.nn.ModuleDict(
            {
                name: fleet.nn.SparseEmbedding(2, name=name, num_embeddings=file.num_ids(name))
                for name in ("city", "age", "user", "city_age")
            }
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = {name: batch[name] for name in ("city", "age", "user")}
        ids |= self.file.crossed(ids)
        found: torch.Tensor = sum(self.tables[name](ids[name]) for name in self.tables).sum(1) * batch["price"].sum(1)
        return found


@pytest.mark.slow
def test_a_request_with_words_and_numbers_gets_what_the_trained_model_says(file: FeatureFile, tmp_path: Path) -> None:
    batch = file.tensors(COLUMNS)
    with one_worker(Model(file), lambda made: sgd(made, 0.1)) as part:
        for _ in range(3):
            part.model(batch).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
        part.worker.describer.describe([feature for feature in file.features if feature.name != "price"])
        part.worker.save(str(tmp_path / "model"), "full")
        part.model.eval()
        expected = part.model(batch).detach()
    described = read_description(Storage(str(tmp_path / "model")))
    inputs = [
        {"name": "city", "datatype": "BYTES", "shape": [4], "data": CITIES},
        {"name": "age", "datatype": "FP32", "shape": [4], "data": AGES},
        {"name": "user", "datatype": "BYTES", "shape": [4], "data": USERS},
        {"name": "price", "datatype": "FP32", "shape": [4, 1], "data": [1.5] * 4},
    ]
    protocol = InferenceProtocol(described, ["output"], 8)
    samples = protocol.decode(json.dumps({"inputs": inputs}).encode(), None).samples
    joined = Joiner(described.features).joined([samples])
    for name in ("city", "age", "user"):
        assert torch.equal(joined.values[name], batch[name])
    assert described.network is not None, described.reason
    found = GraphNetwork(described.network, described.features).run(
        joined, SavedModel(str(tmp_path / "model")).current()
    )
    torch.testing.assert_close(torch.from_numpy(found["output"]), expected)


def test_sequences_are_padded_behind_and_cut_before() -> None:
    ragged = Ragged(torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([0, 1, 1, 5]))
    ids, mask = ragged.padded(3, padding=9)
    assert ids.tolist() == [[1, 9, 9], [9, 9, 9], [3, 4, 5], [6, 9, 9]]
    assert torch.equal(mask, ids != 9)
    with pytest.raises(DataError, match=naming(0)):
        ragged.padded(0)
