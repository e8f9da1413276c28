"""Blocks computed by heter workers, against the same block computed here."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.heters import WAIT, HeterThread, heter_workers, remote
from support.messages import naming
from torch import nn

import torchfleet as fleet
from torchfleet.base.errors import ModelError, RoleError, WireError
from torchfleet.ps.net.wire import Array, pack
from torchfleet.ps.worker.client.connection import Patience
from torchfleet.ps.worker.heter import heter_links, load_watch
from torchfleet.ps.worker.heter.messages import MAX_KEPT, Forwarded, TensorSpec

pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no lost heter worker: one is lost here if no process listens at its address."""
    monkeypatch.setattr(heter_links, "ALIVE", Patience(timeout=WAIT / 2, retries=3))


class Tower(nn.Module):
    """Several inputs and outputs, buffers, and a part that its caller may freeze."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu_(self.norm(self.first(x)) + bias)
        return {"out": self.last(hidden), "rank": hidden.argmax(dim=1), "hidden": hidden}


class Model(nn.Module):
    def __init__(self, tower: Callable[[], nn.Module] = Tower) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(3, 3)
        with fleet.device_guard("gpu"):
            self.tower = tower()


@pytest.fixture
def heter() -> Iterator[HeterThread]:
    with heter_workers(Model, 1) as (made,):
        yield made


def step(model: Model, x: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    """The outputs and all gradients of a training step, and the buffers after it."""
    model.zero_grad()
    bias.grad = None
    found = model.tower(model.front(x), bias=bias)
    (found["out"].square().sum() + found["hidden"].sum()).backward()
    grads = [parameter.grad.clone() for parameter in (*model.parameters(), bias) if parameter.grad is not None]
    return [*(value.detach() for value in found.values()), *grads, *(b.clone() for b in model.buffers())]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)


def test_outputs_gradients_and_buffers_are_those_of_the_block_itself(heter: HeterThread) -> None:
    model, plain = Model(), Model()
    dice = torch.Generator().manual_seed(1)
    with remote(model, [heter.endpoint]) as blocks:
        for number in range(3):
            x, bias = torch.randn(5, 3, generator=dice), torch.randn(4, generator=dice).requires_grad_()
            for each in (model, plain):
                each.tower.norm.train(number != 1)  # frozen once
            assert_same(step(model, x, bias), step(plain, x, bias.detach().clone().requires_grad_()))
            with torch.no_grad():
                for each in (*model.parameters(), *plain.parameters()):
                    each.mul_(0.9)
        assert blocks.stats() == {"passes": 3, "repeated": 0, "moves": 0}
        with torch.no_grad():
            found, expected = (each.eval().tower(x, bias=bias)["out"] for each in (model, plain))
        torch.testing.assert_close(found, expected)
        assert not found.requires_grad
    assert "forward" not in vars(model.tower)  # its own forward is back
    heter.wait()  # all workers have left


def test_only_changed_values_travel(heter: HeterThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heter_links, "ALIVE", Patience(timeout=WAIT, retries=0))  # nothing is sent twice
    model = Model(lambda: nn.Linear(3, 1000))
    with heter_workers(lambda: Model(lambda: nn.Linear(3, 1000)), 1) as (one,), remote(model, [one.endpoint]):
        model.tower(torch.ones(1, 3))
        before = one.server.counters.num_requests
        sent: list[int] = []
        queue = one.server._queue
        one.server._queue = lambda message, peer: sent.append(len(message.arrays)) or queue(message, peer)  # type: ignore
        model.tower(torch.ones(1, 3))
        with torch.no_grad():
            model.tower.bias.add_(1)
        model.tower(torch.ones(1, 3))
        assert one.server.counters.num_requests == before + 2
        assert sent == [2, 3]  # a body and an input; and the bias


def test_a_graph_is_kept_as_long_as_the_worker_has_it(heter: HeterThread) -> None:
    model = Model()
    with remote(model, [heter.endpoint]):
        bias = torch.zeros(4)
        losses = [model.tower(torch.randn(2, 3), bias=bias)["out"].sum() for _ in range(3)]
        (session,) = heter.server._sessions.values()
        assert sorted(session.values.kept) == [1, 2, 3]
        losses[0].backward(retain_graph=True)
        once = model.tower.first.weight.grad.clone()
        losses[0].backward()
        torch.testing.assert_close(model.tower.first.weight.grad, 2 * once)
        with pytest.raises(RuntimeError, match="second time"):
            losses[0].backward()
        del losses[1:]
        last = model.tower(torch.randn(2, 3), bias=bias)["out"].sum()
        assert sorted(session.values.kept) == [4]
        many = [model.tower(torch.randn(2, 3), bias=bias)["out"].sum() for _ in range(MAX_KEPT - 1)]
        with pytest.raises(ModelError, match=naming(str(MAX_KEPT), "backward")):
            model.tower(torch.randn(2, 3), bias=bias)
        del last, many
        model.tower(torch.randn(2, 3), bias=bias)
        assert len(session.values.kept) == 1


def test_random_numbers_depend_on_the_pass_and_not_on_the_heter_worker() -> None:
    def make() -> Model:
        return Model(lambda: nn.Dropout(0.5))

    with heter_workers(make, 2) as heters:
        found = []
        for one in heters:
            model = make()
            with remote(model, [one.endpoint]):
                found.append([model.tower(torch.ones(64)) for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])


def test_a_lost_heter_worker_is_replaced_between_forward_and_backward() -> None:
    model, plain = Model(), Model()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    with heter_workers(Model, 2) as heters, remote(model, [one.endpoint for one in heters]) as blocks:
        outputs = []
        for each in (model, plain):
            found = each.tower(each.front(x), bias=torch.zeros(4))
            if each is model:
                heters[0].close()
            found["out"].sum().backward()
            outputs.append([*(p.grad for p in each.parameters()), *each.buffers()])
        assert_same(*outputs)
        assert_same(step(model, x, torch.zeros(4)), step(plain, x, torch.zeros(4)))
        assert blocks.stats() == {"passes": 2, "repeated": 1, "moves": 1}


def test_a_heter_worker_that_has_forgotten_a_session_gets_everything_again(heter: HeterThread) -> None:
    model, plain = Model(), Model()
    x, bias = torch.randn(5, 3), torch.zeros(4)
    with remote(model, [heter.endpoint]):
        assert_same(step(model, x, bias), step(plain, x, bias))
        heter.server._sessions.clear()
        assert_same(step(model, x, bias), step(plain, x, bias))


@pytest.mark.slow
def test_workers_spread_over_heter_workers_and_move_to_one_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_watch, "PERIOD", 0.05)

    def call(model: Model) -> None:
        with torch.no_grad():
            model.eval().tower(torch.ones(2, 3), bias=torch.zeros(4))

    with heter_workers(Model, 2, num_workers=4) as heters:
        models = [Model() for _ in range(4)]
        remotes = [remote(model, [one.endpoint for one in heters], i) for i, model in enumerate(models)]
        opened = [each.__enter__() for each in remotes]
        for model in models:
            call(model)
        assert [one.server.num_sessions for one in heters] == [2, 2]
        heters[0].close()
        for model in models:
            call(model)
        assert heters[1].server.num_sessions == 4
        back = HeterThread(Model(), heters[0].endpoint, 4)
        try:
            for _ in range(600):
                for model in models:
                    call(model)
                if back.server.num_sessions == heters[1].server.num_sessions == 2:
                    break
                threading.Event().wait(0.05)
            assert [back.server.num_sessions, heters[1].server.num_sessions] == [2, 2]
            assert sum(each.stats()["moves"] for each in opened) >= 4  # more, where a busy machine delays the news
        finally:
            for each in remotes:
                each.__exit__(None, None, None)
            back.close()


@pytest.mark.parametrize("value", [3, None, [torch.ones(2)]])
def test_an_input_that_is_no_tensor_is_named(heter: HeterThread, value: object) -> None:
    model = Model()
    with remote(model, [heter.endpoint]), pytest.raises(ModelError, match=naming("'tower'", "'bias'")):
        model.tower(torch.ones(2, 3), bias=value)


def test_a_tensor_of_another_type_is_named(heter: HeterThread) -> None:
    model = Model()
    with remote(model, [heter.endpoint]), pytest.raises(ModelError, match=naming("'tower'", "complex64", "float32")):
        model.tower(torch.ones(2, 3, dtype=torch.complex64), bias=torch.zeros(4))


def test_an_error_of_the_block_is_that_of_the_call_and_the_next_call_works(heter: HeterThread) -> None:
    model = Model()
    with remote(model, [heter.endpoint]):
        with pytest.raises(ModelError, match=naming("'tower'", "RuntimeError", "mat1")):
            model.tower(torch.ones(2, 7), bias=torch.zeros(4))
        model.tower(torch.ones(2, 3), bias=torch.zeros(4))


def test_a_block_that_returns_something_else_is_refused() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return {"x": x, "n": 3}

    model = Model(Odd)
    refused = pytest.raises(ModelError, match=naming("'tower'", "dict"))
    with heter_workers(lambda: Model(Odd), 1) as (one,), remote(model, [one.endpoint]), refused:
        model.tower(torch.ones(1))


def test_processes_with_different_blocks_are_told(heter: HeterThread) -> None:
    model = Model(lambda: nn.Linear(3, 5))
    with remote(model, [heter.endpoint]), pytest.raises(RoleError, match=naming("'tower'", "same script")):
        model.tower(torch.ones(2, 3))


@pytest.mark.slow
def test_a_copy_and_an_exported_model_compute_by_themselves() -> None:
    model = nn.Sequential(nn.Linear(3, 3), fleet.device_guard("gpu")(nn.Linear(3, 2)))
    plain, x = copy.deepcopy(model), torch.ones(1, 3)
    with heter_workers(lambda: copy.deepcopy(plain), 1) as (one,), remote(model, [one.endpoint]) as blocks:
        for other in (copy.deepcopy(model), torch.export.export(model, (x,)).module()):
            torch.testing.assert_close(other(x), plain(x))
        assert blocks.stats()["passes"] == 0
        torch.testing.assert_close(model(x), plain(x))
        assert blocks.stats()["passes"] == 1


def test_autocast_of_the_caller_acts_on_the_heter_worker() -> None:
    def make() -> Model:
        return Model(lambda: nn.Linear(3, 2))

    model, plain = make(), make()
    with heter_workers(make, 1) as (one,), remote(model, [one.endpoint]), torch.autocast("cpu", torch.bfloat16):
        found, expected = (each.tower(torch.ones(1, 3)) for each in (model, plain))
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "answer",
    [
        [],
        [pack({"a": 1})],
        [pack(Forwarded([], "tensor", [], [], []))],
        [pack(Forwarded([], "dict", ["a"], [], []))],
        [pack(Forwarded([], "tuple", [], [], [9]))],
        [pack(Forwarded([TensorSpec("float32", (2,))], "tensor", [], [True], [])), Array(0, np.zeros(3, np.uint8))],
    ],
)
def test_an_answer_that_does_not_fit_is_an_error_of_the_call(
    heter: HeterThread, monkeypatch: pytest.MonkeyPatch, answer: list[Array]
) -> None:
    monkeypatch.setattr(heter.server._runner, "forward", lambda *_: answer)
    model = Model()
    with remote(model, [heter.endpoint]), pytest.raises(WireError):
        model.tower(torch.ones(2, 3), bias=torch.zeros(4))


def test_a_second_derivative_is_refused(heter: HeterThread) -> None:
    model = Model()
    with remote(model, [heter.endpoint]):
        x = torch.ones(2, 3, requires_grad=True)
        out = model.tower(x, bias=torch.zeros(4))["out"].sum()
        with pytest.raises(ModelError, match=naming("create_graph=True", "device_guard('gpu')")):
            torch.autograd.grad(out, x, create_graph=True)
