"""One worker in hybrid mode: against plain torch, under the strategies of collective training, saved and loaded."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.extras import needing
from support.jobs import TABLES, Batch, Net, Part
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import FleetError, ModelError, StrategyError, TableError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategies.layerwise.lamb import LambAdam
from torchfleet.launch.roles import free_ports

HYBRID = jobs.MODES["hybrid"]
RULES = {"sgd": {"lr": 0.1}, "adagrad": {"lr": 0.1}, "adam": {"lr": 0.01}}
BATCHES = jobs.worker_batches(0, 6)


@contextlib.contextmanager
def hybrid(
    make_optimizer: jobs.MakeOptimizer, num_servers: int = 1, make_model: jobs.MakeModel = Net, **settings: Any
) -> Iterator[Part]:
    """A worker in this thread, with these settings beside the mode's."""
    shared = jobs.Servers(num_servers)
    strategy = DistributedStrategy(**{**HYBRID, **settings})
    part = jobs.make_part(make_model, make_optimizer, strategy, jobs.roles(1, num_servers)[0])
    shared.make_tables(part.job)
    part.worker = jobs.Worker(part.job, shared)
    try:
        yield part
    finally:
        part.worker.stop()


def train(part: Part, batches: list[Batch]) -> None:
    """Rows are pulled after the push before has been applied: as in one process of torch."""
    for batch in batches:
        part.step(batch)
        part.worker.communicator.settle()


def values(part: Part) -> dict[str, torch.Tensor]:
    """The network, and the first rows of all tables."""
    dense = {name: value.detach().clone() for name, value in part.model.named_parameters() if len(value)}
    return {**dense, **{name: part.rows(name, range(num)) for name, num in TABLES.items()}}


def plain() -> Net:
    torch.manual_seed(0)
    return Net()


RECOMPUTE = {"recompute": True, "recompute_configs": {"checkpoints": ["items", "hidden"]}}


@pytest.mark.parametrize(("rule", "settings"), [*((rule, {}) for rule in RULES), ("adam", RECOMPUTE)])
def test_one_worker_equals_torch(rule: str, settings: dict[str, Any]) -> None:
    with hybrid(jobs.fleet_optimizer(rule, **RULES[rule]), num_servers=2, **settings) as part:
        train(part, BATCHES)
        found = values(part)
    model = plain()
    optimizers = jobs.plain_optimizers(rule, model, **RULES[rule])
    for batch in BATCHES:
        jobs.plain_step(model, optimizers, batch)
    jobs.assert_equal_values(found, jobs.values_of(model), 1e-6)


@pytest.mark.parametrize("is_own", [False, True], ids=["torch's", "the optimizer's"])
def test_clipping_schedules_and_an_optimizer_that_servers_do_not_have_work_on_the_network(is_own: bool) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        dense, sparse = jobs.split_parameters(model)
        return torch.optim.RMSprop([{"params": dense}, {"params": sparse, "row_rule": "adagrad"}], lr=0.05)

    norms, expected = [], []
    with hybrid(make) as part:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(part.optimizer, 0.5)
        for batch in BATCHES:
            jobs.loss_of(part.model, batch).backward()
            if is_own:
                norms.append(float(part.optimizer.clip_grad_norm_(0.1)))
            else:
                norms.append(float(torch.nn.utils.clip_grad_norm_(part.model.parameters(), 0.1)))
            part.optimizer.step()
            part.optimizer.zero_grad()
            scheduler.step()
            part.worker.communicator.settle()
        found = values(part)
    model = plain()
    dense, sparse = jobs.split_parameters(model)
    network, rows = torch.optim.RMSprop(dense, lr=0.05), torch.optim.Adagrad(sparse, lr=0.05)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (network, rows)]
    for batch in BATCHES:
        jobs.loss_of(model, batch).backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(dense, 0.1)))
        for optimizer in (network, rows, *schedulers):
            optimizer.step()
        network.zero_grad()
        rows.zero_grad()
    jobs.assert_equal_values(found, jobs.values_of(model), 1e-6)
    assert norms == pytest.approx(expected, abs=1e-6)


def test_gradient_merge_merges_the_network_and_pushes_rows_at_every_step() -> None:
    settings = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    with hybrid(jobs.sgd, **settings) as part:
        train(part, BATCHES)
        found, num_pushes = values(part), part.stats()["pushes"]
    assert num_pushes == len(BATCHES)
    model = plain()
    dense, sparse = jobs.split_parameters(model)
    network, rows = torch.optim.SGD(dense, lr=0.5), torch.optim.SGD(sparse, lr=0.5)
    for number, batch in enumerate(BATCHES, 1):
        jobs.loss_of(model, batch).backward()
        rows.step()
        rows.zero_grad()
        if number % 2 == 0:
            for parameter in dense:
                assert parameter.grad is not None
                parameter.grad /= 2
            network.step()
            network.zero_grad()
    jobs.assert_equal_values(found, jobs.values_of(model), 1e-6)


