"""Networks for other runtimes, made from a saved model alone: they predict as torch does, by names, for any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.extras import Late, needs
from support.grids import first_of
from support.jobs import Batch, fleet_optimizer, one_worker

import torchfleet as fleet
from torchfleet.apps.serve import network_export
from torchfleet.apps.serve.network_export import INPUTS, ExportedNetwork, export_onnx, export_program, export_triton
from torchfleet.apps.serve.plain_network import NetworkInput
from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.observe.commands.command import main

onnx = Late("onnx")
onnxruntime = Late("onnxruntime")
pytestmark = pytest.mark.slow  # torch.export takes seconds


class Ranker(torch.nn.Module):
    """Any ids, bags of equal length, ragged bags, and numbers; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.users = fleet.nn.SparseEmbedding(4, name="users", padding_idx=0)
        self.words = torch.nn.EmbeddingBag(30, 3, mode="mean", sparse=True)
        self.tags = fleet.nn.SparseEmbedding(2, name="tags")
        self.tower = torch.nn.Linear(4 + 3 + 2 + 5, 1)

    def looked_up(self, batch: Any) -> dict[str, torch.Tensor]:
        return {
            "users": self.users(batch["user"]),
            "words": self.words(batch["words"]),
            "tags": self.tags(batch["tags"]),
        }

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        score = self.tower(torch.cat([*self.looked_up(batch).values(), batch["x"]], dim=1)).squeeze(1)
        return {"score": score, "click": torch.sigmoid(score)}


def make_batch(seed: int, size: int) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, size)
    batch: dict[str, Any] = {
        "user": rng.integers(0, 50, size) << 40,
        "words": rng.integers(0, 30, (size, 4)),
        "x": rng.normal(size=(size, 5)).astype(np.float32),
    }
    made = {name: torch.from_numpy(value) for name, value in batch.items()}
    tags = torch.from_numpy(rng.integers(-20, 20, lengths.sum())), torch.from_numpy(np.cumsum(lengths) - lengths)
    return {**made, "tags": tags}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("export") / "ranker")
    with one_worker(Ranker(), fleet_optimizer("adagrad", lr=0.5), num_servers=2) as part:
        for seed in range(3):
            part.model(make_batch(seed, 16))["score"].square().mean().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
        part.worker.save(folder, "full")
    return folder


def given_to(network: Path, model: Any, batch: Any) -> dict[str, np.ndarray]:
    """The inputs that inputs.json names, for this batch."""
    found = {}
    for one in json.loads(network.read_text())["inputs"]:
        feature = one["features"][0]
        if one["kind"] == "rows":
            found[one["name"]] = model.looked_up(batch)[one["table"]]
        elif one["kind"] == "offsets" or feature == "tags":
            found[one["name"]] = batch[feature][one["kind"] == "offsets"]
        else:
            found[one["name"]] = batch[feature]
        found[one["name"]] = found[one["name"]].detach().numpy()
    return found


