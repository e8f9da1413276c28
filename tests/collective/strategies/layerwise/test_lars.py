"""LARS against its formula: alone, on ranks, and on parameters that are cut over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import each_of
from support.collective_oracles import alone, assert_close, batches, gradients, job_of, lars_step, mlp, train, values
from support.messages import naming
from support.ranks import Ranks
from test_lamb import lamb_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchfleet.base.errors import StrategyError
from torchfleet.collective.strategies.layerwise.lars import Lars

CONFIGS = {"lars_coeff": 0.02, "lars_weight_decay": 0.01, "epsilon": 1e-9, "exclude_from_weight_decay": ["bias"]}
LR, MOMENTUM = 0.5, 0.9


def lars_of(model: torch.nn.Module, inner: Any = None, **configs: Any) -> torch.optim.Optimizer:
    inner = inner or torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    strategy = Lars(*alone(lars=True, lars_configs={**CONFIGS, **configs}))
    strategy.look_at(model)
    return strategy.optimizer(inner, {parameter: name for name, parameter in model.named_parameters()})


def plain_training(model: torch.nn.Module, data: list[Any]) -> dict[str, torch.Tensor]:
    """The formula in float64, gradients from the same model; biases by plain momentum."""
    speeds: dict[str, Any] = {}
    for batch in data:
        found = gradients(model, batch)
        for name, parameter in model.named_parameters():
            p, g, v = parameter.detach().double(), found[name].double(), speeds.get(name, 0.0)
            if "bias" in name:
                v = MOMENTUM * v + LR * g
                p = p - v
            else:
                p, v = lars_step(p, g, v, LR, MOMENTUM, 0.02, 0.01, 1e-9)
            speeds[name] = v
            parameter.data.copy_(p)
    return values(model)


def test_steps_follow_the_formula() -> None:
    data = batches(6, -1, 1)
    model, twin = mlp(), mlp()
    train(model, lars_of(model), data)
    assert_close(values(model), plain_training(twin, data), atol=1e-6)  # float32 beside float64
    assert not torch.allclose(values(model)["0.weight"], values(mlp())["0.weight"], atol=1e-3)


def test_excluded_parameters_have_plain_momentum() -> None:
    data = batches(4, -1, 1)
    model, twin = mlp(), mlp()
    train(model, lars_of(model, exclude_from_weight_decay=["weight", "bias"]), data)
    train(twin, torch.optim.SGD(twin.parameters(), lr=LR, momentum=MOMENTUM), data)
    assert_close(values(model), values(twin), atol=1e-6)  # lr is multiplied in before the momentum, not after


def test_a_parameter_or_gradient_of_zeros_moves_by_the_plain_rate() -> None:
    model = torch.nn.ParameterDict({"zero": torch.zeros(3), "still": torch.ones(3)})
    optimizer = lars_of(model, exclude_from_weight_decay=[])
    model["zero"].grad, model["still"].grad = torch.ones(3), torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(model["zero"].detach(), torch.full((3,), -LR))
    torch.testing.assert_close(model["still"].detach(), torch.full((3,), 1 - LR * 0.01))


def test_groups_are_the_users_own_and_their_rates_are_heard() -> None:
    model, twin = mlp(), mlp()
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    optimizer = lars_of(model, inner)
    assert optimizer.param_groups is inner.param_groups
    train(model, optimizer, batches(1, -1, 1))
    before = values(model)
    assert not torch.equal(before["0.weight"], values(twin)["0.weight"])
    inner.param_groups[0].update(lr=0.0, momentum=1e-30)
    train(model, optimizer, batches(1, -1, 1))
    assert_close(values(model), before, atol=1e-9)


def test_a_loaded_state_goes_on_as_before() -> None:
    data = batches(6, -1, 1)
    whole, first, second = mlp(), mlp(), mlp()
    train(whole, lars_of(whole), data)
    before, after = lars_of(first), lars_of(second)
    train(first, before, data[:3])
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    train(second, after, data[3:])
    assert_close(values(second), values(whole), atol=0)


@each_of(
    ("inner", "options", "said"),
    [
        (torch.optim.Adam, {}, "torch.optim.SGD"),
        (torch.optim.SGD, {}, "momentum=0"),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, "nesterov=True"),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, "dampening=0.5"),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, "weight_decay=0.1"),
        (torch.optim.SGD, {"momentum": 0.9, "maximize": True}, "maximize=True"),
    ],
)
def test_an_optimizer_of_another_kind_is_refused(inner: Any, options: Any, said: str) -> None:
    model = mlp()
    with pytest.raises(StrategyError, match="lars") as caught:
        lars_of(model, inner(model.parameters(), lr=0.1, **options))
    assert said in str(caught.value)


def test_an_optimizer_that_has_momentum_already_is_refused() -> None:
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, inner, batches(1, -1, 1))
    with pytest.raises(StrategyError, match=naming("lars=True", "torch.optim.SGD")):
        lars_of(model, inner)


def test_names_to_exclude_must_be_text() -> None:
    with pytest.raises(StrategyError, match="exclude_from_weight_decay"):
        lars_of(mlp(), exclude_from_weight_decay=[3])


def train_on_ranks() -> dict[str, Any]:
    job = job_of(lars=True, lars_configs=CONFIGS)
    model = job.distribute_model(mlp(seed=job.world.rank))
    optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM))
    train(model, optimizer, batches(4, job.world.rank, job.world.size))
    return values(model)


def test_ranks_equal_one_rank_with_the_whole_batch(ranks: Ranks) -> None:
    expected = plain_training(mlp(), batches(4, -1, 2))
    for found in ranks.run(train_on_ranks, 2):
        assert_close(found, expected, atol=1e-6)


def odd_model() -> torch.nn.Module:
    """Rows that two ranks cannot share evenly; of the last layer rank 1 has nothing."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


def train_cut(name: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    model = odd_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = lars_of(model) if name == "lars" else lamb_of(model)
    for x, _ in batches(3, dist.get_rank(), dist.get_world_size()):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_of_parameters_cut_over_ranks_the_whole_norm_is_taken(ranks: Ranks, name: str) -> None:
    model = odd_model()
    optimizer = lars_of(model) if name == "lars" else lamb_of(model)
    for x, _ in batches(3, -1, 2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(train_cut, 2, name=name):
        assert_close(found, values(model), atol=1e-6)
