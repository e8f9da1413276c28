"""Sharding: stages 1 to 3 against training in one process, memory, and what it goes together with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.collective_oracles import alone as without_ranks
from support.messages import naming
from support.ranks import Ranks
from support.sharded_models import (
    CLOSE,
    OPTIMIZERS,
    Net,
    Tied,
    batches,
    chain,
    full,
    of_case,
    sharded,
    share,
    start,
    whole,
)
from torch.distributed import distributed_c10d

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.strategies.mixed_precision.weight_types import WeightTypes
from torchfleet.collective.strategies.sharding.sharding import Sharding
from torchfleet.collective.strategies.sharding.units import Kind, Units
from torchfleet.collective.strategies.sharding.zero import ShardedOptimizer
from torchfleet.collective.tensors.local_tensors import local
from torchfleet.collective.world import Axis, World

pytestmark = pytest.mark.xdist_group("sharding")  # what ranks make for all tests is made once

# Sums over ranks and over the samples of one large batch are made in another order: float32 differs in its last bits.
STAGES = (1, 2, 3)


def alone(optimizer: str, num: int = 3, clip: float = 0.0) -> dict[str, torch.Tensor]:
    """What one process makes of the same data."""
    torch.manual_seed(0)
    model = Net()
    stepping = OPTIMIZERS[optimizer](model.parameters())
    for x, y in batches(num, 8):
        torch.nn.functional.mse_loss(model(x), y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepping.step()
        stepping.zero_grad()
    return whole(model)


def train(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Several trainings, one after the other: what each is called stands before what it gives."""
    return {f"{case['name']} {key}": value for case in cases for key, value in train_one(**case).items()}


def train_one(name: str, optimizer: str, fields: dict[str, Any], num: int = 3, clip: float = 0.0) -> dict[str, Any]:
    job = start(**fields)
    rank, ranks = job.world.rank, job.world.size
    torch.manual_seed(rank)  # the first rank's parameters count
    model = job.distribute_model(Net())
    stepping = job.distribute_optimizer(OPTIMIZERS[optimizer](model.parameters()))
    for x, y in batches(num, 8):
        torch.nn.functional.mse_loss(model(share(x, rank, ranks)), share(y, rank, ranks)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepping.step()
        stepping.zero_grad()
    states = [local(value) for state in stepping.state.values() for value in state.values() if value.dim()]
    return {
        **whole(model),
        "state_bytes": sum(state.nbytes for state in states),
        "local_bytes": sum(local(parameter).nbytes for parameter in model.parameters()),
    }


def assert_trained(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert expected.keys() <= found.keys()  # the user's names
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **CLOSE)


@pytest.fixture(scope="module")
def on_two(ranks: Ranks) -> list[dict[str, Any]]:
    """Every stage with every optimizer, and data parallelism."""
    cases = [
        {"name": f"{stage} {kind}", "optimizer": kind, "fields": sharded(stage)}
        for kind in OPTIMIZERS
        for stage in STAGES
    ]
    merged = {"name": "merged", "optimizer": "momentum", "fields": sharded(3, segment_broadcast_MB=16.0)}
    offloaded = {"name": "offloaded", "optimizer": "adam", "fields": sharded(3, offload=True)}
    return ranks.run(train, 2, cases=[*cases, merged, offloaded, {"name": "plain", "optimizer": "adam", "fields": {}}])


@pytest.fixture(scope="module")
def on_four(ranks: Ranks) -> list[dict[str, Any]]:
    """One group of four, and two groups of two with clipped gradients."""
    in_one_axis = [{"name": f"{stage} adam", "optimizer": "adam", "fields": sharded(stage)} for stage in (1, 3)]
    two = [
        {
            "name": f"{stage} hybrid",
            "optimizer": "momentum",
            "fields": sharded(stage, sharding_degree=2, hybrid_dp=True),
            "clip": 0.5,
        }
        for stage in STAGES
    ]
    return ranks.run(train, 4, cases=in_one_axis + two)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_as_one_process_does(on_two: list[dict[str, Any]], stage: int, optimizer: str) -> None:
    for found in on_two:
        assert_trained(of_case(found, f"{stage} {optimizer}"), alone(optimizer))


def test_layers_that_are_gathered_together_train_as_one_process_does(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert_trained(of_case(found, "merged"), alone("momentum"))


def test_parameters_in_host_memory_train_as_one_process_does(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert_trained(of_case(found, "offloaded"), alone("adam"))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (sharded(2, offload=True), "offload=True stage=2"),
        ({**sharded(3, offload=True), "lamb": True}, "sharding_configs['offload'] lamb"),
        ({**sharded(3, offload=True), "amp": True}, "amp float16"),
    ],
)
def test_what_offload_does_not_go_with_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError, match=naming(*text.split())):
        Sharding(*without_ranks(**fields))