def as_given(inputs: dict[str, np.ndarray], shapes: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """Pooled rows with the dimension of slots, where the network takes it."""
    return {n: value.reshape(len(value), -1, *value.shape[1:]) if len(shapes[n]) > value.ndim else value
            for n, value in inputs.items()}  # fmt: skip


@pytest.mark.parametrize("given", first_of(["ids", "rows"]))
def test_onnxruntime_predicts_as_torch_does(folder: str, tmp_path: Path, given: Any) -> None:
    needs("onnx", "onnxscript", "onnxruntime")
    described = export_onnx(folder, str(tmp_path / "model.onnx"), given)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    stored = [one.raw_data for one in onnx.load(tmp_path / "model.onnx").graph.initializer if len(one.raw_data) > 64]
    assert len(stored) == len(set(stored))  # the keys of a table are there once
    assert [one.name for one in session.get_inputs()] == [one.name for one in described.inputs]
    assert [one.name for one in session.get_outputs()] == ["score", "click"]
    expected_names = {"ids": {"user", "words", "tags", "tags.offsets", "x"}, "rows": {"rows.users", "rows.words",
                      "rows.tags", "x"}}  # fmt: skip
    assert {one.name for one in described.inputs} == expected_names[given]
    model = fleet.load_inference_model(folder, Ranker())
    for seed, size in ((7, 1), (8, 40)):  # other sizes than were traced; ids that were never trained
        batch = make_batch(seed, size)
        inputs = as_given(given_to(tmp_path / INPUTS, model, batch), {one.name: one.shape for one in described.inputs})
        found = session.run(None, inputs)
        for output, expected in zip(found, model(batch).values(), strict=True):
            np.testing.assert_allclose(output, expected.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_a_program_of_torch_export_predicts_as_the_model_does(folder: str, tmp_path: Path) -> None:
    described = export_program(folder, str(tmp_path / "model.pt2"), "ids")
    program = torch.export.load(tmp_path / "model.pt2").module()
    model, batch = fleet.load_inference_model(folder, Ranker()), make_batch(9, 11)
    inputs = given_to(tmp_path / INPUTS, model, batch)
    found = program(*(torch.from_numpy(inputs[one.name]) for one in described.inputs))
    for output, expected in zip(found, model(batch).values(), strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_one_command_makes_a_triton_repository(folder: str, tmp_path: Path) -> None:
    needs("onnx", "onnxscript", "onnxruntime")
    repository = tmp_path / "repository"
    arguments = ["export", folder, "--triton", str(repository), "--inputs", "rows"]
    assert main(arguments) == 0
    assert main(arguments) == 1  # the version is there
    assert main([*arguments, "--version", "2"]) == 0
    made = sorted(str(path.relative_to(repository)) for path in repository.rglob("*.*"))
    assert [path for path in made if not path.endswith(".data")] == [
        "ranker/1/model.onnx",
        "ranker/2/model.onnx",
        "ranker/config.pbtxt",
        "ranker/inputs.json",
    ]
    text = (repository / "ranker" / "config.pbtxt").read_text()
    session = onnxruntime.InferenceSession(repository / "ranker" / "1" / "model.onnx")
    for tensor in (*session.get_inputs(), *session.get_outputs()):
        assert f'name: "{tensor.name}"' in text
    assert "max_batch_size: 4096" in text  # every input has one entry per sample


@pytest.mark.long
def test_ragged_features_are_not_batched_by_triton(folder: str, tmp_path: Path) -> None:
    needs("onnx", "onnxscript")
    export_triton(folder, str(tmp_path), "ranker", 1, "ids")
    text = (tmp_path / "ranker" / "config.pbtxt").read_text()
    assert "max_batch_size: 0" in text
    assert 'name: "words" data_type: TYPE_INT64 dims: [ -1, 4 ]' in text


def test_a_model_without_its_network_is_refused(folder: str, tmp_path: Path) -> None:
    with one_worker(Ranker(), fleet_optimizer("sgd", lr=0.1)) as part:
        part.worker.save(str(tmp_path / "model"), "full")  # it was never called
    with pytest.raises(CheckpointError):
        export_program(str(tmp_path / "model"), str(tmp_path / "model.pt2"), "ids")
    with pytest.raises(FleetError):
        export_triton(folder, str(tmp_path), "../outside", 1, "ids")


def test_versions_in_a_triton_repository_appear_whole_and_share_their_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file itself is written by a stand-in: what matters is when the folder of a version appears, and with what."""
    described, error = (
        ExportedNetwork([NetworkInput("x", "values", "float32", ["x"], shape=["samples", 2])], []),
        list[Exception](),
    )

    def write(folder: str, path: str, given: str) -> ExportedNetwork:
        Path(path).parent.mkdir(parents=True)
        Path(path).write_bytes(b"half")
        if error:
            raise error[0]
        (Path(path).parent / INPUTS).write_bytes(msgspec.json.encode(described))
        return described

    monkeypatch.setattr(network_export, "export_onnx", write)
    model = tmp_path / "ranker"
    error.append(OSError("no space"))
    with pytest.raises(OSError, match="no space"):
        export_triton("", str(tmp_path), "ranker", 1, "ids")
    assert list(model.iterdir()) == []
    error.clear()
    export_triton("", str(tmp_path), "ranker", 1, "ids")
    own = (model / "config.pbtxt").read_text() + "instance_group [ { count: 2 } ]\n"
    (model / "config.pbtxt").write_text(own)
    export_triton("", str(tmp_path), "ranker", 2, "ids")
    described.inputs[0].shape = ["samples", 3]
    with pytest.raises(CheckpointError):
        export_triton("", str(tmp_path), "ranker", 3, "ids")
    assert sorted(path.name for path in model.iterdir()) == ["1", "2", "config.pbtxt", INPUTS]
    assert (model / "config.pbtxt").read_text() == own
