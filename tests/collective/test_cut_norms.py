"""tensor_parallel × stages of sharding × amp × what takes norms of whole tensors: clipping, LARS and LAMB.

Four ranks, two along the model axis and two that read different data. One process with dense layers is the oracle of
the gradients; of the step it is the formula of each paper, on the whole gradients that the ranks had.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.collective_oracles import job_of, lamb_step, lars_step
from support.ranks import Ranks
from support.sharded_models import full, sharded, whole
from torch import nn

from torchfleet.collective.layers.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

pytestmark = pytest.mark.xdist_group("cut norms")

WORDS, DIM, INNER, CLIP = 12, 8, 16, 0.05
LR, MOMENTUM, BETAS, EPS, DECAY = 0.5, 0.9, (0.8, 0.95), 1e-6, 0.01
STAGES, PRECISIONS, RULES = (0, 1, 2, 3), ("float32", "bfloat16"), ("clip", "lars", "lamb")
CASES = list(itertools.product(STAGES, PRECISIONS))
SOME = [case for number, case in enumerate(CASES) if number % 4 in (0, 3)]  # every stage, and both precisions
OTHERS = [case for case in CASES if case not in SOME]
LARS = {"lars_coeff": 0.02, "lars_weight_decay": DECAY, "epsilon": 1e-9, "exclude_from_weight_decay": ["bias"]}
LAMB = {"lamb_weight_decay": DECAY, "exclude_from_weight_decay": ["bias"]}


class Net(nn.Module):
    def __init__(self, parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        column, row = (ColumnParallelLinear, RowParallelLinear) if parallel else (nn.Linear, nn.Linear)
        self.words = (VocabParallelEmbedding if parallel else nn.Embedding)(WORDS, DIM)
        self.norm = nn.LayerNorm(DIM)
        up = column(DIM, INNER, **({"gather_output": False} if parallel else {}))
        down = row(INNER, DIM, **({"input_is_parallel": True} if parallel else {}))
        self.inner = nn.Sequential(up, nn.ReLU(), down)
        self.head = column(DIM, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.words(ids)
        return self.head(self.norm(rows + self.inner(rows))).float().mean(1)


def loss_of(model: Any, step: int, replica: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * step + replica)
    ids, target = torch.randint(0, WORDS, (4, 5), generator=random), torch.randn(4, 4, generator=random)
    return (model(ids) - target).square().mean()  # type: ignore[no-any-return]


def settings(stage: int, precision: str, rule: str) -> dict[str, Any]:
    found: dict[str, Any] = {"tensor_parallel": True, "tensor_parallel_configs": {"tensor_parallel_degree": 2}}
    found |= sharded(stage) if stage else {}
    found |= {"amp": True, "amp_configs": {"dtype": precision}} if precision == "bfloat16" else {}
    found |= {"lars": {"lars": True, "lars_configs": LARS}, "lamb": {"lamb": True, "lamb_configs": LAMB}}.get(rule, {})
    return found


def optimizer_of(parameters: Any, rule: str) -> torch.optim.Optimizer:
    if rule == "lamb":
        return torch.optim.Adam(parameters, lr=LR, betas=BETAS, eps=EPS)
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


def train_all(cases: list[tuple[int, str]]) -> dict[str, Any]:
    """What each case has found, one after the other: what torch makes of shards at first is made once."""
    return {case_name(stage, precision): train_one(stage, precision) for stage, precision in cases}


def case_name(stage: int, precision: str) -> str:
    return f"stage {stage}, {precision}"


def train_one(stage: int, precision: str) -> dict[str, Any]:
    """Of every rule and step: the whole gradients, the norm and the whole parameters afterwards."""
    found: dict[str, Any] = {}
    for rule in RULES:
        job = job_of(**settings(stage, precision, rule))
        model = job.distribute_model(Net(parallel=True))
        optimizer = job.distribute_optimizer(optimizer_of(model.parameters(), rule))
        for step in range(2):
            loss_of(model, step, job.data_shard[0]).backward()
            gradients = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
            if rule == "clip":
                optimizer.clip_grad_norm_(CLIP)
            optimizer.step()
            optimizer.zero_grad()
            key = f"{rule} {step}"
            found |= {f"{key} gradient {name}": gradient for name, gradient in gradients.items()}
            found |= {f"{key} value {name}": value for name, value in whole(model).items()}
            found[f"{key} norm"] = optimizer.grad_norm.clone()
    return found


@pytest.fixture(scope="module")
def some(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks.run(train_all, 4, cases=SOME)


@pytest.fixture(scope="module")
def others(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks.run(train_all, 4, cases=OTHERS)


@pytest.fixture(
    params=[*SOME, *(pytest.param(case, marks=pytest.mark.long) for case in OTHERS)], ids=lambda case: case_name(*case)
)
def trained(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    """The precision, and what every rank found."""
    stage, precision = request.param
    all_cases = request.getfixturevalue("some" if request.param in SOME else "others")
    return precision, [found[case_name(stage, precision)] for found in all_cases]


def of_step(found: dict[str, Any], key: str, kind: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{key} {kind} "): x for name, x in found.items() if name.startswith(f"{key} {kind} ")}


def stepped(rule: str, p: torch.Tensor, g: torch.Tensor, state: Any, step: int, is_excluded: bool) -> Any:
    """(p, state) of one parameter after a step with its whole gradient."""
    if rule == "lamb":
        decay = 0.0 if is_excluded else DECAY
        p, m, v = lamb_step(p, g, *(state or (0.0, 0.0)), step + 1, lr=LR, betas=BETAS, eps=EPS, decay=decay)
        return p, (m, v)
    velocity = 0.0 if state is None else state
    if rule == "lars" and not is_excluded:
        return lars_step(p, g, velocity, LR, MOMENTUM, LARS["lars_coeff"], DECAY, LARS["epsilon"])
    velocity = MOMENTUM * velocity + (LR * g if rule == "lars" else g)
    return p - (velocity if rule == "lars" else LR * velocity), velocity


def close(found: torch.Tensor, expected: torch.Tensor, name: str, rtol: float, atol: float) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("rule", RULES)
def test_steps_take_the_norms_of_whole_tensors(trained: tuple[str, list[dict[str, Any]]], rule: str) -> None:
    precision, (first, *others) = trained
    dense, states = Net(parallel=False), {}
    tolerance = 1e-5 if precision == "float32" else 2e-2
    for step in range(2):
        key = f"{rule} {step}"
        gradients, values = of_step(first, key, "gradient"), of_step(first, key, "value")
        dense.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            torch.stack([loss_of(dense, step, replica) for replica in (0, 1)]).mean().backward()
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).double().norm()
        factor = min(1.0, CLIP / (float(norm) + 1e-6)) if rule == "clip" else 1.0
        if rule == "clip":
            close(first[f"{key} norm"].double(), norm, "norm", rtol=1e-6, atol=0)
        for name, parameter in dense.named_parameters():
            close(gradients[name], parameter.grad, name, rtol=tolerance, atol=tolerance)
            p, g = parameter.detach().double(), factor * gradients[name].double()
            expected, states[name] = stepped(rule, p, g, states.get(name), step, "bias" in name)
            close(values[name].double(), expected, name, rtol=1e-5, atol=2e-6)
            parameter.data.copy_(values[name])
        for name, value in values.items():
            assert all(torch.equal(of_step(other, key, "value")[name], value) for other in others), name
