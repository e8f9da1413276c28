"""Networks of common layers are traced, and compute in a saved graph what the module computes; attacks are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.jobs import one_worker, sgd
from support.serving import Clicks, clicks_batch
from torch import nn
from torch.nn import functional

from torchfleet.api.serving.description import ServingDescription, read_description
from torchfleet.api.serving.model_inputs import ModelInputs, inputs_of
from torchfleet.api.serving.network_graph import GraphOutput, Node
from torchfleet.api.serving.network_trace import traced
from torchfleet.apps.serve.network_export import export_program
from torchfleet.apps.serve.plain_network import PlainNetwork
from torchfleet.apps.serve.served_model import ServedModel
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.errors import CheckpointError, ModelError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.worker.lookup.dense_group import saved_tensors


class First(nn.Module):
    """The first result of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)[0]
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x, x, x, need_weights=False)[0]
        return found + functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 0] = 1
    y[y > 0.5] = 2
    y[:, 1:2] += 3
    return y.masked_fill_(y < 0.1, 0)


def of_all_kinds(x: torch.Tensor) -> torch.Tensor:
    ids = (x.abs() * 3).long() % 5
    parts = [
        functional.pad(x, (1, 2)),
        functional.one_hot(ids, 5).float().flatten(1),
        torch.einsum("bi,bj->bij", x, x).flatten(1),
        functional.normalize(x),
        torch.linalg.norm(x, dim=1, keepdim=True),
        torch.gather(x, 1, ids % 4),
        x.index_select(1, torch.tensor([2, 0])),
        torch.zeros(x.shape[0], 5).scatter_add(1, ids, x),
        torch.where(torch.arange(x.shape[1]) > 1, x, -x),
        torch.fft.rfft(x).abs(),
        torch.bucketize(x, torch.tensor([0.0, 0.5])).float(),
        x.topk(2, dim=1).values,
        x.repeat(1, 2),
        functional.cosine_similarity(x, x.roll(1, 1)).unsqueeze(1),
        x.unflatten(1, (2, 2)).transpose(1, 2).reshape(x.shape[0], -1),
        x.masked_fill(x > 0, 0).cumsum(1).clamp(-1, 1),
    ]
    return torch.cat(parts, dim=1)


