"""LAMB against its formula, alone and on ranks; on parameters cut over ranks it is tested beside LARS."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import each_of
from support.collective_oracles import alone, assert_close, batches, gradients, job_of, lamb_step, mlp, train, values
from support.ranks import Ranks

from torchfleet.base.errors import StrategyError
from torchfleet.collective.strategies.layerwise.lamb import Lamb

CONFIGS = {"lamb_weight_decay": 0.1, "exclude_from_weight_decay": ["bias", "2."]}
OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6}


def lamb_of(model: torch.nn.Module, inner: Any = None, **configs: Any) -> torch.optim.Optimizer:
    inner = inner or torch.optim.Adam(model.parameters(), **OPTIONS)
    strategy = Lamb(*alone(lamb=True, lamb_configs={**CONFIGS, **configs}))
    strategy.look_at(model)
    return strategy.optimizer(inner, {parameter: name for name, parameter in model.named_parameters()})


def plain_training(model: torch.nn.Module, data: list[Any]) -> dict[str, torch.Tensor]:
    """The formula in float64, gradients from the same model."""
    states: dict[str, Any] = {}
    for step, batch in enumerate(data, start=1):
        found = gradients(model, batch)
        for name, parameter in model.named_parameters():
            decay = 0.0 if "bias" in name or "2." in name else 0.1
            m, v = states.get(name, (0.0, 0.0))
            p, m, v = lamb_step(parameter.detach().double(), found[name].double(), m, v, step, decay=decay, **OPTIONS)
            states[name] = m, v
            parameter.data.copy_(p)
    return values(model)


def test_steps_follow_the_formula() -> None:
    data = batches(6, -1, 1)
    model, twin = mlp(), mlp()
    train(model, lamb_of(model), data)
    # float32 beside float64; Adam divides small gradients by small roots
    assert_close(values(model), plain_training(twin, data), atol=1e-5)
    assert not torch.allclose(values(model)["0.weight"], values(mlp())["0.weight"], atol=1e-2)


def test_a_parameter_of_zeros_moves_by_the_plain_rate() -> None:
    model = torch.nn.ParameterDict({"zero": torch.zeros(3)})
    optimizer = lamb_of(model, exclude_from_weight_decay=[])
    model["zero"].grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(model["zero"].detach(), torch.full((3,), -0.05))


def test_parameters_without_a_gradient_keep_their_own_count() -> None:
    model = torch.nn.ParameterDict({"often": torch.ones(2), "late": torch.ones(2)})
    optimizer = lamb_of(model, exclude_from_weight_decay=[])
    model["often"].grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(model["late"].detach(), torch.ones(2))
    model["late"].grad = torch.ones(2)
    optimizer.step()
    expected, _, _ = lamb_step(torch.ones(2), torch.ones(2), 0.0, 0.0, 1, decay=0.1, **OPTIONS)
    torch.testing.assert_close(model["late"].detach(), expected)


def test_a_loaded_state_goes_on_as_before() -> None:
    data = batches(6, -1, 1)
    whole, first, second = mlp(), mlp(), mlp()
    train(whole, lamb_of(whole), data)
    before, after = lamb_of(first), lamb_of(second)
    train(first, before, data[:3])
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    train(second, after, data[3:])
    assert_close(values(second), values(whole), atol=0)


@each_of(
    ("inner", "options", "said"),
    [
        (torch.optim.SGD, {}, "torch.optim.Adam"),
        (torch.optim.AdamW, {}, "found AdamW"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "weight_decay=0.1"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.Adam, {"maximize": True}, "maximize=True"),
    ],
)
def test_an_optimizer_of_another_kind_is_refused(inner: Any, options: Any, said: str) -> None:
    model = mlp()
    with pytest.raises(StrategyError, match="lamb") as caught:
        lamb_of(model, inner(model.parameters(), lr=0.1, **options))
    assert said in str(caught.value)


def train_on_ranks(merge: int, **fields: Any) -> dict[str, Any]:
    job = job_of(lamb=True, lamb_configs=CONFIGS, **fields)
    model = job.distribute_model(mlp(seed=job.world.rank))
    optimizer = job.distribute_optimizer(torch.optim.Adam(model.parameters(), **OPTIONS))
    whole = batches(4, job.world.rank, job.world.size)
    train(model, optimizer, [(x[i::merge], y[i::merge]) for x, y in whole for i in range(merge)])
    return values(model)


@pytest.mark.parametrize("merge", [1, 2])
def test_ranks_equal_one_rank_with_the_whole_batch(ranks: Ranks, merge: int) -> None:
    expected = plain_training(mlp(), batches(4, -1, 2))
    fields: Any = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": merge}} if merge > 1 else {}
    for found in ranks.run(train_on_ranks, 2, merge=merge, **fields):
        assert_close(found, expected, atol=1e-5)