def test_lamb_steps_the_network_and_adam_the_rows() -> None:
    with hybrid(jobs.fleet_optimizer("adam", lr=0.01), lamb=True) as part:
        train(part, BATCHES)
        found = values(part)
    model = plain()
    dense, sparse = jobs.split_parameters(model)
    network = LambAdam(torch.optim.Adam(dense, lr=0.01), 0.01, set())
    rows = torch.optim.SparseAdam(sparse, lr=0.01)
    for batch in BATCHES:
        jobs.plain_step(model, [network, rows], batch)
    jobs.assert_equal_values(found, jobs.values_of(model), 1e-6)


def amp(scale: float) -> dict[str, Any]:
    return {"amp": True, "amp_configs": {"init_loss_scaling": scale, "decr_every_n_nan_or_inf": 1}}


def test_gradients_of_rows_are_pushed_without_the_scale_of_the_loss() -> None:
    """Beside plain torch in the same half precision; scaled by mistake they would be off by a factor of 1024."""
    with hybrid(jobs.sgd, **amp(1024.0)) as part:
        train(part, BATCHES[:2])
        found = values(part)
    model = plain()
    optimizers = jobs.plain_optimizers("sgd", model, lr=0.5)
    for batch in BATCHES[:2]:
        with torch.autocast("cpu", torch.float16):
            output = model(batch)
        torch.nn.functional.mse_loss(output.float(), batch["y"]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    jobs.assert_equal_values(found, jobs.values_of(model), 1e-2)


def test_a_step_that_overflows_is_skipped_for_rows_too() -> None:
    with hybrid(jobs.sgd, **amp(1e36)) as part:
        before = values(part)
        train(part, BATCHES[:1])
        assert part.stats()["steps"] == 0
        jobs.assert_equal_values(values(part), before)


def test_rows_are_not_in_grad_and_a_scaler_of_torch_is_refused() -> None:
    """Every worker clips the network alike, and unscales it alike; rows are its own."""
    with hybrid(jobs.sgd) as part:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(jobs.loss_of(part.model, BATCHES[0])).backward()
        assert part.model.out.weight.grad is not None
        assert part.model.items.weight.grad is None
        with pytest.raises(StrategyError, match=naming("GradScaler", "DistributedStrategy(amp=True)")):
            scaler.step(part.optimizer)


def test_nothing_of_a_step_with_nan_is_sent_and_the_parameter_is_named() -> None:
    with hybrid(jobs.sgd) as part:
        before = values(part)
        with pytest.raises(TableError, match=naming("step 1", "NaN", "'hidden.weight'")):
            part.step({**BATCHES[0], "x": torch.full_like(BATCHES[0]["x"], torch.nan)})
        jobs.assert_equal_values(values(part), before)


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"amp": True}])
def test_parts_of_the_model_by_themselves_that_would_not_be_exchanged_are_an_error(settings: dict[str, Any]) -> None:
    with hybrid(jobs.sgd, **settings) as part:
        rows = part.model.items(torch.tensor([1, 2])).sum() if settings else 0.0
        (part.model.out(torch.ones(1, 6)).sum() + rows).backward()
        with pytest.raises(FleetError, match="model"):
            part.optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_the_network_and_its_rows_on_a_gpu_equal_torch_with_ids_on_either_side(where: str) -> None:
    rule = RULES["adam"]
    with hybrid(jobs.fleet_optimizer("adam", **rule), make_model=lambda: Net().cuda()) as part:
        for batch in BATCHES:
            moved = {
                name: value.cuda() if value.is_floating_point() else value.to(where) for name, value in batch.items()
            }
            part.step(moved)
            part.worker.communicator.settle()
        found = {name: value.cpu() for name, value in values(part).items()}
    model = plain()
    optimizers = jobs.plain_optimizers("adam", model, **rule)
    for batch in BATCHES:
        jobs.plain_step(model, optimizers, batch)
    jobs.assert_equal_values(found, jobs.values_of(model), 1e-4)


# Saving and loading