PICTURE, SEQUENCE, ROW = (2, 8, 8), (7, 8), (4,)
CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(),
    nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.SiLU(), nn.Upsample(scale_factor=2, mode="bilinear"),
    nn.InstanceNorm2d(4), nn.ConvTranspose2d(4, 2, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3),
)  # fmt: skip
NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "convolutions": (CONVOLUTIONS, PICTURE),
    "weight norm": (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.GELU()), ROW),
    "norms": (nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4), nn.BatchNorm1d(4), nn.PReLU(), nn.Softplus()), ROW),
    "lstm": (First(nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True)), SEQUENCE),
    "gru": (First(nn.GRU(8, 5, 2, batch_first=True)), SEQUENCE),
    "rnn": (First(nn.RNN(8, 5, batch_first=True)), SEQUENCE),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), SEQUENCE),
    "attention": (Attention(), SEQUENCE),
    "in place": (Function(in_place), ROW),
    "all kinds": (Function(of_all_kinds), ROW),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_saved_graph_computes_what_the_module_does(name: str) -> None:
    torch.manual_seed(0)
    model, shape = NETWORKS[name]
    inputs = inputs_of(model.eval(), (torch.randn(4, *shape),), {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = traced(model, inputs)
    network = PlainNetwork(_described(inputs, graph), saved_tensors(model), {})
    for num in (1, 6):
        x = torch.randn(num, *shape)
        with torch.no_grad():
            (found,) = network(x)
            torch.testing.assert_close(found, model(x))


def _described(inputs: ModelInputs, graph: Any) -> ServingDescription:
    return ServingDescription(list(inputs.features), "arguments", graph)


@pytest.mark.slow
def test_a_network_with_another_operation_is_saved_without_its_graph(tmp_path: Path) -> None:
    class Determinant(Clicks):
        def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return super().forward(ids, x) + torch.linalg.det(torch.diag_embed(x))

    saved(Determinant(), tmp_path)
    described = read_description(Storage(str(tmp_path)))
    assert described.network is None
    assert "linalg_det" in described.reason
    with pytest.raises(CheckpointError):
        ServedModel(settings(tmp_path))


def saved(model: nn.Module, folder: Path) -> None:
    with one_worker(model, lambda made: sgd(made, 0.1)) as part:
        part.model(**clicks_batch(4, 0)).sum().backward()
        part.optimizer.step()
        part.worker.save(str(folder), "full")


def settings(folder: Path) -> ServeSettings:
    return ServeSettings(model=str(folder), name="m")


def value(number: int) -> dict[str, int]:
    return {"value": number}


def ones(size: list[int]) -> tuple[str, list[Any]]:
    return "aten.ones.default", [{"list": size}]


ATTACKS: dict[str, list[tuple[str, list[Any]]]] = {
    "writes beyond a tensor": [
        ones([1, 1, 2, 2]),
        ("aten.full.default", [{"list": [1, 1, 1, 1]}, 1 << 40]),
        ("aten.max_pool2d_with_indices_backward.default", [value(1), value(0), {"list": [2, 2]}, {"list": [2, 2]},
         {"list": [0, 0]}, {"list": [1, 1]}, False, value(1)]),
    ],
    "reads freed memory": [("aten.empty.memory_format", [{"list": [1024]}])],
    "reads behind a tensor": [ones([4]), ("aten.segment_reduce.default", [value(0), "sum"])],
    "saves a file": [ones([4]), ("aten.save.default", [value(0), "/tmp/x"])],
    "takes all memory": [ones([1 << 40])],
    "short statistics": [
        ones([2, 64]),
        ones([2]),
        ("aten._native_batch_norm_legit_no_training.default", [value(0), None, None, value(1), value(1), 0.1, 1e-5]),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    saved(Clicks(), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_by_serving_and_export(name: str, clicks: Path, tmp_path: Path) -> None:
    (place,) = clicks.glob("save-*/serving.json")
    body = place.read_bytes()
    found = read_description(Storage(str(clicks)))
    assert found.network is not None
    first = found.network.num_given + len(found.network.nodes)
    nodes = [Node(op, [_moved(arg, first) for arg in args]) for op, args in ATTACKS[name]]
    outputs = [*found.network.outputs, GraphOutput("more", first + len(nodes) - 1, "float32", [])]
    network = msgspec.structs.replace(found.network, nodes=[*found.network.nodes, *nodes], outputs=outputs)
    place.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, network=network)))
    try:
        with pytest.raises((ModelError, RuntimeError)):
            ServedModel(settings(clicks))
        with pytest.raises((ModelError, RuntimeError)):
            export_program(str(clicks), str(tmp_path / "model.pt2"), "ids")
    finally:
        place.write_bytes(body)
    assert not (tmp_path / "model.pt2").exists()


def _moved(arg: Any, by: int) -> Any:
    """A number of a value that counts from the first node of the attack."""
    if not isinstance(arg, dict):
        return arg
    return {key: one + by if key == "value" else [_moved(part, by) for part in one] for key, one in arg.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "save-*/serving.json"])
def test_a_file_that_is_a_link_out_of_the_folder_is_not_read(name: str, clicks: Path, tmp_path: Path) -> None:
    (place,), elsewhere = clicks.glob(name), tmp_path / "elsewhere"
    body = place.read_bytes()
    elsewhere.write_bytes(body)
    place.unlink()
    place.symlink_to(elsewhere)
    try:
        with pytest.raises(CheckpointError):
            ServedModel(settings(clicks))
        with pytest.raises(CheckpointError):
            export_program(str(clicks), str(tmp_path / "model.pt2"), "ids")
        if name == "manifest.json":
            with pytest.raises(CheckpointError):
                read_manifest(Storage(str(clicks)))
    finally:
        place.unlink()
        place.write_bytes(body)
    ServedModel(settings(clicks)).close()
