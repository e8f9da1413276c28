"""The number on which a loop calls backward(), as it is without a scale; and torch as it was afterwards."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchfleet as fleet
from torchfleet.base.backward_loss import LossWatch

BACKWARD, SCALE = torch.autograd.backward, torch.amp.GradScaler.scale


@pytest.fixture
def watch() -> Iterator[LossWatch]:
    made = LossWatch()
    yield made
    made.close()
    assert torch.autograd.backward is BACKWARD
    assert torch.amp.GradScaler.scale is SCALE


def weight(value: float) -> torch.Tensor:
    return torch.tensor([value], requires_grad=True)


def test_the_last_backward_of_one_number_is_noted_once(watch: LossWatch) -> None:
    x = weight(3.0)
    assert watch.take() is None
    (x * 2).sum().backward()
    torch.autograd.backward((x * 5).sum())
    assert float(watch.take()) == 15.0
    assert watch.take() is None
    assert x.grad.item() == 7.0
    (x * torch.ones(2)).backward(torch.ones(2))
    (x * 2).backward(gradient=torch.ones(1))
    torch.autograd.backward([x * 1, x * 2])
    assert watch.take() is None, "gradients of several numbers or of parts of a model are no loss"


def test_the_loss_is_that_before_a_scaler(watch: LossWatch) -> None:
    x, scaler = weight(3.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((x * 2).sum()).backward()
    assert x.grad.item() == 2048.0
    assert float(watch.take()) == 6.0
    torch.amp.GradScaler("cpu", enabled=False).scale((x * 3).sum()).backward()
    assert float(watch.take()) == 9.0


def test_threads_have_their_own_and_the_last_watch_restores_torch(watch: LossWatch) -> None:
    found = []

    def other() -> None:
        (weight(1.0) * 4).sum().backward()
        found.append(float(watch.take()))

    (weight(1.0) * 2).sum().backward()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert [*found, float(watch.take())] == [4.0, 2.0]
    LossWatch().close()
    assert torch.autograd.backward is not BACKWARD


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = torch.nn.Embedding(9, 2, sparse=True), torch.nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids))


@pytest.mark.parametrize("is_collective", [False, True])
@pytest.mark.parametrize("reported", [{}, {"auc": 0.5}, {"loss": 7.0}])
def test_a_loop_without_a_report_has_its_loss_in_the_status(
    is_collective: bool, reported: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is reported stands before it."""
    status = tmp_path / "status.json"
    monkeypatch.setenv("FLEET_STATUS_FILE", str(status))
    fleet.init(is_collective=is_collective)
    model = Model()
    model.rows.sparse = not is_collective
    model, optimizer = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses: list[Any] = []
    for _ in range(3):
        losses.append(model(torch.arange(4)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if reported:
            fleet.report(**reported)
    fleet.stop_worker()
    assert json.loads(status.read_text())["metrics"] == pytest.approx({"loss": losses[-1].item(), **reported})
    assert torch.autograd.backward is BACKWARD


def test_a_process_that_nobody_watches_leaves_torch_as_it_is() -> None:
    fleet.init()
    model = Model()
    fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.autograd.backward is BACKWARD
    fleet.reset()