@contextlib.contextmanager
def local(rule: str, dirname: str | None = None, **fields: Any) -> Iterator[tuple[torch.nn.Module, Any]]:
    """A job in one process, from init to stop_worker."""
    torch.manual_seed(0)
    with jobs.clean_facade():
        fleet.init()
        model = fleet.distributed_model(Net())
        user = momentum_sgd(model) if rule == "sgd" else jobs.fleet_optimizer(rule, **RULES[rule])(model)
        optimizer = fleet.distributed_optimizer(user, DistributedStrategy(**fields))
        fleet.init_worker(dirname)
        yield model, optimizer
        fleet.stop_worker()


def momentum_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    dense, sparse = jobs.split_parameters(model)
    return torch.optim.SGD([{"params": dense, "momentum": 0.9}, {"params": sparse}], lr=0.1)


@pytest.mark.parametrize("rule", RULES)
def test_training_goes_on_from_hybrid_to_sync_and_back_as_if_nothing_had_been(rule: str, tmp_path: Path) -> None:
    """With the optimizer's state: every third of the batches in another mode equals all of them in torch."""
    folder = str(tmp_path / "model")
    batches = jobs.worker_batches(0, 9)
    for number, fields in enumerate((HYBRID, {}, HYBRID)):
        with local(rule, folder if number else None, **fields) as (model, optimizer):
            for batch in batches[3 * number : 3 * number + 3]:
                jobs.plain_step(model, [optimizer], batch)
                fleet.flush()
            fleet.save_persistables(folder)
            dense = {name: value.detach().clone() for name, value in model.named_parameters() if len(value)}
    expected = plain()
    optimizers = [momentum_sgd(expected)] if rule == "sgd" else jobs.plain_optimizers(rule, expected, **RULES[rule])
    for batch in batches:
        jobs.plain_step(expected, optimizers, batch)
    wanted = {name: value for name, value in jobs.values_of(expected).items() if name in dense}
    jobs.assert_equal_values(dense, wanted, 1e-6)


# Refusals


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline": ({"pipeline": True}, "pipeline=True hybrid"),
    "tensor_parallel": ({"tensor_parallel": True}, "tensor_parallel=True hybrid"),
    "stage 2": ({"sharding": True, "sharding_configs": {"stage": 2}}, "'stage']=2 'stage': 1"),
    "pure": ({"amp": True, "amp_configs": {"use_pure_bf16": True}}, "use_pure_bf16 float32"),
    "compiled": ({"build_strategy": fleet.BuildStrategy(fuse_bn_act_ops=True)}, "fuse_bn_act_ops"),
    "receiver": (
        {"a_sync_configs": {"hybrid": True, "independent_recv_thread": True}},
        "independent_recv_thread async",
    ),
}


@each_of("name", REFUSED)
def test_what_cannot_be_had_beside_rows_is_refused(name: str) -> None:
    fields, text = REFUSED[name]
    with pytest.raises(StrategyError, match=naming(*text.split())):
        DistributedStrategy(**{**HYBRID, **fields}).freeze("the test")


@pytest.mark.parametrize("other", [{"k_steps": 5}, {"half_async": True}])
def test_two_modes_at_once_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match=naming("hybrid", *other)):
        DistributedStrategy(a_sync=True, a_sync_configs={"hybrid": True, **other})


def test_how_rows_are_sent_and_collective_strategies_are_accepted() -> None:
    configs = {"hybrid": True, "send_queue_size": 4, "hybrid_keep_seconds": 1.0}
    strategy = DistributedStrategy(a_sync=True, a_sync_configs=configs, amp=True, sharding=True)
    strategy.freeze("the test")
    assert strategy.mode == "hybrid"


def test_a_row_rule_that_is_not_known_is_named() -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(model.parameters()), "row_rule": "nadam"}], lr=0.1)

    with pytest.raises(ModelError, match=naming("row_rule='nadam'", "sgd", "adagrad", "adam")):
        jobs.make_part(Net, make, DistributedStrategy(**HYBRID), jobs.roles(1, 1)[0])


def test_an_unknown_optimizer_without_a_row_rule_says_how_to_give_one() -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.NAdam(model.parameters())

    with pytest.raises(ModelError, match=naming("NAdam", "row_rule", "adagrad")):
        jobs.make_part(Net, make, DistributedStrategy(**HYBRID), jobs.roles(1, 1)[0])


@needing("prometheus_client")
def test_a_worker_and_its_network_share_one_metrics_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_METRICS_PORT", str(port := free_ports(1)[0]))
    with hybrid(jobs.sgd) as part:
        train(part, BATCHES[:2])
        part.worker.status.write(now=True)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as found:
            assert 'torchfleet_steps_total{index="0",role="worker"} 2.0' in found.read().decode()
