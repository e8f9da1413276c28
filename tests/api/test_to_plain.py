"""fleet.to_plain: the same predictions in plain torch, by torch.export and by ONNX Runtime."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extras import imported, needs
from support.jobs import Net, fleet_optimizer, make_batch, one_worker, plain_optimizers, plain_step

import torchfleet
from torchfleet.api.plain_layers import KeyedEmbedding

SGD = fleet_optimizer("sgd", lr=0.1)
CLOSE = {"rtol": 0.0, "atol": 1e-6}


class Slots(torch.nn.Module):
    """Every way to call a SparseEmbedding, of tables with and without a declared size."""

    def __init__(self) -> None:
        super().__init__()
        self.any_id = torchfleet.nn.SparseEmbedding(4, name="any", padding_idx=0)
        self.mean = torchfleet.nn.SparseEmbedding(4, name="mean", padding_idx=5, pooling="mean")
        self.again = torchfleet.nn.SparseEmbedding(4, name="mean", pooling="mean")
        self.sized = torchfleet.nn.SparseEmbedding(3, num_embeddings=30, padding_idx=2, pooling="mean")
        self.empty = torchfleet.nn.SparseEmbedding(2, name="empty")
        self.largest = torchfleet.nn.SparseEmbedding(2, name="largest", padding_idx=5, pooling="max")
        self.norm = torch.nn.BatchNorm1d(35)
        self.out = torch.nn.Linear(35, 1)

    def forward(self, ids: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        small = ids.abs() % 30
        parts = [
            self.any_id(ids).sum(dim=1),
            self.mean((values, offsets)),
            self.again([ids, (values, offsets)]).flatten(1),
            self.sized([small, ids[:, 0].abs() % 30]).flatten(1),
            self.largest([ids, (values, offsets), ids[:, 1]]).flatten(1),
            self.any_id(values, offsets, per_sample_weights=(values % 7).float()),
            self.sized(values.abs() % 30, offsets),
        ]
        if not self.training:
            parts[-1] = parts[-1] + self.empty(ids[:, 0]).sum(dim=1, keepdim=True)
        return self.out(self.norm(torch.cat(parts, dim=1))).squeeze(1)


def inputs(seed: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Negative and very large ids, padding, repeated ones, empty bags at the beginning and at the end."""
    rng = np.random.default_rng(seed)
    known = np.array([-7, 0, 1, 2, 5, 17, 1 << 62, -(1 << 62), 40, 41, 42, 43])
    lengths = np.concatenate([[0], rng.integers(0, 4, size - 2), [0]])
    lengths[1] += 1
    ids, values = rng.choice(known, (size, 3)), rng.choice(known, lengths.sum())
    return torch.from_numpy(ids), torch.from_numpy(values), torch.from_numpy(np.cumsum(lengths) - lengths)


def train(part: Any, num: int = 5) -> None:
    for seed in range(num):
        part.model(*inputs(seed)).square().mean().backward()
        part.optimizer.step()
        part.optimizer.zero_grad()


def strange(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Ids that have no row among them."""
    ids, values, offsets = batch
    return torch.cat([ids[:, :2], ids[:, :1] + 1000], dim=1), torch.where(values == 5, 12345, values), offsets


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_plain_model_predicts_what_the_model_does_and_has_nothing_of_servers(mode: str, tmp_path: Path) -> None:
    with one_worker(Slots(), SGD, mode=mode, num_servers=2) as part:
        train(part)
        copied = copy.deepcopy(part.model)
        plain = torchfleet.to_plain(part.model)
        assert plain.training
        assert torch.equal(part.model.out.weight, plain.out.weight)
        part.model.eval()
        plain.eval()
        torchfleet.to_plain(copied.eval())  # of a copy, too
        with torch.no_grad():
            for batch in (inputs(99), strange(inputs(7))):
                torch.testing.assert_close(plain(*batch), part.model(*batch), **CLOSE)
        part.worker.save(str(tmp_path / "saved"), "inference")
        loaded = torchfleet.to_plain(torchfleet.load_inference_model(str(tmp_path / "saved"), Slots()))
        expected = plain(*inputs(99))
        assert torch.equal(loaded(*inputs(99)), expected)
    assert torch.equal(plain(*inputs(99)), expected)  # the servers are gone
    assert plain.mean.weight is plain.again.weight
    assert plain.any_id.ids.tolist() == sorted({-7, 1, 2, 5, 17, 1 << 62, -(1 << 62), 40, 41, 42, 43})
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    again = copy.deepcopy(plain)
    again.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True))
    assert not any(hooks for module in plain.modules() for name, hooks in vars(module).items() if "hooks" in name)


def test_what_was_torchs_is_that_again_and_trains_on() -> None:
    torch.manual_seed(0)
    with one_worker(Net(), SGD) as part:
        part.step(make_batch(0))
        plain = torchfleet.to_plain(part.model)
        kinds = {type(plain.items), type(plain.words), type(plain.tags)}
        assert kinds == {torch.nn.Embedding, torch.nn.EmbeddingBag}
        optimizers = plain_optimizers("sgd", plain, lr=0.1)
        for seed in range(1, 4):
            part.step(make_batch(seed))
            plain_step(plain, optimizers, make_batch(seed))
        for name, value in part.model.state_dict().items():
            torch.testing.assert_close(plain.state_dict()[name], value, **CLOSE)


def test_rows_of_any_ids_learn_and_ids_without_a_row_do_not() -> None:
    layer = KeyedEmbedding(torch.tensor([-3, 8]), torch.nn.Parameter(torch.ones(2, 2)), padding_idx=8)
    layer(torch.tensor([[8, -3], [9, -3]])).sum().backward()
    assert layer.weight.grad.tolist() == [[2.0, 2.0], [0.0, 0.0]]
    assert layer.index(torch.tensor([-4, -3, 0, 8, 9]))[1].tolist() == [False, True, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("to_onnx", [False, pytest.param(True, marks=pytest.mark.long)], ids=["torch", "onnx"])
def test_the_whole_model_is_exported_by_torch_and_to_onnx(to_onnx: bool, tmp_path: Path) -> None:
    """The tutorial about serving exports a model to ONNX, too."""
    with one_worker(Slots(), SGD) as part:
        train(part)
        plain = torchfleet.to_plain(part.model).eval()
        part.model.eval()
        with torch.no_grad():
            tries = [(batch, part.model(*batch)) for batch in (inputs(3), strange(inputs(4)), inputs(5, size=13))]
    size, num = torch.export.Dim("size", min=2), torch.export.Dim("num", min=2)
    shapes = ({0: size}, {0: num}, {0: size})
    exported = torch.export.export(plain, inputs(3), dynamic_shapes=shapes)
    for batch, expected in tries:
        torch.testing.assert_close(exported.module()(*batch), expected, **CLOSE)
    if not to_onnx:
        return
    needs("onnx", "onnxscript")
    onnxruntime = imported("onnxruntime")
    program = torch.onnx.export(exported, dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    for batch, expected in tries:
        fed = {name: tensor.numpy() for name, tensor in zip(names, batch, strict=True)}
        torch.testing.assert_close(torch.from_numpy(session.run(None, fed)[0]), expected, **CLOSE)