def test_stage_1_equals_data_parallelism_to_the_bit(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        cut, plain = of_case(found, "1 adam"), of_case(found, "plain")
        for name in alone("adam", num=0):
            assert torch.equal(cut[name], plain[name])


@pytest.mark.parametrize("stage", STAGES)
def test_groups_of_two_are_replicated(on_four: list[dict[str, Any]], stage: int) -> None:
    """Two groups, each with a whole model cut in two. Gradients are clipped on the way."""
    expected = alone("momentum", clip=0.5)
    every = [of_case(found, f"{stage} hybrid") for found in on_four]
    for found in every:
        assert_trained(found, expected)
    sizes = [found["state_bytes"] for found in every]
    assert sizes[:2] == sizes[2:]
    assert sum(sizes[:2]) == sum(value.nbytes for value in expected.values())  # momentum: as much as the parameters


def groups_made() -> dict[str, Any]:
    job = start(**sharded(3))
    job.distribute_model(Net())
    return {"axes": ", ".join(job.world.mesh.mesh_dim_names or ()), "groups": len(distributed_c10d._world.pg_names)}


def test_no_group_is_made_for_an_axis_of_one_rank(ranks: Ranks) -> None:
    for found in ranks.run(groups_made, 2):
        assert found == {"axes": "sharding", "groups": 1}  # that of all ranks


def test_memory_falls_as_the_group_grows(on_two: list[dict[str, Any]], on_four: list[dict[str, Any]]) -> None:
    total = sum(value.nbytes for value in alone("adam", num=0).values())
    for everybody in (on_two, on_four):
        size = len(everybody)
        dealt = [of_case(found, "1 adam")["state_bytes"] for found in everybody]
        assert sum(dealt) == 2 * total  # Adam has two states; nothing is kept twice
        assert max(dealt) < 1.5 * 2 * total / size  # whole parameters are dealt out, and the largest is large
        for result in (of_case(found, "3 adam") for found in everybody):
            assert result["local_bytes"] < 1.3 * total / size  # of seven rows four ranks have two, two, two, one
            assert result["state_bytes"] == 2 * result["local_bytes"]


def merge_and_evaluate() -> dict[str, Any]:
    """Half batches are merged, and between backward and step somebody looks at the outputs."""
    made = {}
    for stage in STAGES:
        job = start(gradient_merge=True, gradient_merge_configs={"k_steps": 2}, **sharded(stage))
        torch.manual_seed(0)
        model = job.distribute_model(Net())
        stepping = job.distribute_optimizer(OPTIMIZERS["momentum"](model.parameters()))
        for x, y in batches(3, 8):
            for half in range(2):
                some = [share(share(tensor, half, 2), job.world.rank, 2) for tensor in (x, y)]
                torch.nn.functional.mse_loss(model(some[0]), some[1]).backward()
                exchanged = [parameter.grad is not None for parameter in model.parameters()]
                assert all(exchanged) if half or stage == 1 else not any(exchanged)  # until then they are whole, inside
                with torch.no_grad():
                    model(x)
                assert all(
                    hasattr(parameter, "placements") == (stage > 1) for parameter in model.parameters()
                )  # let go again
                stepping.step()
                stepping.zero_grad()
        made.update({f"{stage} {name}": value for name, value in whole(model).items()})
    return made


def test_gradients_are_merged_and_an_evaluation_before_a_step_changes_nothing(ranks: Ranks) -> None:
    expected = alone("momentum")
    for found in ranks.run(merge_and_evaluate, 2):
        for stage in STAGES:
            assert_trained(of_case(found, str(stage)), expected)


def train_tied() -> dict[str, Any]:
    return {f"{stage} {key}": value for stage in (1, 3) for key, value in train_tied_by(stage).items()}


def train_tied_by(stage: int) -> dict[str, Any]:
    job = start(**sharded(stage, segment_broadcast_MB=0.0))
    torch.manual_seed(0)
    model = job.distribute_model(Tied())
    stepping = job.distribute_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    for step in range(2):
        words = torch.arange(12).view(4, 3) % 11 + step % 2
        share_of = share(words, job.world.rank, job.world.size)
        torch.nn.functional.cross_entropy(model(share_of % 11), share_of[:, 0] % 11).backward()
        stepping.step()
        stepping.zero_grad()
    return {**whole(model), "num": len(list(model.parameters()))}


def test_tied_parameters_stay_tied(ranks: Ranks) -> None:
    (expected,) = ranks.run(train_tied, 1)  # alone nothing is cut
    for found in ranks.run(train_tied, 2):
        assert found["1 num"] == found["3 num"] == expected["1 num"] == 4
        assert_trained(found, {name: value for name, value in expected.items() if not name.endswith("num")})


def half_precision() -> dict[str, Any]:
    return {f"{stage} {key}": value for stage in (1, 3) for key, value in half_precision_by(stage).items()}


def half_precision_by(stage: int) -> dict[str, Any]:
    """Parameters in bfloat16, norms in float32: units of both."""
    job = start(amp=True, amp_configs={"use_pure_bf16": True}, **sharded(stage))
    rank, size = job.world.rank, job.world.size
    torch.manual_seed(0)
    model = job.distribute_model(Net(8))
    stepping = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for x, y in batches(3, 8, 8):
        loss = torch.nn.functional.mse_loss(model(share(x, rank, size)).float(), share(y, rank, size))
        loss.backward()
        stepping.step()
        stepping.zero_grad()
        losses.append(loss.detach())
    kinds = {str(parameter.dtype) for parameter in model.parameters()}
    return {"losses": torch.stack(losses), "kinds": " ".join(sorted(kinds))}


def test_half_precision_with_norms_in_float32_can_be_cut(ranks: Ranks) -> None:
    for found in ranks.run(half_precision, 2):
        assert found["3 kinds"] == found["1 kinds"] == "torch.bfloat16 torch.float32"
        # Gradients are added in bfloat16, which has eight bits, here and there.
        torch.testing.assert_close(found["3 losses"], found["1 losses"], rtol=2e-2, atol=1e-3)


def running_means() -> dict[str, Any]:
    job = start(**sharded(3))
    model = job.distribute_model(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
    for step in range(2):
        x = torch.full((4, 3), float(job.world.rank + 1)) + torch.randn(
            4, 3, generator=torch.Generator().manual_seed(step)
        )
        model(x).sum().backward()
    own = model.module[1].running_mean.clone()
    model.eval()
    model.eval_batch(x)
    return {"own": own, "mean": model.module[1].running_mean, "num": model.module[1].num_batches_tracked}


def test_buffers_are_those_of_the_first_rank_in_an_evaluation(ranks: Ranks) -> None:
    first, second = ranks.run(running_means, 2)
    assert torch.equal(first["own"], first["mean"])
    assert torch.equal(first["mean"], second["mean"])
    assert first["mean"].abs().max() > 0
    assert first["num"] == second["num"] == 2


def tensor_parallel() -> dict[str, Any]:
    return {f"{stage} {key}": value for stage in (1, 3) for key, value in tensor_parallel_by(stage).items()}


def tensor_parallel_by(stage: int) -> dict[str, Any]:
    """Two ranks share every matrix, and two such pairs are sharded."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    configs = {"tensor_parallel": True, "tensor_parallel_configs": {"tensor_parallel_degree": 2}}
    settings = DistributedStrategy(**configs, **sharded(stage))
    world = World(PaddleCloudRoleMaker(is_collective=True).read(), settings)
    torch.manual_seed(0)
    model: Any = Net(8)
    for block in model.blocks:
        parallelize_module(block.inner, world.mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    strategy = Sharding(settings, world)
    model = strategy.convert(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepping = strategy.optimizer(inner, {parameter: name for name, parameter in model.named_parameters()})
    axis = world.axis("sharding")
    for x, y in batches(2, 8, 8):
        strategy.begin_forward(True)
        torch.nn.functional.mse_loss(model(share(x, axis.rank, 2)), share(y, axis.rank, 2)).backward()
        if stage == 1:
            for parameter in model.parameters():
                torch.distributed.all_reduce(local(parameter.grad), torch.distributed.ReduceOp.SUM, axis.group)
                local(parameter.grad).div_(2)
        stepping.step()
        stepping.zero_grad()
    return whole(model)


def test_matrices_that_are_cut_already_can_be_sharded(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = Net(8)
    stepping = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(2, 8, 8):
        torch.nn.functional.mse_loss(model(x), y).backward()
        stepping.step()
        stepping.zero_grad()
    for found in ranks.run(tensor_parallel, 4):
        for stage in (1, 3):
            assert_trained(of_case(found, str(stage)), whole(model))


class Apart(torch.nn.Module):
    """A layer that all ranks have, and a parameter that is each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(7, 3))
        self.own = torch.nn.Parameter(torch.zeros(3))
        self.own.fleet_local = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.own


def train_apart() -> dict[str, Any]:
    made = {}
    for stage in STAGES:
        job = start(**sharded(stage))
        model = job.distribute_model(Apart())
        stepping = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        (model(torch.ones(1, 7)).sum() * (job.world.rank + 1)).backward()
        stepping.step()
        made[f"{stage} own"] = full(model.module.own)
        made[f"{stage} bias"] = full(model.module.layers[0].bias)
    return made


def test_parameters_of_each_rank_alone_are_neither_cut_nor_averaged(ranks: Ranks) -> None:
    first, second = ranks.run(train_apart, 2)
    for stage in STAGES:
        assert torch.equal(first[f"{stage} own"], torch.full((3,), -1.0))
        assert torch.equal(second[f"{stage} own"], torch.full((3,), -2.0))
        assert torch.equal(first[f"{stage} bias"], second[f"{stage} bias"])


def stages_of_a_pipeline() -> dict[str, Any]:
    """Two stages, each with its parameters cut in two."""
    made = {}
    for stage in (1, 3):
        degrees = {"pp_degree": 2, "sharding_degree": 2, "dp_degree": 1}
        configs = {"pipeline": True, "pipeline_configs": {"accumulate_steps": 2}, "hybrid_configs": degrees}
        job = start(**configs, **sharded(stage))
        place = job.world.axis("sharding").rank
        torch.manual_seed(0)
        model = job.distribute_model(chain())
        stepping = job.distribute_optimizer(OPTIMIZERS["momentum"](model.parameters()))
        for x, y in batches(3, 8):
            model.train_batch(share(x, place, 2), share(y, place, 2), torch.nn.functional.mse_loss)
            stepping.step()
            stepping.zero_grad()
        made.update({f"{stage} {name}": value for name, value in whole(model).items()})
    return made


def test_the_stages_of_a_pipeline_can_be_sharded(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = chain()
    stepping = OPTIMIZERS["momentum"](model.parameters())
    for x, y in batches(3, 8):
        torch.nn.functional.mse_loss(model(x), y).backward()
        stepping.step()
        stepping.zero_grad()
    expected = whole(model)
    everybody = ranks.run(stages_of_a_pipeline, 4)
    for stage in (1, 3):
        every = [of_case(found, str(stage)) for found in everybody]
        assert set().union(*every) == set(expected)
        for found in every:
            assert_trained(found, {name: expected[name] for name in found})


# Without ranks: what is dealt out, and what is gathered together


def names_of(model: torch.nn.Module, max_bytes: float, max_share: float = 1.0) -> list[list[str]]:
    names = {module: name for name, module in model.named_modules()}
    return [[names[module] for module in unit] for unit in Units(model, max_bytes, max_share=max_share).find()]


def test_neighbours_are_gathered_together_up_to_the_size() -> None:
    model = Net(8)
    block = sum(parameter.numel() * 4 for parameter in model.blocks[0].parameters())
    assert names_of(model, 3 * block) == [["blocks.0", "blocks.1", "blocks.2"], [""]]
    assert names_of(model, 2 * block) == [["blocks.0", "blocks.1"], ["blocks.2"], [""]]
    assert names_of(model, block) == [["blocks.0"], ["blocks.1"], ["blocks.2"], [""]]
    inside = [[f"blocks.{i}{rest}"] for i in range(3) for rest in (".inner.0", ".inner.2", "")]
    assert names_of(model, 0) == [*inside, [""]]


def test_neighbours_have_no_more_than_a_share_of_the_model_together() -> None:
    model = Net(8)
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in (model, model.blocks[0])]
    two = (2 * sizes[1] + 1) / sizes[0]
    assert names_of(model, math.inf, two) == [["blocks.0", "blocks.1"], ["blocks.2"], [""]]
    assert names_of(model, math.inf, 0.01) == [["blocks.0"], ["blocks.1"], ["blocks.2"], [""]]  # none is taken apart


def test_what_is_used_at_two_places_is_gathered_with_what_is_around_both() -> None:
    assert names_of(Tied(), 0) == [["layers.0"], [""]]
    layer = torch.nn.Linear(2, 2)
    assert names_of(torch.nn.Sequential(layer, torch.nn.ReLU(), layer, torch.nn.Linear(2, 3)), 0) == [["3"], [""]]


def test_modules_that_are_never_called_are_no_units() -> None:
    lists = torch.nn.ModuleList([torch.nn.ModuleList([torch.nn.Linear(2, 2)]), torch.nn.ParameterList([torch.ones(2)])])
    assert names_of(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()), 100) == [["0"], [""]]
    model = torch.nn.Module()
    model.lists = lists
    assert names_of(model, 100) == [["lists.0.0"], [""]]


