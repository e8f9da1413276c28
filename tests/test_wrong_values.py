"""Wrong values where users give them: a FleetError that says what was expected, never a bare error from within."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import FleetError, ModelError, RoleError, StrategyError, TableError
from torchfleet.ps.tables.settings.rule import Rule


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    with jobs.clean_facade():
        yield


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = fleet.nn.SparseEmbedding(2)

    def forward(self, ids: Any, offsets: Any = None) -> torch.Tensor:
        return self.items(ids, offsets)


def training() -> tuple[torch.nn.Module, Any]:
    """Model and optimizer of a worker in this process."""
    fleet.init()
    model = fleet.distributed_model(Small())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    return model, optimizer


class TestStrategy:
    def test_a_key_cannot_be_set_in_place_and_the_error_shows_how_to_set_it(self) -> None:
        strategy = fleet.DistributedStrategy(a_sync=True)
        configs: Any = strategy.a_sync_configs
        with pytest.raises(StrategyError, match=naming("a_sync_configs['k_steps']")):
            configs["k_steps"] = 1
        assert strategy.a_sync_configs.k_steps == 0
        strategy.a_sync_configs = {**strategy.a_sync_configs, "k_steps": 1}  # as the error says
        assert strategy.mode == "geo"

    def test_an_unknown_key_is_listed_with_those_there_are(self) -> None:
        configs = fleet.DistributedStrategy().a_sync_configs
        with pytest.raises(StrategyError, match=naming("a_sync_configs", "'k_step'", "k_steps")):
            configs["k_step"]
        assert configs.get("k_step", 7) == 7  # a dictionary still
        assert "k_step" not in configs


@pytest.mark.parametrize(
    "make",
    [
        lambda: fleet.nn.SparseEmbedding("4"),  # type: ignore[arg-type]
        lambda: fleet.nn.SparseEmbedding(4.0),  # type: ignore[arg-type]
        lambda: fleet.nn.SparseEmbedding(4, name=3),  # type: ignore[arg-type]
        lambda: fleet.nn.SparseEmbedding(4, seed="a"),  # type: ignore[arg-type]
        lambda: fleet.nn.SparseEmbedding(4, padding_idx="0"),  # type: ignore[arg-type]
        lambda: fleet.nn.SparseEmbedding(4, initializer="uniform"),  # type: ignore[arg-type]
        lambda: fleet.nn.SparseEmbedding(4, num_embeddings="5"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_setting_of_an_embedding_is_named_when_it_is_made(make: Callable[[], Any]) -> None:
    with pytest.raises(ModelError, match=r"SparseEmbedding\(\w+="):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fleet.nn.Uniform("a", 1.0), "Uniform low 'a'"),  # type: ignore[arg-type]
        (lambda: fleet.nn.Constant(None), "Constant value None"),  # type: ignore[arg-type]
        (lambda: fleet.nn.Normal(0.0, [1]), "Normal std [1]"),  # type: ignore[arg-type]
        (lambda: fleet.Shrink("x"), "Shrink delete_after_unseen_days"),  # type: ignore[arg-type]
        (lambda: fleet.Shrink(max_rows=1.5), "Shrink max_rows"),  # type: ignore[arg-type]
        (lambda: fleet.Shrink(max_bytes="8GB"), "Shrink max_bytes"),  # type: ignore[arg-type]
        (lambda: fleet.Shrink(where=5), "Shrink where"),  # type: ignore[arg-type]
        (lambda: fleet.WindowCountEntry(2, "day"), "hours 'day'"),  # type: ignore[arg-type]
        (lambda: fleet.WindowCountEntry(2, max_bytes="x"), "max_bytes"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_number_of_a_policy_or_initializer_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TableError, match=naming(*message.split())):
        make()


class TestFacade:
    @pytest.mark.parametrize("given", ["worker", fleet.DistributedStrategy(), {"role": "worker"}])
    def test_init_wants_a_role_maker(self, given: Any) -> None:
        with pytest.raises(RoleError, match=naming("role_maker", "fleet.PaddleCloudRoleMaker")):
            fleet.init(given)

    @pytest.mark.parametrize("given", [{"a_sync": True}, fleet.DistributedStrategy, "async"])
    @pytest.mark.parametrize("is_collective", [False, True])
    def test_a_strategy_is_a_distributed_strategy(self, given: Any, is_collective: bool) -> None:
        with pytest.raises(StrategyError, match=naming("fleet.init", "fleet.DistributedStrategy")):
            fleet.init(is_collective=is_collective, strategy=given)
        if is_collective:
            return
        fleet.init()
        with pytest.raises(StrategyError, match=naming("fleet.distributed_model", "fleet.DistributedStrategy")):
            fleet.distributed_model(Small(), given)
        model = fleet.distributed_model(Small())
        with pytest.raises(StrategyError, match=naming("fleet.distributed_optimizer", "fleet.DistributedStrategy")):
            fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), given)

    @pytest.mark.parametrize("given", [None, Small, len, "model"], ids=str)
    def test_a_model_is_a_module(self, given: Any) -> None:
        fleet.init()
        with pytest.raises(ModelError, match=naming("distributed_model", "torch.nn.Module")):
            fleet.distributed_model(given)

    @pytest.mark.parametrize("given", [None, torch.optim.SGD, [torch.zeros(1)]], ids=str)
    def test_an_optimizer_is_an_object_of_torchs(self, given: Any) -> None:
        fleet.init()
        fleet.distributed_model(Small())
        with pytest.raises(ModelError, match=naming("distributed_optimizer", "torch.optim.Optimizer")):
            fleet.distributed_optimizer(given)

    @pytest.mark.parametrize("given", [None, 3, print])
    def test_prefetch_wants_batches_and_says_so_at_once(self, given: Any) -> None:
        training()
        with pytest.raises(FleetError, match=naming("fleet.prefetch")):
            fleet.prefetch(given)

    @pytest.mark.parametrize("given", ["x", None, torch.ones(2)])
    def test_a_reported_metric_is_a_number(self, given: Any) -> None:
        training()
        with pytest.raises(FleetError, match=naming("fleet.report(loss=...)")):
            fleet.report(loss=given)

    def test_a_scheduler_has_a_step(self) -> None:
        training()
        with pytest.raises(ModelError, match="distributed_scheduler"):
            fleet.distributed_scheduler(None)

    def test_the_share_of_whole_tables_is_a_number(self) -> None:
        training()
        with pytest.raises(FleetError, match=r"whole_tables\(share='a'\)"):
            fleet.whole_tables("a")  # type: ignore[arg-type]

    @pytest.mark.parametrize("offsets", [torch.tensor([0.0, 1.0]), torch.tensor([False, True])])
    def test_offsets_are_whole_numbers(self, offsets: torch.Tensor) -> None:
        model, _ = training()
        with pytest.raises(ModelError, match=r"offsets.*torch\."):
            model(torch.arange(3), offsets)

    def test_a_loss_function_can_be_called(self) -> None:
        _, optimizer = training()
        wrong: Any = 3
        with pytest.raises(FleetError, match=naming("loss_fn", 3)):
            fleet.train_from_dataset(len, fleet.InMemoryDataset(), optimizer, wrong)

    @pytest.mark.parametrize("rate", [float("inf"), float("nan"), -0.1])
    @pytest.mark.parametrize("is_collective", [False, True])
    def test_a_learning_rate_is_a_finite_number(self, rate: float, is_collective: bool) -> None:
        fleet.init(is_collective=is_collective)
        model = fleet.distributed_model(torch.nn.Linear(2, 1) if is_collective else Small())
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        optimizer.param_groups[-1]["lr"] = rate
        with pytest.raises(ModelError, match=naming("SGD", f"lr={rate}", len(groups) - 1)):
            fleet.distributed_optimizer(optimizer)
        fleet.reset()  # the process group of the collective job

    @pytest.mark.parametrize("rate", [float("inf"), float("nan"), -0.1])
    @pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
    def test_a_rule_of_a_table_has_a_finite_rate(self, rule: str, rate: float) -> None:
        with pytest.raises(TableError, match=naming("rule.lr", "finite", rate)):
            Rule(rule, lr=rate)

    @pytest.mark.parametrize(
        "ids",
        [torch.rand(3), torch.tensor([True]), torch.ones(2, dtype=torch.complex64), np.arange(3), 5, None, "ids"],
        ids=lambda ids: str(getattr(ids, "dtype", ids)),
    )
    def test_ids_are_whole_numbers_in_a_tensor(self, ids: Any) -> None:
        model, _ = training()
        kind = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        with pytest.raises(ModelError, match=naming("items", kind)) as raised:
            model.items(ids)
        assert isinstance(raised.value, TypeError)

    @pytest.mark.parametrize(
        ("name", "second"),
        [
            ("strategy", {"strategy": fleet.DistributedStrategy(a_sync=True)}),
            ("is_collective", {"is_collective": True}),
            ("role_maker", {"role_maker": fleet.UserDefinedRoleMaker(1, worker_num=2, server_endpoints=["a:1"])}),
        ],
    )
    def test_a_second_init_with_other_arguments_names_them(self, name: str, second: dict[str, Any]) -> None:
        fleet.init()
        model = fleet.distributed_model(Small())
        with pytest.raises(FleetError, match=naming("fleet.init", name, "fleet.reset()")):
            fleet.init(**second)
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # the first job is still there
        fleet.reset()
        fleet.init(**second)

    @pytest.mark.parametrize("role_maker", [None, fleet.PaddleCloudRoleMaker])
    def test_a_second_init_with_the_same_arguments_begins_anew(self, role_maker: Any) -> None:
        for _ in range(2):
            fleet.init(role_maker and role_maker())
            fleet.distributed_model(Small())

    @pytest.mark.parametrize(
        "call",
        [
            fleet.stop_worker,
            lambda: fleet.save_persistables("model"),
            lambda: fleet.save("model"),
            lambda: fleet.save_inference_model("model"),
            fleet.barrier_worker,
            fleet.flush,
            fleet.stats,
        ],
    )
    def test_after_stop_worker_every_call_says_that_it_was_called(self, call: Callable[[], Any]) -> None:
        training()
        fleet.stop_worker()
        with pytest.raises(FleetError, match=naming("fleet.stop_worker()", "fleet.init()")):
            call()
        fleet.init()
        with pytest.raises(FleetError, match=naming("fleet.init_worker()")):  # of the new job
            call()


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda: fleet.DistributedStrategy(a_syncc=True), "a_sync"),
        (lambda: setattr(fleet.DistributedStrategy(), "recompute_config", {}), "recompute_configs"),
        (lambda: fleet.DistributedStrategy(a_sync_configs={"kstep": 1}), "k_steps"),
        (lambda: fleet.init_workers, "init_worker"),
        (lambda: fleet.metrics.aucc, "auc"),
        (lambda: fleet.util.get_file_shards, "get_file_shard"),
        (lambda: fleet.callbacks.WandBCallback, "WandbCallback"),
        (lambda: fleet.online.train_pass, "train_passes"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_alone(call: Callable[[], Any], near: str) -> None:
    with pytest.raises((FleetError, AttributeError), match=naming(f"did you mean '{near}'")) as raised:
        call()
    assert len(str(raised.value)) < 120
