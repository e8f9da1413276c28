"""Precision, shared weights, the life of a gradient and a strategy, which meet in a tensor: jobs that were wrong once,
and jobs drawn from seeds. `python -m support.random_jobs` draws many more."""

from __future__ import annotations

from itertools import product

import pytest
from support.random_jobs import PRECISIONS, STRATEGIES, TOGETHER, Job, check, drawn
from support.ranks import Ranks
from support.searches import examples

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
