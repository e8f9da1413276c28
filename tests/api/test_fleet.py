"""fleet.*: calls in the right order work, calls in a wrong one say what to call; and the example
script, in one process and under fleetrun."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import FleetError, RoleError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy

SERVER = fleet.UserDefinedRoleMaker(0, "server", 2, ["127.0.0.1:7001", "127.0.0.1:7002"])
WORKER = fleet.UserDefinedRoleMaker(1, "worker", 2, ["127.0.0.1:7001", "127.0.0.1:7002"], ["a:1", "b:2"])


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts and ends without a job, and in no fleet's environment."""
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "PSERVER_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with jobs.clean_facade():
        yield


def start(strategy: DistributedStrategy | None = None) -> tuple[torch.nn.Module, Any]:
    fleet.init()
    model = fleet.distributed_model(jobs.Net())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    fleet.init_worker()
    return model, optimizer


def train(model: torch.nn.Module, optimizer: Any, num: int = 3) -> list[float]:
    return [jobs.plain_step(model, [optimizer], batch) for batch in jobs.worker_batches(0, num)]


# Roles


def test_without_an_environment_a_process_is_one_worker_with_its_servers_within() -> None:
    fleet.init()
    assert fleet.is_worker()
    assert fleet.is_first_worker()
    assert not fleet.is_server()
    assert (fleet.worker_index(), fleet.worker_num(), fleet.server_index(), fleet.server_num()) == (0, 1, 0, 1)
    assert fleet.worker_endpoints() == fleet.server_endpoints() == []
    assert fleet.server_endpoints(to_string=True) == ""


def test_a_worker_knows_its_place() -> None:
    fleet.init(WORKER)
    assert fleet.is_worker()
    assert not fleet.is_first_worker()
    assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (1, 2, 2)
    assert fleet.worker_endpoints() == ["a:1", "b:2"]
    assert fleet.server_endpoints(to_string=True) == "127.0.0.1:7001,127.0.0.1:7002"


def test_a_server_knows_its_place() -> None:
    fleet.init(SERVER)
    assert fleet.is_server()
    assert not fleet.is_worker()
    assert not fleet.is_first_worker()
    assert (fleet.server_index(), fleet.server_num(), fleet.worker_num()) == (0, 2, 2)


def test_the_role_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2"}
    for name, value in {**found, "PADDLE_PSERVERS_IP_PORT_LIST": "h:1,h:2"}.items():
        monkeypatch.setenv(name, value)
    fleet.init()
    assert (fleet.is_worker(), fleet.worker_index(), fleet.server_num()) == (True, 1, 2)


# A whole job in one process


@pytest.mark.parametrize("mode", list(jobs.MODES))
def test_the_ordinary_loop_runs_in_one_process(mode: str) -> None:
    model, optimizer = start(jobs.strategy(mode))
    losses = []
    for batch in fleet.prefetch([jobs.make_batch(0)] * 10):
        losses.append(jobs.plain_step(model, [optimizer], batch))
        fleet.flush()
    fleet.barrier_worker()
    fleet.report(loss=losses[-1])
    stats = fleet.stats()
    assert stats["mode"] == mode
    assert stats["worker"]["steps"] == 10
    assert stats["worker"]["samples"] == 80
    assert set(stats["servers"][0]["tables"]) == {"dense.0", *jobs.TABLES}
    assert losses[-1] < losses[0]
    fleet.stop_worker()


def test_distributed_model_returns_the_same_object() -> None:
    fleet.init()
    model = jobs.Net()
    assert fleet.distributed_model(model) is model


def test_after_stop_worker_the_process_can_begin_again() -> None:
    results = []
    for _ in range(3):
        torch.manual_seed(0)
        results.append(train(*start()))
        fleet.stop_worker()
    assert results[0] == results[1] == results[2], "nothing of the job before may show"


