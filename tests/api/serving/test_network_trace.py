"""A network that was saved as a graph computes what the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.jobs import one_worker, sgd
from support.messages import naming
from support.saved_source import SavedModel
from support.serving import Clicks, clicks_batch

import torchfleet as fleet
from torchfleet.api.infer import load_inference_model
from torchfleet.api.serving.description import ServingDescription, read_description
from torchfleet.apps.serve.network import GraphNetwork
from torchfleet.apps.serve.samples import Joiner, Samples
from torchfleet.base.errors import CheckpointError, ModelError
from torchfleet.base.storage import Storage
from torchfleet.data.features import Feature
from torchfleet.data.slots import Batch, Ragged

ROUNDED: dict[str, float] = {"rtol": 1e-6, "atol": 1e-6}  # weights lie by column: sums in another order


class Slots(torch.nn.Module):
    """Takes a batch of a dataset: ragged slots, each kind of pooling, ids that forward computes, a shared table."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = fleet.nn.SparseEmbedding(4, name="sums", padding_idx=3)
        self.mean = fleet.nn.SparseEmbedding(4, name="mean", pooling="mean", padding_idx=5)
        self.again = fleet.nn.SparseEmbedding(4, name="mean", pooling="mean")
        self.most = fleet.nn.SparseEmbedding(2, name="most", pooling="max")
        self.sized = fleet.nn.SparseEmbedding(3, num_embeddings=30)
        self.norm = torch.nn.BatchNorm1d(20)
        self.register_buffer("shift", torch.arange(2), persistent=False)
        self.out = torch.nn.Linear(20, 2)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        ids = batch["ids"] + self.shift * 100
        parts = [
            self.sums([batch["tags"], batch["ids"]]).flatten(1),
            self.mean(batch["tags"]),
            self.again(ids).mean(dim=1),
            self.most(batch["tags"]),
            self.sized(batch["ids"][:, 0] % 30) * batch["x"].sum(dim=1, keepdim=True),
        ]
        hidden = self.norm(torch.cat([*parts[:-1], parts[-1][:, :2]], dim=1))
        return {"logits": self.out(hidden), "score": torch.sigmoid(hidden.sum(dim=1))}


def slots_batch(num: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, num)
    lengths[0] = 0
    tags = Ragged(torch.from_numpy(rng.integers(0, 9, lengths.sum())), torch.from_numpy(np.cumsum(lengths) - lengths))
    ids, x = torch.from_numpy(rng.integers(0, 9, (num, 2))), torch.from_numpy(rng.random((num, 3), np.float32))
    return Batch({"tags": tags, "ids": ids, "x": x, "label": torch.zeros(num, 1, dtype=torch.int64)}, num)


def trained(model: torch.nn.Module, folder: Path, calls: list[tuple[Any, dict[str, Any]]], kind: str = "full") -> None:
    with one_worker(model, lambda made: sgd(made, 0.1)) as part:
        for args, kwargs in calls:
            found = part.model(*args, **kwargs)
            sum(value.sum() for value in (found.values() if isinstance(found, dict) else [found])).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
        part.worker.save(str(folder), kind)  # type: ignore[arg-type]


def samples_of(batch: Any, described: ServingDescription) -> Samples:
    made = Samples(batch.num_samples if isinstance(batch, Batch) else len(batch["ids"]), {})
    for feature in described.features:
        value = batch[feature.name]
        if isinstance(value, Ragged):
            made.values[feature.name] = value.values.numpy()
            made.lengths[feature.name] = np.diff(np.append(value.offsets.numpy(), len(value.values)))
        else:
            made.values[feature.name] = value.flatten().tolist()
    return made


@pytest.mark.slow
def test_a_graph_of_slots_computes_what_the_model_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained(Slots(), tmp_path, [((slots_batch(8, seed),), {}) for seed in range(4)])
    described = read_description(Storage(str(tmp_path)))
    assert described.reason == ""
    assert [feature.name for feature in described.features] == ["tags", "ids", "x"]  # the label is not used
    assert described.features[0] == Feature("tags", "int64", None, default=[])
    network, source = GraphNetwork(described.network, described.features), SavedModel(str(tmp_path))
    plain = load_inference_model(str(tmp_path), Slots())
    for num in (1, 2, 7):
        batch = slots_batch(num, 100 + num)
        found = network.run(Joiner(described.features).joined([samples_of(batch, described)]), source.current())
        with torch.no_grad():
            expected = plain(batch)
        assert list(found) == ["logits", "score"]
        for name, values in expected.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), values, **ROUNDED)


@pytest.mark.slow
def test_a_graph_of_tensors_computes_what_the_model_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained(Clicks(), tmp_path, [((), clicks_batch(8, seed)) for seed in range(3)], "inference")
    described = read_description(Storage(str(tmp_path)))
    assert described.call == "arguments"
    network, source = GraphNetwork(described.network, described.features), SavedModel(str(tmp_path))
    joiner, batches = Joiner(described.features), [clicks_batch(num, num) for num in (3, 1, 5)]
    found = network.run(joiner.joined([samples_of(batch, described) for batch in batches]), source.current())
    plain = load_inference_model(str(tmp_path), Clicks())
    with torch.no_grad():
        expected = torch.cat([plain(**batch) for batch in batches])
    torch.testing.assert_close(torch.from_numpy(found["output"]), expected, rtol=0, atol=1e-6)


class Branches(Clicks):
    """Cannot be traced: which way it goes depends on a value."""

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(ids, x)
        return out if x.sum().item() > 0 else -out


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_is_saved_with_the_reason(tmp_path: Path) -> None:
    trained(Branches(), tmp_path, [((), clicks_batch(8))])
    described = read_description(Storage(str(tmp_path)))
    assert described.network is None
    assert "torch.export" in described.reason
    assert [feature.name for feature in described.features] == ["ids", "x"]
    assert fleet.load_inference_model(str(tmp_path), Branches())(**clicks_batch(2)).shape == (2,)


def test_a_model_that_was_not_called_has_no_description(tmp_path: Path) -> None:
    trained(Clicks(), tmp_path, [])
    with pytest.raises(CheckpointError):
        read_description(Storage(str(tmp_path)))


@pytest.mark.slow
def test_features_that_the_user_describes_are_saved(tmp_path: Path) -> None:
    with one_worker(Clicks(), lambda made: sgd(made, 0.1)) as part:
        part.model(**clicks_batch(4))
        with pytest.raises(ModelError):
            part.worker.describer.describe([Feature("city")])
        part.worker.describer.describe([Feature("ids", hash_seed=7, hash_size=1000, default=[1, 2])])
        part.worker.save(str(tmp_path), "full")
        part.worker.save(str(tmp_path), "delta")
    found = read_description(Storage(str(tmp_path))).features[0]
    assert found == Feature("ids", "int64", [2], 7, 1000, [1, 2])


def test_a_folder_without_a_model_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=naming(tmp_path / "none", "manifest.json")):
        read_description(Storage(str(tmp_path / "none")))


def test_a_damaged_description_is_refused(tmp_path: Path) -> None:
    trained(Clicks(), tmp_path, [])
    description = tmp_path / "save-000001" / "serving.json"
    for body in (b"", b"{}", b"[" * 100_000, b'{"features": [], "call": "batch", "format": "other"}'):
        description.write_bytes(body)
        with pytest.raises(CheckpointError, match=naming("save-000001", "serving.json")):
            read_description(Storage(str(tmp_path)))
    good = ServingDescription([Feature("a", shape=[1])], "batch")
    description.write_bytes(msgspec.json.encode(good))
    assert read_description(Storage(str(tmp_path))) == good
