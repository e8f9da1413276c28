"""torch.compile around a model with lookups: compiled before or after it is distributed, or in place. Lookups break the
graph; what stands behind them is one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.jobs import Servers, one_worker

import torchfleet

FEATURES = 4
KINDS = ("before", "after", "in place")


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.rows = torch.nn.ModuleList(torch.nn.Embedding(50, 3, sparse=True) for _ in range(FEATURES))
        self.bag = torch.nn.EmbeddingBag(50, 3, mode="mean", sparse=True)
        self.tower = torch.nn.Sequential(torch.nn.Linear(3 * FEATURES + 3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(torch.cat([*self.looked_up(x), self.bag(x[:, :FEATURES].long() + 1)], dim=1))

    def looked_up(self, x: torch.Tensor) -> list[torch.Tensor]:
        """A function of its own: torch compiles nothing of a function whose graph breaks inside a loop."""
        return [rows(x[:, i].long()) for i, rows in enumerate(self.rows)]


def batch(step: int, size: int = 16) -> torch.Tensor:
    return torch.randint(0, 40, (size, FEATURES + 1), generator=torch.Generator().manual_seed(step)).float()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def losses(model: Callable[..., torch.Tensor], optimizer: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def compiled(model: torch.nn.Module, kind: str, backend: Any) -> torch.nn.Module:
    if kind == "in place":
        model.compile(backend=backend)
        return model
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_trains_as_torch_with_one_graph_behind_its_lookups(kind: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model, servers = Tower(), Servers(2)
    plain = copy.deepcopy(model)
    own = compiled(model, kind, count) if kind == "before" else model
    with one_worker(own, sgd, servers=servers) as part:
        called = part.model if kind == "before" else compiled(model, kind, count)
        found = []
        for step in range(6):
            before = servers.counts("PULL")
            found += losses(called, part.optimizer, range(step, step + 1))
            if step >= 2:
                assert servers.counts("PULL") == [num + 1 for num in before]
        assert part.stats()["unforeseen"] == []
    assert len([graph for graph in graphs if "linear" in graph.code]) == 1
    expected = losses(plain, sgd(plain), range(6))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.long  # nearly all of it is the C++ compiler
def test_compiled_to_machine_code_it_trains_the_same() -> None:
    model = Tower()
    plain = copy.deepcopy(model)
    with one_worker(model, sgd) as part:
        found = losses(torch.compile(model), part.optimizer, range(5))
    expected = losses(plain, sgd(plain), range(5))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_part_that_is_compiled_by_itself_is_compiled_although_the_model_is_never_called() -> None:
    graphs: list[torch.fx.GraphModule] = []
    model = Tower()
    with one_worker(model, sgd) as part:
        tower = torch.compile(model.tower, backend=lambda graph, inputs: graphs.append(graph) or graph)
        for step in range(2):
            found = [rows(batch(step)[:, i].long()) for i, rows in enumerate(model.rows)]
            tower(torch.cat([*found, found[0]], dim=1)).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_prediction_of_a_compiled_model_is_that_of_the_model() -> None:
    model = Tower()
    with one_worker(model, sgd):
        model.eval()
        with torch.no_grad():
            expected = model(batch(1))
            found = torch.compile(model, backend="eager")(batch(1))
        torch.testing.assert_close(found, expected)
    assert isinstance(model.rows[0], torchfleet.nn.SparseEmbedding)