def test_the_same_model_may_be_used_in_a_second_job() -> None:
    fleet.init()
    model = fleet.distributed_model(jobs.Net())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    train(model, optimizer)
    fleet.stop_worker()
    fleet.init()
    assert fleet.distributed_model(model) is model
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    train(model, optimizer)
    assert fleet.stats()["worker"]["steps"] == 3
    fleet.stop_worker()


def test_the_settings_in_force_are_printed_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    start(jobs.strategy("geo", k_steps=7))
    printed = capsys.readouterr().out
    for word in ("torchfleet worker 0", "one process", "geo", "k_steps=7"):
        assert word in printed
    assert "rpc_retry_times" not in printed
    fleet.stop_worker()


def test_pserver_debug_prints_the_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSERVER_DEBUG", "1")
    start()
    printed = capsys.readouterr().out
    for word in ("plan", "servers", "items", "hidden.weight", "array", "dense.0"):
        assert word in printed
    fleet.stop_worker()


# Wrong order

BEFORE_INIT: dict[str, Callable[[], Any]] = {
    "distributed_model": lambda: fleet.distributed_model(jobs.Net()),
    "distributed_optimizer": lambda: fleet.distributed_optimizer(torch.optim.SGD(jobs.Net().parameters())),
    "distributed_scheduler": lambda: fleet.distributed_scheduler(None),
    "is_server": fleet.is_server,
    "is_worker": fleet.is_worker,
    "is_first_worker": fleet.is_first_worker,
    "worker_index": fleet.worker_index,
    "worker_num": fleet.worker_num,
    "server_index": fleet.server_index,
    "server_num": fleet.server_num,
    "worker_endpoints": fleet.worker_endpoints,
    "server_endpoints": fleet.server_endpoints,
    "init_server": fleet.init_server,
    "init_worker": fleet.init_worker,
    "describe": fleet.describe,
}
BEFORE_INIT_WORKER: dict[str, Callable[[], Any]] = {
    "stop_worker": fleet.stop_worker,
    "barrier_worker": fleet.barrier_worker,
    "prefetch": lambda: fleet.prefetch([]),
    "epochs": lambda: fleet.epochs(3),
    "flush": fleet.flush,
    "report": lambda: fleet.report(loss=1.0),
    "stats": fleet.stats,
}


@pytest.mark.parametrize("name", BEFORE_INIT)
def test_before_init_everything_says_call_init(name: str) -> None:
    with pytest.raises(FleetError, match=naming("fleet.init()")):
        BEFORE_INIT[name]()


@pytest.mark.parametrize("name", BEFORE_INIT_WORKER)
def test_before_init_worker_what_needs_servers_says_so(name: str) -> None:
    fleet.init()
    with pytest.raises(FleetError, match=naming("fleet.init_worker()")):
        BEFORE_INIT_WORKER[name]()


def test_a_failed_init_can_be_repeated() -> None:
    with pytest.raises(RoleError):
        fleet.init(fleet.PaddleCloudRoleMaker(is_collective=True, environment={}))
    fleet.init()


@pytest.mark.parametrize("with_model", [False, True])
def test_init_worker_without_model_or_optimizer_says_what_is_missing(with_model: bool) -> None:
    fleet.init()
    if with_model:
        fleet.distributed_model(jobs.Net())
    with pytest.raises(FleetError, match=naming("fleet.distributed_model", "fleet.distributed_optimizer")):
        fleet.init_worker()


def test_distributed_optimizer_before_the_model_says_so() -> None:
    fleet.init()
    with pytest.raises(FleetError, match=naming("fleet.distributed_model(model)")):
        fleet.distributed_optimizer(torch.optim.SGD(jobs.Net().parameters(), lr=0.1))


def test_init_worker_twice_is_an_error() -> None:
    start()
    with pytest.raises(FleetError, match=naming("fleet.init_worker")):
        fleet.init_worker()
    fleet.stop_worker()


