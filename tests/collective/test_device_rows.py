"""Embeddings with tables on devices in a collective job of one rank, against plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import ModelError

NUM, DIM = 50, 8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.05),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the tables and the network of a job with one rank are."""
    monkeypatch.setenv("FLEET_DEVICE", request.param)
    fleet.init(is_collective=True)
    yield request.param
    fleet.stop_worker()


def here() -> str:
    """The device of the test."""
    return os.environ["FLEET_DEVICE"]


class Net(torch.nn.Module):
    """Ids of two columns, embedded by `embedding`, and a linear layer."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.head = torch.nn.Linear(2 * DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embedding(ids).flatten(1)).squeeze(1)
        return found


def nets(**settings: Any) -> tuple[Net, Net]:
    """(plain torch, with rows in a table), with equal first values."""
    torch.manual_seed(0)
    plain = Net(torch.nn.Embedding(NUM, DIM, sparse=True)).to(here())
    ours = Net(fleet.nn.SparseEmbedding(DIM, name="rows", device=here(), state="rows", **settings))
    ours.head.load_state_dict(plain.head.state_dict())
    keys = torch.arange(NUM)
    ours.embedding.load_state_dict({"keys": keys, "weight": plain.embedding.weight.detach()})  # type: ignore[union-attr]
    return plain, ours


def batches(num: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    random = np.random.default_rng(1)
    for _ in range(num):
        ids, targets = random.integers(0, NUM, (32, 2)), random.random(32, np.float32)
        yield torch.from_numpy(ids).to(here()), torch.from_numpy(targets).to(here())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_plain_torch(name: str) -> None:
    plain, ours = nets()
    model = fleet.distributed_model(ours)
    head = torch.optim.SGD(plain.head.parameters(), lr=0.05)
    rows = OPTIMIZERS[name](plain.embedding.parameters())
    own = {"SparseAdam": torch.optim.Adam, "Adagrad": torch.optim.Adagrad, "SGD": torch.optim.SGD}[name]
    groups = [{"params": model.embedding.parameters()}, {"params": model.head.parameters()}]
    if name != "SGD":  # one optimizer for all, so that the oracle's head has its rule, too
        head = own(plain.head.parameters(), lr=0.05)
    optimizer = fleet.distributed_optimizer(own(groups, lr=0.05))
    for ids, targets in batches():
        for net, steppers in ((plain, [head, rows]), (model, [optimizer])):
            F.mse_loss(net(ids), targets).backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
    torch.testing.assert_close(model.head.weight, plain.head.weight, rtol=0, atol=1e-6)
    found = model.state_dict()
    order = found["embedding.keys"].argsort()
    torch.testing.assert_close(
        found["embedding.weight"][order], plain.embedding.weight.detach().cpu(), rtol=0, atol=1e-6
    )


def test_torch_embeddings_move_to_a_table() -> None:
    """sparse=: the embeddings with sparse=True, and large ones; the others stay."""
    torch.manual_seed(0)
    plain = Net(torch.nn.Embedding(NUM, DIM, sparse=True)).to(here())
    ours = Net(torch.nn.Embedding(NUM, DIM, sparse=True))
    ours.load_state_dict(plain.state_dict())
    model = fleet.distributed_model(ours, sparse=here())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.05))
    oracle = [
        torch.optim.SparseAdam(plain.embedding.parameters(), lr=0.05),
        torch.optim.Adam(plain.head.parameters(), lr=0.05),
    ]
    for ids, targets in batches():
        for net, steppers in ((plain, oracle), (model, [optimizer])):
            F.mse_loss(net(ids), targets).backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
    torch.testing.assert_close(
        model.state_dict()["embedding.weight"], plain.embedding.weight.detach().cpu(), rtol=0, atol=1e-6
    )


def test_gradient_merge_updates_rows_once_by_the_mean() -> None:
    plain, ours = nets()
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    model = fleet.distributed_model(ours, strategy)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    oracle = torch.optim.SGD(plain.parameters(), lr=0.05)
    for number, (ids, targets) in enumerate(batches(4)):
        (F.mse_loss(plain(ids), targets) / 2).backward()
        if number % 2:
            oracle.step()
            oracle.zero_grad()
        F.mse_loss(model(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = model.state_dict()
    order = found["embedding.keys"].argsort()
    torch.testing.assert_close(
        found["embedding.weight"][order], plain.embedding.weight.detach().cpu(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3])
def test_bags_equal_those_of_torch(pooling: str, padding: int | None) -> None:
    torch.manual_seed(0)
    plain = torch.nn.EmbeddingBag(NUM, DIM, mode=pooling, padding_idx=padding).to(here())
    ours = fleet.nn.SparseEmbedding(DIM, name="rows", device=here(), state="rows", pooling=pooling, padding_idx=padding)
    ours.load_state_dict({"keys": torch.arange(NUM), "weight": plain.weight.detach()})
    model = fleet.distributed_model(torch.nn.ModuleDict({"rows": ours}))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    oracle = torch.optim.SGD(plain.parameters(), lr=0.5)
    ids = torch.tensor([3, 1, 1, 7, 3, 9, 3, 3, 20], device=here())
    offsets = torch.tensor([0, 3, 3, 6, 8], device=here())
    block = torch.tensor([[1, 3, 2], [3, 3, 3], [5, 5, 6]], device=here())
    for found, expected in (
        (lambda: ours(ids, offsets), lambda: plain(ids, offsets)),
        (lambda: ours([block]).squeeze(1), lambda: plain(block)),
    ):
        out, wanted = found(), expected()
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-6)
        (out * torch.arange(1.0, DIM + 1, device=here())).sum().backward()
        (wanted * torch.arange(1.0, DIM + 1, device=here())).sum().backward()
        for stepper in (optimizer, oracle):
            stepper.step()
            stepper.zero_grad()
    torch.testing.assert_close(ours([block]).squeeze(1), plain(block), rtol=0, atol=1e-6)


def test_weights_per_sample_equal_those_of_torch() -> None:
    torch.manual_seed(0)
    plain = torch.nn.EmbeddingBag(NUM, DIM, mode="sum").to(here())
    ours = fleet.nn.SparseEmbedding(DIM, name="rows", device=here(), state="rows")
    ours.load_state_dict({"keys": torch.arange(NUM), "weight": plain.weight.detach()})
    model = fleet.distributed_model(torch.nn.ModuleDict({"rows": ours}))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    ids, offsets = torch.tensor([3, 1, 1, 7], device=here()), torch.tensor([0, 3], device=here())
    given = torch.rand(4, generator=torch.Generator().manual_seed(1))
    weights = [given.to(here()).clone().requires_grad_() for _ in range(2)]
    out, wanted = ours(ids, offsets, weights[0]), plain(ids, offsets, weights[1])
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-6)
    out.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=0, atol=1e-5)


def test_evaluation_gives_no_rows_to_new_ids() -> None:
    _, ours = nets()
    model = fleet.distributed_model(ours)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    model.eval()
    assert not model.embedding(torch.tensor([[1 << 40, -5]], device=here())).any()
    assert model.embedding.table_rows.engine.num_rows("rows") == NUM


def test_batch_rows_are_the_distinct_rows_of_the_batch() -> None:
    _, ours = nets()
    model = fleet.distributed_model(ours)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    model(torch.tensor([[1, 2], [2, 7]], device=here()))
    rows = model.embedding.batch_rows()
    assert rows.shape == (3, DIM)
    before = model.embedding(torch.tensor([2], device=here())).detach()
    (0.5 * rows.square().sum()).backward()
    optimizer.step()
    torch.testing.assert_close(model.embedding(torch.tensor([2], device=here())).detach(), before * 0.5)


def test_a_table_declared_with_two_devices_is_refused() -> None:
    model = torch.nn.ModuleList(
        [fleet.nn.SparseEmbedding(DIM, "rows", device="cpu"), fleet.nn.SparseEmbedding(DIM, "rows", device="cpu:0")]
    )
    model = fleet.distributed_model(model)
    with pytest.raises(ModelError, match="'rows'"):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))


def test_an_embedding_on_servers_beside_one_on_a_device_is_refused() -> None:
    model = torch.nn.ModuleList([fleet.nn.SparseEmbedding(DIM, "a", device="cpu"), fleet.nn.SparseEmbedding(DIM, "b")])
    with pytest.raises(ModelError):
        fleet.distributed_model(model)


@pytest.mark.parametrize("settings", [{"device": "tpu"}, {"capacity": 5}, {"device": "cpu", "capacity": 0}])
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        fleet.nn.SparseEmbedding(DIM, **settings)


@pytest.mark.slow
def test_compiled_code_has_no_break() -> None:
    plain, ours = nets()
    model = fleet.distributed_model(ours)
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    ids, targets = next(batches())
    F.mse_loss(compiled(ids), targets).backward()
    F.mse_loss(plain(ids), targets).backward()
    rows = ours.embedding.table_rows.engine.rows["rows"]  # type: ignore[union-attr]
    ((slots, grads),) = rows.pending
    sums = torch.zeros(NUM, DIM, device=here()).index_add_(0, ids.reshape(-1), grads)
    assert len(slots) == ids.numel()
    torch.testing.assert_close(sums, plain.embedding.weight.grad.to_dense(), rtol=0, atol=1e-6)  # type: ignore[union-attr]


def test_the_optimizers_state_of_a_table_is_not_left_out_in_silence(tmp_path: Path) -> None:
    _, ours = nets()
    model = fleet.distributed_model(ours)
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({"state": {}, "param_groups": []})):
        with pytest.raises(ModelError, match=naming("'rows'", "fleet.save")):
            call()
    model(torch.zeros(1, 2, dtype=torch.int64, device=here())).sum().backward()
    optimizer.step()
    fleet.save_state(str(tmp_path))
    assert fleet.load_state(str(tmp_path)) == {}
