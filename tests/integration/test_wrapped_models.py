"""A model that trains keeps what other libraries ask of it: the signature of forward, and parts that can be saved."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import each_of
from support.jobs import MODES
from support.messages import naming
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.base.errors import ModelError


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    fleet.reset()


class Model(torch.nn.Module):
    """`sparse`: whether it has rows on servers."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(40, 4, sparse=sparse)
        self.tower = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        self.loss = torch.nn.MSELoss()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, *, scale: float = 1.0) -> Any:
        """The loss, or scores."""
        scores = self.tower(self.items(input_ids)).squeeze(-1) * scale
        return scores if labels is None else self.loss(scores, labels)


IDS, LABELS = torch.arange(40), torch.rand(40)


def prepared(mode: str, sparse: bool = True) -> tuple[Any, Any]:
    model = Model(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fleet.prepare(model, optimizer, strategy=fleet.DistributedStrategy(**MODES[mode]))
    model(IDS, LABELS).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def check_signatures(model: Any, optimizer: torch.optim.Optimizer) -> None:
    assert list(inspect.signature(model.forward).parameters) == ["input_ids", "labels", "scale"]
    assert inspect.signature(model.forward) == inspect.signature(Model().forward)
    assert model.forward.__doc__ == "The loss, or scores."
    assert list(inspect.signature(model.zero_grad).parameters) == ["set_to_none"]
    assert "closure" in inspect.signature(optimizer.step).parameters
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step`
    assert "closure" in inspect.signature(optimizer.step).parameters


@each_of("mode", list(MODES))
def test_forward_has_the_signature_of_the_model(mode: str) -> None:
    model, optimizer = prepared(mode)
    check_signatures(model, optimizer)
    check_signatures(copy.deepcopy(model), optimizer)
    assert list(inspect.signature(copy.deepcopy(model).items.forward).parameters) == list(
        inspect.signature(model.items.forward).parameters
    )
    fleet.stop_worker()
    fleet.reset()


def signature_on_a_rank() -> list[str]:
    found = []
    for strategy in ({}, {"recompute": True, "recompute_configs": {"checkpoints": ["tower"]}}, {"amp": True}):
        model = Model(sparse=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = fleet.prepare(model, optimizer, strategy=fleet.DistributedStrategy(**strategy))
        model(IDS, LABELS).backward()
        optimizer.step()
        found.append(str(inspect.signature(model.forward)))
        torch.save(model.module.loss, io.BytesIO())
        torch.save(model.module.tower, io.BytesIO())
        fleet.stop_worker()
        fleet.reset()
    return found


@pytest.mark.slow
def test_forward_has_the_signature_of_the_model_on_ranks(ranks: Ranks) -> None:
    for found in ranks.run(signature_on_a_rank, 2):
        assert found == [str(inspect.signature(Model().forward))] * 3


@each_of("mode", list(MODES))
def test_a_part_without_rows_can_be_saved_and_copied(mode: str) -> None:
    model, _ = prepared(mode)
    file = io.BytesIO()
    torch.save(model.tower, file)
    torch.save(model.loss, io.BytesIO())
    file.seek(0)
    batch = torch.rand(5, 4)
    loaded = torch.load(file, weights_only=False)
    for made in (loaded, copy.deepcopy(model.tower), pickle.loads(pickle.dumps(model.tower))):
        torch.testing.assert_close(made(batch), model.tower(batch))
        made.load_state_dict(model.tower.state_dict())
    fleet.stop_worker()
    fleet.reset()


@each_of("mode", list(MODES))
def test_a_model_without_rows_can_be_saved_whole(mode: str) -> None:
    model, _ = prepared(mode, sparse=False)
    fleet.barrier_worker()
    made = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(made(IDS), model(IDS))
    made.load_state_dict(model.state_dict())
    fleet.stop_worker()
    torch.testing.assert_close(made(IDS), model(IDS))
    fleet.reset()


@pytest.mark.slow
def test_a_saved_part_is_loaded_in_a_process_without_torchfleet(tmp_path: Path) -> None:
    model, _ = prepared("sync")
    torch.save(model.tower, tmp_path / "tower.pt")
    script = (
        "import sys, torch; tower = torch.load(sys.argv[1], weights_only=False); "
        "tower.load_state_dict(tower.state_dict()); "
        "assert not any(name.startswith('torchfleet') for name in sys.modules); "
        "print(*tower(torch.ones(1, 4)).flatten().tolist())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "tower.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert float(done.stdout) == pytest.approx(model.tower(torch.ones(1, 4)).item(), rel=1e-5)


@each_of("mode", list(MODES))
def test_a_model_with_rows_says_how_it_is_saved(mode: str) -> None:
    model, _ = prepared(mode)
    for part in (model, model.items):
        with pytest.raises(ModelError, match=naming("to_plain", "state_dict", "items")):
            torch.save(part, io.BytesIO())
    plain = fleet.to_plain(model)
    torch.testing.assert_close(pickle.loads(pickle.dumps(plain))(IDS), plain(IDS))
    fleet.stop_worker()
    fleet.reset()
