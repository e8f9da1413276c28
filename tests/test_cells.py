"""Cells of a notebook, run again in one process: fleet.init, fleet.reset, and setups that failed and were corrected."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import jobs
from support.fleets import ServerThread
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import FleetError


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "RANK", "WORLD_SIZE", "PSERVER_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    yield
    fleet.reset()


def set_up(model: torch.nn.Module, mode: str = "sync", **options: Any) -> tuple[torch.nn.Module, Any]:
    """The cell that every notebook has."""
    fleet.init()
    model = fleet.distributed_model(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(inner, jobs.strategy(mode, **options))
    fleet.init_worker()
    return model, optimizer


def train(model: torch.nn.Module, optimizer: Any) -> list[float]:
    return [jobs.plain_step(model, [optimizer], batch) for batch in jobs.worker_batches(0, 3)]


def num_hooks(model: torch.nn.Module) -> int:
    return len(model._forward_hooks) + len(model._forward_pre_hooks)


def test_completion_offers_the_public_names_and_nothing_else() -> None:
    shown = [name for name in dir(fleet) if not name.startswith("__")]
    assert shown == sorted(fleet.__all__)
    assert "__version__" in dir(fleet)
    assert all(hasattr(fleet, name) for name in shown)


def test_init_may_be_called_again_while_nothing_is_under_way() -> None:
    fleet.init()
    fleet.init(fleet.UserDefinedRoleMaker(1, "worker", 2, ["127.0.0.1:7001"]))
    assert fleet.worker_index() == 1
    fleet.init()
    fleet.distributed_model(jobs.Net())
    fleet.init()
    assert fleet.worker_index() == 0
    fleet.distributed_model(jobs.Net())  # it is another job, and has no model yet


def test_init_says_how_to_end_a_job_that_is_under_way() -> None:
    model, optimizer = set_up(jobs.Net())
    with pytest.raises(FleetError, match=naming("fleet.stop_worker()", "fleet.reset()")):
        fleet.init()
    train(model, optimizer)  # it still is


@pytest.mark.parametrize("mode", list(jobs.MODES))
def test_a_cell_run_again_after_reset_gives_what_it_gave(mode: str) -> None:
    """With a new model, and with the one that was converted before: no hook or mark of an earlier job is left."""
    torch.manual_seed(0)
    plain = jobs.Net()
    dense = {name: value.clone().detach() for name, value in plain.named_parameters()}
    found, hooks = [], []
    for _ in range(3):
        model, optimizer = set_up(plain, mode)
        hooks.append(num_hooks(model))
        if mode in ("sync", "half_async"):
            found.append(train(model, optimizer))
        else:
            train(model, optimizer)
        fleet.reset()
        assert num_hooks(model) == 0
        with pytest.raises(FleetError, match=naming("fleet.stop_worker()")):
            optimizer.step()
        with torch.no_grad():
            for name, value in plain.named_parameters():
                if value.numel():
                    value.copy_(dense[name])
    assert len(set(hooks)) == 1
    assert all(losses == found[0] for losses in found)


def test_reset_without_a_job_does_nothing() -> None:
    fleet.reset()
    fleet.reset()
    fleet.init()


@pytest.mark.parametrize("again", ["the cell", "the line"])
def test_a_wrong_optimizer_or_strategy_can_be_corrected(again: str) -> None:
    fleet.init()
    model = fleet.distributed_model(jobs.Net())
    strategy = jobs.strategy("geo")
    for optimizer in (torch.optim.RMSprop(model.parameters()), torch.optim.Adam(model.parameters())):
        with pytest.raises(FleetError):
            fleet.distributed_optimizer(optimizer, strategy)
    strategy.rpc_timeout = 5.0  # no job uses it
    if again == "the cell":
        model, optimizer = set_up(model)
    else:
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()), jobs.strategy("async"))
        fleet.init_worker()
    train(model, optimizer)


def test_a_model_that_cannot_be_converted_is_left_as_it_was() -> None:
    model = torch.nn.ModuleDict(
        {
            "a": torch.nn.Embedding(5, 2, sparse=True),
            "b": torch.nn.Embedding(5, 2, sparse=True, max_norm=1.0, dtype=torch.float64),
        }
    )
    fleet.init()
    with pytest.raises(FleetError, match="'b'"):
        fleet.distributed_model(model)
    assert type(model["a"]) is torch.nn.Embedding
    model["b"] = torch.nn.Embedding(5, 2, sparse=True)
    fleet.distributed_model(model)


def test_servers_that_were_not_there_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """init_worker fails, leaves no thread behind, and works once there is a server."""
    with ServerThread("tcp://127.0.0.1:0") as server:
        place = server.endpoint.removeprefix("tcp://")
        threads = threading.active_count()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        for endpoint in (nobody, place):
            monkeypatch.setenv("FLEET_START_TIMEOUT", "1" if endpoint == nobody else "60")
            fleet.reset()
            fleet.init(fleet.UserDefinedRoleMaker(0, "worker", 1, [endpoint]))
            model = fleet.distributed_model(jobs.Net())
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = fleet.distributed_optimizer(inner, jobs.strategy("async"))
            if endpoint == nobody:
                for _ in range(2):
                    with pytest.raises(FleetError, match="answer"):
                        fleet.init_worker()
                assert threading.active_count() <= threads  # those of earlier tests may end meanwhile
        fleet.init_worker()
        train(model, optimizer)
        fleet.reset()


def test_a_server_whose_port_is_taken_can_be_started_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        fleet.init(fleet.UserDefinedRoleMaker(0, "server", 1, [place]))
        model = fleet.distributed_model(jobs.Net())
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(FleetError, match=place):
            fleet.init_server()
    fleet.init_server()
    with pytest.raises(FleetError, match=r"fleet\.reset\(\)"):
        fleet.init()
    fleet.reset()
    with socket.create_server(("127.0.0.1", int(place.rpartition(":")[2]))):
        pass  # the address is free


def test_reset_of_a_worker_whose_servers_are_gone_says_so_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with ServerThread("tcp://127.0.0.1:0") as server:
        place = server.endpoint.removeprefix("tcp://")
        fleet.init(fleet.UserDefinedRoleMaker(0, "worker", 1, [place]))
        model = fleet.distributed_model(jobs.Net())
        strategy = jobs.strategy("async", rpc_timeout=8.0)
        strategy.rpc_retry_times = 0
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        fleet.init_worker()
        train(model, optimizer)
        fleet.flush()
    fleet.reset()
    assert "servers" in capsys.readouterr().err
    train(*set_up(jobs.Net()))


def test_a_collective_cell_can_be_run_again_with_its_own_model() -> None:
    model: torch.nn.Module = torch.nn.Linear(3, 1)
    for _ in range(3):
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"}))
        model = fleet.distributed_model(model)
        with pytest.raises(FleetError):
            fleet.distributed_optimizer(torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        assert type(model.module) is torch.nn.Linear
        with pytest.raises(FleetError, match=r"fleet\.reset\(\)"):
            fleet.init(is_collective=True)
        fleet.reset()
        assert not dist.is_initialized()