def test_every_unit_is_of_one_type() -> None:
    model = Net(8).bfloat16()
    for block in model.blocks:
        block.norm.float()
    assert names_of(model, 1 << 20) == [
        *([f"blocks.{i}{rest}"] for i in range(3) for rest in (".norm", "")),
        [""],
    ]
    mixed = torch.nn.Linear(2, 2)
    mixed.bias.data = mixed.bias.data.half()
    with pytest.raises(ModelError, match=naming("Linear", "torch.float16", "torch.float32", "stage 2")):
        names_of(mixed, 0)


class Cosine(torch.nn.Linear):
    """Computes from its weight before autocast casts it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.weight.norm(dim=1)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weights_are_gathered_in_half_precision_where_every_layer_casts_them() -> None:
    half, kept = torch.bfloat16, torch.float32
    types = WeightTypes(DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"}))
    assert types(torch.nn.Linear(4, 4), kept) == types(torch.nn.Conv2d(2, 2, 3), kept) == half
    assert types(torch.nn.MultiheadAttention(4, 2), kept) == half
    own = [Cosine(4, 4), torch.nn.utils.weight_norm(torch.nn.Linear(4, 4)), torch.nn.Embedding(4, 4)]
    assert [types(layer, kept) for layer in own] == [kept] * 3
    model = Tied()
    units = list(Units(model, 1 << 20, gathered=types).find_with_kinds())
    kind_of = {module: kind for unit, kind in reversed(units) for member in unit for module in member.modules()}
    assert kind_of[model.embedding] == Kind(kept, kept)
    assert kind_of[model.layers[0]] == Kind(kept, half)


def test_parameters_are_dealt_out_evenly_and_alike_on_all_ranks() -> None:
    params = [torch.nn.Parameter(torch.zeros(num)) for num in (5, 3, 3, 2, 2, 1)]
    shares = []
    for rank in range(2):
        stepping = ShardedOptimizer(torch.optim.SGD(params, lr=0.1), Axis(rank, 2, None), 100)
        shares.append([len(parameter) for parameter in params if stepping.owns(parameter)])
    assert shares == [[5, 2, 1], [3, 3, 2]]
    assert len(stepping.param_groups[0]["params"]) == 6  # for schedulers and zero_grad


def test_an_optimizer_that_takes_all_parameters_at_once_is_refused() -> None:
    with pytest.raises(ModelError, match="LBFGS"):
        ShardedOptimizer(torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))]), Axis(0, 2, None), 1)
