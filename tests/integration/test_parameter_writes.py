"""What a script writes into dense parameters between steps, in every mode, against plain torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import MODES, Part, Servers, one_worker
from support.messages import naming
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torchfleet as fleet
from torchfleet.base.errors import ModelError

IDS = torch.arange(10)
Write = Callable[[torch.nn.Module], None]


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    fleet.reset()


def make_model(max_norm: float | None = None) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(10, 4, max_norm=max_norm), torch.nn.Linear(4, 1))


def make_optimizer(model: torch.nn.Module, name: str = "SGD") -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    return made


def train(model: torch.nn.Module, optimizer: Any, num: int, after_step: Write | None = None) -> list[float]:
    losses = []
    for _ in range(num):
        loss = model(IDS).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if after_step is not None:
            after_step(model)
    return losses


@torch.no_grad()
def clamp(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


def clamp_data(model: torch.nn.Module) -> None:
    """torch does not count this write in `_version`."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def clamp_by_numpy(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        values = parameter.detach().numpy()
        np.clip(values, -0.2, 0.2, out=values)


def replace_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def replace_by_vector(model: torch.nn.Module) -> None:
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(model.parameters()).clamp(-0.2, 0.2), model.parameters())


def init(model: torch.nn.Module) -> None:
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.3, 0.3)


def settings(mode: str) -> fleet.DistributedStrategy:
    return fleet.DistributedStrategy(**MODES[mode])


WRITES = {
    "clamp_": clamp, "data.clamp_": clamp_data, "numpy": clamp_by_numpy, "data =": replace_data,
    "vector_to_parameters": replace_by_vector, "init": init,
}  # fmt: skip


@each_of("mode", ["sync", "half_async", "geo", "hybrid"])
@each_of("name", list(WRITES))
@each_of("rule", ["SGD", "Adam"])
def test_writes_after_each_step_train_as_in_plain_torch(mode: str, name: str, rule: str) -> None:
    if mode == "geo" and rule != "SGD":
        return  # refused
    plain = make_model()
    expected = train(plain, make_optimizer(plain, rule), 5, WRITES[name])
    model = make_model()
    model, optimizer = fleet.prepare(model, make_optimizer(model, rule), strategy=settings(mode))
    found = train(model, optimizer, 5, WRITES[name])
    fleet.stop_worker()
    fleet.reset()
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@each_of("mode", list(MODES))
def test_max_norm_of_an_embedding_left_dense_trains_as_in_plain_torch(mode: str) -> None:
    plain = make_model(max_norm=1.0)
    expected = train(plain, make_optimizer(plain), 5)
    model = make_model(max_norm=1.0)
    model, optimizer = fleet.prepare(model, make_optimizer(model), strategy=settings(mode))
    assert train(model, optimizer, 5) == pytest.approx(expected, rel=1e-5)
    fleet.stop_worker()
    fleet.reset()


@each_of("mode", list(MODES))
def test_values_that_are_set_after_prepare_are_those_that_train(mode: str) -> None:
    plain = make_model()
    init(plain)
    expected = train(plain, make_optimizer(plain), 3)
    model = make_model()
    model, optimizer = fleet.prepare(model, make_optimizer(model), strategy=settings(mode))
    init(model)
    assert train(model, optimizer, 3) == pytest.approx(expected, rel=1e-5)
    fleet.stop_worker()
    fleet.reset()


def test_async_training_clamps_what_the_step_has_made() -> None:
    """The first clamp acts on the values before the step, which does not wait; from the second on, steps wait."""
    model = make_model()
    model, optimizer = fleet.prepare(model, make_optimizer(model), strategy=settings("async"))
    losses = train(model, optimizer, 6, clamp)
    assert max(losses[2:]) < 0.7
    assert max(parameter.abs().max().item() for parameter in model.parameters()) <= 0.2 + 1e-6


@each_of("mode", list(MODES))
def test_a_state_has_what_was_written_after_the_last_step(mode: str) -> None:
    with one_worker(make_model(), make_optimizer, mode=mode) as part:
        train(part.model, part.optimizer, 1)
        part.flush()
        with torch.no_grad():
            part.model.get_parameter("1.weight").fill_(0.25)
        if mode == "geo":  # sends one worker's changes at its exchanges
            part.barrier()
        assert part.model.state_dict()["1.weight"].tolist() == [[0.25] * 4]
        part.model.eval()
        with torch.no_grad():
            part.model(IDS)
        assert part.model.get_parameter("1.weight").tolist() == [[0.25] * 4]


