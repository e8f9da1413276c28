"""Rows of hybrid mode: the training thread sends few gradients itself, the queue's threads send the others."""

from __future__ import annotations

from typing import Any

import torch
from support.cases import each_of
from support.jobs import Part, one_worker

import torchfleet
from torchfleet.ps.worker.modes import hybrid


class Linear(torch.nn.Module):
    """Loss = Σ w + Σ rows: the gradient of every number is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4))
        self.rows = torchfleet.nn.SparseEmbedding(2, name="rows", initializer=torchfleet.nn.Constant(0.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.w.sum() + self.rows(ids).sum()


def train(part: Part, num_steps: int) -> torch.Tensor:
    ids = torch.tensor([3, 5])
    for _ in range(num_steps):
        part.model(ids).backward()
        part.optimizer.step()
        part.optimizer.zero_grad()
    part.worker.communicator.flush()
    return part.rows("rows", [3, 5])


@each_of("settings, num_queued", [({}, 0), ({"max_merge_var_num": 2}, 5), ({"thread_pool_size": 2}, 5)])
def test_every_step_is_applied_whichever_thread_sends_it(settings: dict[str, Any], num_queued: int) -> None:
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.5)  # noqa: E731
    with one_worker(Linear(), make, mode="hybrid", **settings) as part:
        found = train(part, 5)
        stats = part.worker.communicator.stats()
        assert part.worker.communicator._num_given == num_queued  # type: ignore[attr-defined]
        assert stats["pushes"] + stats["merged"] == 5
        assert stats["queue"] == 0
    assert torch.equal(found, torch.full((2, 2), -2.5))


def test_many_gradients_take_the_queue(monkeypatch: Any) -> None:
    monkeypatch.setattr(hybrid, "_FEW_BYTES", 31)
    with one_worker(Linear(), lambda model: torch.optim.SGD(model.parameters(), lr=0.5), mode="hybrid") as part:
        found = train(part, 3)
        assert part.worker.communicator._num_given == 3  # type: ignore[attr-defined]
    assert torch.equal(found, torch.full((2, 2), -1.5))
