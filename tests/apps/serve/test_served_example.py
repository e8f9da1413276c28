"""examples/ctr_dnn, saved and served as it stands: fields, strings and raw lines give what the model predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.example_scripts import printed

import torchfleet as fleet
from examples.ctr_dnn.model import CTRDNN
from torchfleet.apps.serve.endpoints.inference_protocol import InferenceProtocol
from torchfleet.apps.serve.served_model import ServedModel
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.data.features import TextSamples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ctr")
    printed("ctr_dnn/prepare.py", "--rows", 2000, "--parts", 2, "--out", made / "data")
    options = ("--data", made / "data", "--epochs", 1, "--embedding_lr", "1e-2", "--print_period", 0)
    printed("ctr_dnn/train.py", *options, "--save", made / "model")
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    return ServedModel(ServeSettings(str(folder / "model")).checked())


def served(model: ServedModel, inputs: list[dict[str, Any]]) -> torch.Tensor:
    protocol = InferenceProtocol(model.described, ["output"], 1024)
    request = protocol.decode(json.dumps({"inputs": inputs}).encode(), None)
    (result,) = model.predictor.predict([request.samples])
    if isinstance(result, Exception):
        raise result
    return torch.from_numpy(result[1]["output"])


def test_lines_fields_and_strings_give_the_model_s_predictions(folder: Path, model: ServedModel) -> None:
    lines = next((folder / "data" / "test").glob("part-*")).read_bytes().splitlines()[:20]
    assert model.described.text is not None
    batch = TextSamples(model.described.text).batch(lines)
    with torch.no_grad():
        expected = fleet.load_inference_model(str(folder / "model"), CTRDNN())(batch)
    close = {"rtol": 0, "atol": 1e-6}
    text = [{"name": "text", "datatype": "BYTES", "shape": [20], "data": [line.decode() for line in lines]}]
    torch.testing.assert_close(served(model, text), expected, **close)
    dense = {"name": "dense_input", "datatype": "FP32", "shape": [20, 13]}
    inputs = [{**dense, "data": batch["dense_input"].flatten().tolist()}]
    strings = list(inputs)
    for column in range(1, 27):
        field = {"name": f"C{column}", "shape": [20, 1]}
        inputs.append({**field, "datatype": "INT64", "data": batch[f"C{column}"].flatten().tolist()})
        raw = [line.split(b"\t")[13 + column].decode() for line in lines]
        if any(raw):  # a column that is empty everywhere is left out: its default is that of an empty field
            strings.append({**field, "datatype": "BYTES", "data": raw})
    torch.testing.assert_close(served(model, inputs), expected, **close)
    torch.testing.assert_close(served(model, strings), expected, **close)


def test_the_label_is_no_input(model: ServedModel) -> None:
    names = [feature.name for feature in model.described.features]
    assert "label" not in names
    assert len(names) == 27
    assert model.metadata()["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 2]}]
    assert np.isfinite(model.version.created)
