"""Precision, shared weights, the life of a gradient and a strategy, which meet in a tensor: jobs that were wrong once,
and jobs drawn from seeds. `python -m support.random_jobs` draws many more."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from support.messages import names
from support.random_jobs import PRECISIONS, STRATEGIES, TOGETHER, Job, check, drawn
from support.ranks import Ranks
from support.searches import examples

import torchfleet as fleet
from torchfleet.base.errors import FleetError

pytestmark = pytest.mark.slow


def test_gradients_of_several_passes_are_scaled_and_divided_once(ranks: Ranks) -> None:
    jobs = [
        Job("float16", "none", life, strategy)
        for life, strategy in product(("by hand", "merge", "mean of merge"), ("stage 1", "stage 2", "stage 3"))
    ]
    jobs += [Job("pure float16", "none", "by hand", strategy) for strategy in ("data", "stage 2")]
    jobs += [Job("pure float16", "none", "merge", "stage 3"), Job("bfloat16", "none", "by hand", "stage 2")]
    assert not check(ranks, jobs)


def test_jobs_that_are_drawn_make_the_steps_of_plain_torch(ranks: Ranks) -> None:
    num = examples(40)
    for start in range(0, num, TOGETHER):
        assert not check(ranks, [drawn(seed) for seed in range(start, min(start + TOGETHER, num))])


def test_draws_have_every_feature() -> None:
    jobs = [drawn(seed) for seed in range(200)]
    assert {job.precision for job in jobs} == set(PRECISIONS)
    assert {job.strategy for job in jobs} == set(STRATEGIES)
    assert len(set(jobs)) > 150


def test_tied_weights_train_as_under_amp_alone(ranks: Ranks) -> None:
    strategies = ("stage 1", "stage 2", "stage 3", "units")
    assert not check(
        ranks, [Job(*job) for job in product(("float16", "bfloat16"), ("tied",), ("one pass",), strategies)]
    )


def test_a_load_drops_what_was_gathered_for_a_step(ranks: Ranks) -> None:
    crossed = product(("float32", "float16"), ("data", "stage 2", "units", "averages"))
    assert not check(ranks, [Job(precision, "none", "loaded amid", strategy) for precision, strategy in crossed])


def test_every_backward_pass_is_exchanged(ranks: Ranks) -> None:
    strategies = ("data", "stage 1", "stage 3", "half on the wire", "recomputed", "not fused")
    jobs = [Job("float32", "none", *job) for job in product(("twice", "two calls", "one loss"), strategies)]
    jobs += [Job("float16", "tied", life, "data") for life in ("twice", "two calls", "one loss")]
    assert not check(ranks, jobs)


def refused() -> dict[str, Any]:
    """The errors of second backward passes that strategies refuse."""
    found = {}
    fields: dict[str, dict[str, Any]] = {
        "unused": {"find_unused_parameters": True},
        "dgc": {"dgc": True, "dgc_configs": {"sparsity": [0.5]}},
    }
    for name, own in fields.items():
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**own))
        model = fleet.distributed_model(torch.nn.Linear(128, 128))
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loss = model(torch.ones(2, 128)).sum()
        loss.backward(retain_graph=True)
        try:
            loss.backward()
        except FleetError as error:
            found[name] = str(error)
        fleet.reset()
    return found


def test_second_backward_passes_are_errors_where_they_cannot_be_exchanged(ranks: Ranks) -> None:
    for found in ranks.run(refused, 2):
        assert names(found["unused"], "find_unused_parameters=True", "backward")
        assert names(found["dgc"], "dgc=True", "gradient_merge=True")


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(3, 1) for name in "ab"})

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.heads[name](x)


def passes_to_parts() -> dict[str, Any]:
    """The gradients after two calls and two backward passes, each of which reaches one half of the parameters."""
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
    model = fleet.distributed_model(Heads())
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    first, second = (model(name, torch.full((1, 3), 1.0 + fleet.worker_index())).sum() for name in "ab")
    first.backward()
    second.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_passes_that_reach_a_part_of_the_parameters_each_are_one_exchange(ranks: Ranks) -> None:
    for found in ranks.run(passes_to_parts, 2):
        for name in "ab":
            torch.testing.assert_close(found[f"heads.{name}.weight"], torch.full((1, 3), 1.5))