def test_functions_of_the_other_role_say_whose_they_are() -> None:
    fleet.init(SERVER)
    with pytest.raises(FleetError, match=naming("init_worker", "is_server")):
        fleet.init_worker()
    with pytest.raises(FleetError, match=naming("fleet.distributed_model")):
        fleet.init_server()
    with pytest.raises(FleetError, match=naming("fleet.init_server()", "fleet.run_server")):
        fleet.run_server()
    with pytest.raises(FleetError, match=naming("init_worker()")):
        fleet.stop_worker()


def test_server_functions_on_a_worker_say_whose_they_are() -> None:
    fleet.init(fleet.UserDefinedRoleMaker(0, "worker", 1, ["127.0.0.1:1"]))
    with pytest.raises(FleetError, match=naming("init_server", "is_server")):
        fleet.init_server()
    with pytest.raises(FleetError, match=naming("init_server()")):
        fleet.run_server()


def test_in_one_process_there_is_no_server_to_run() -> None:
    fleet.init()
    with pytest.raises(FleetError, match=naming("init_worker()")):
        fleet.run_server()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=naming("'distribute_model'", "distributed_model")):
        _ = fleet.distribute_model


# The strategy


def test_the_strategy_may_be_given_to_init_or_to_the_optimizer() -> None:
    for place in ("init", "optimizer", "both"):
        given = jobs.strategy("geo")
        fleet.init(strategy=given if place != "optimizer" else None)
        model = fleet.distributed_model(jobs.Net())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.distributed_optimizer(inner, jobs.strategy("geo") if place != "init" else None)
        fleet.init_worker()
        assert fleet.stats()["mode"] == "geo"
        fleet.stop_worker()


def test_two_different_strategies_are_an_error_that_says_where_to_put_it() -> None:
    fleet.init(strategy=jobs.strategy("async"))
    model = fleet.distributed_model(jobs.Net())
    with pytest.raises(StrategyError, match=naming("fleet.init")):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), jobs.strategy("geo"))


def test_a_strategy_in_use_can_no_longer_change() -> None:
    given = jobs.strategy("async")
    start(given)
    for name, value in (("a_sync", False), ("a_sync_configs", {"k_steps": 3}), ("rpc_timeout", 1.0)):
        with pytest.raises(StrategyError, match=naming(name, "fleet.distributed_optimizer")):
            setattr(given, name, value)
    fleet.stop_worker()


def test_a_config_set_in_place_acts_or_is_refused() -> None:
    given = DistributedStrategy(a_sync=True)
    try:
        given.a_sync_configs["k_steps"] = 5
    except (FleetError, TypeError):
        return
    assert given.mode == "geo", "the setting was accepted and ignored"


def test_geo_settings_without_a_sync_are_refused_before_anything_starts() -> None:
    with pytest.raises(StrategyError, match=naming("k_steps", "a_sync=True")):
        start(DistributedStrategy(a_sync_configs={"k_steps": 5}))


# The example script

EXAMPLE = "examples/wide_deep/train.py"


def results(output: str) -> tuple[str, str]:
    """(last loss, line of the AUC) as printed."""
    loss, auc = (
        re.search(r"last loss (\d+\.\d{6})", output),
        re.search(r"AUC \d\.\d{4} on [\d,]+ held-out rows", output),
    )
    assert loss, output
    assert auc, output
    return loss.group(1), auc.group(0)


@pytest.mark.slow
def test_the_example_gives_the_same_numbers_in_one_process_and_under_fleetrun(tmp_path: Path) -> None:
    script = [EXAMPLE, "--mode", "sync", "--rows", "4000", "--epochs", "1", "--batch_size", "256"]
    alone = jobs.command(script, 200)
    launcher = ["-m", "torchfleet.launch", "--log_dir", str(tmp_path), "--server_num", "1", "--worker_num", "1"]
    launched = jobs.command([*launcher, *script], 200)
    assert results(launched) == results(alone)
    assert results((tmp_path / "latest" / "workerlog.0").read_text()) == results(alone)
    assert results(jobs.command([*launcher, "--heter_worker_num", "1", *script], 200)) == results(alone)