@each_of("mode", ["sync", "half_async", "async"])
def test_loaded_values_are_no_writes_of_the_script(mode: str) -> None:
    """Neither on worker 0, which gives them to the servers, nor on the others. A write before the load is kept."""
    state = {"1.weight": torch.full((1, 4), 0.5)}
    both_have_them = threading.Barrier(2)

    def body(part: Part) -> list[torch.Tensor]:
        both_have_them.wait(jobs.SECONDS)
        with torch.no_grad():
            part.model.get_parameter("1.bias").fill_(0.125)
        part.model.load_state_dict(state, strict=False)
        part.barrier()
        return [value.detach().clone() for value in part.model.parameters()]

    done = jobs.run(body, make_model, make_optimizer, mode=mode, num_workers=2)
    for table, weight, bias in done.results:
        torch.testing.assert_close(table, make_model()[0].weight.detach())
        assert weight.tolist() == [[0.5] * 4]
        torch.testing.assert_close(bias, torch.full((1,), 0.125))


@pytest.mark.slow
def test_two_workers_in_sync_mode_write_as_one_process() -> None:
    """What both write alike is written once; what one of them writes is written whole."""

    def both(part: Part) -> None:
        for _ in range(4):
            part.model(IDS).square().mean().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            clamp(part.model)

    plain = make_model()
    optimizer = make_optimizer(plain)
    for _ in range(4):
        plain(IDS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        clamp(plain)
    done = jobs.run(both, make_model, make_optimizer, num_workers=2, num_servers=2)
    torch.testing.assert_close(done.parts[1].model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@each_of("mode", ["sync", "half_async", "async"])
def test_what_the_writes_of_two_workers_add_up_to(mode: str) -> None:
    """Modes but sync add the differences of each of n workers by 1/n."""
    start = make_model()[1].weight.detach().clone()
    both_have_them = threading.Barrier(2)

    def body(part: Part) -> torch.Tensor:
        both_have_them.wait(jobs.SECONDS)  # neither writes before the other has the first values
        with torch.no_grad():
            weight = part.model.get_parameter("1.weight")
            weight[:, 0] = 2.0  # both
            if part.index == 1:
                weight[:, 1] = 3.0  # one
        part.barrier()
        return weight.detach().clone()

    done = jobs.run(body, make_model, make_optimizer, mode=mode, num_workers=2)
    expected = start.clone()
    expected[:, 0] = 2.0
    expected[:, 1] = 3.0 if mode == "sync" else (start[:, 1] + 3.0) / 2
    for found in done.results:
        torch.testing.assert_close(found, expected)


@each_of("mode", ["sync", "half_async", "async"])
def test_a_write_is_no_step_of_the_optimizer(mode: str) -> None:
    """Nor is what torchfleet itself writes a write of the script."""
    servers = Servers()
    with one_worker(make_model(), make_optimizer, mode=mode, servers=servers) as part:
        train(part.model, part.optimizer, 2)
        part.flush()
        before = servers.counts("PUSH"), servers.table("dense.0").step
        part.model.eval()
        train(part.model, part.optimizer, 3)
        part.flush()
        num = servers.counts("PUSH")[0] - before[0][0]
        assert num <= 3 + (mode == "async")  # which says, when it rests, that it pushes nothing
        with torch.no_grad():
            part.model.get_parameter("1.weight").fill_(0.25)
        part.flush()
        assert servers.table("dense.0").step == before[1] + 3
        assert part.model.get_parameter("1.weight").tolist() == [[0.25] * 4]


def test_values_that_servers_cannot_hold_are_refused_by_name() -> None:
    with one_worker(make_model(), make_optimizer) as part:
        weight = part.model.get_parameter("1.weight")
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[0, 1] = torch.nan
        with pytest.raises(ModelError, match=naming("1.weight", "NaN")):
            part.flush()
        weight.data = torch.zeros(2, 4)
        with pytest.raises(ModelError, match=naming("1.weight", "(1, 4)", "(2, 4)")):
            part.flush()
        weight.data = kept
        train(part.model, part.optimizer, 1)
