"""Geo training tells of a plain scheduler that counts the steps of one worker, and of no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import jobs
from support.jobs import Part

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda inner: torch.optim.lr_scheduler.StepLR(inner, 10, 0.25),
    "SequentialLR": lambda inner: torch.optim.lr_scheduler.SequentialLR(
        inner,
        [torch.optim.lr_scheduler.ConstantLR(inner), torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)],
        milestones=[3],
    ),
}


def run_schedule(
    make: Callable[[Any], Any],
    num_workers: int = 2,
    wrap: bool = False,
    every: int = 1,
    num: int = 1,
    mode: str = "geo",
) -> list[float]:
    """Twenty steps with `num` steps of the scheduler after every so many; returns the rates at the end."""

    def body(part: Part) -> float:
        scheduler = make(part.optimizer)
        scheduler = part.job.distribute_scheduler(scheduler) if wrap else scheduler
        for step in range(20):
            part.model(torch.ones(1, 2)).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            for _ in range(num if (step + 1) % every == 0 else 0):
                scheduler.step()
        return float(part.optimizer.param_groups[0]["lr"])

    make_model = lambda: torch.nn.Linear(2, 1)  # noqa: E731
    return jobs.run(body, make_model, lambda m: jobs.sgd(m, 1.0), mode=mode, num_workers=num_workers).results


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plain_scheduler_that_advances_per_batch_is_named_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_schedule(SCHEDULES[name])
    lines = [line for line in capsys.readouterr().err.splitlines() if "distributed_scheduler(scheduler)" in line]
    assert len(lines) == 2, "one from each worker"
    if name != "SequentialLR":  # one of its parts may be named
        assert all(name in line for line in lines)


@pytest.mark.parametrize(
    "options",
    [
        {"wrap": True},
        {"every": 2},  # per epoch
        {"num": 2},  # the script counts for all workers by itself
        {"num_workers": 1},
        {"mode": "async"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["StepLR", "SequentialLR"])
def test_a_scheduler_that_counts_as_it_should_is_left_in_peace(
    name: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rates = run_schedule(SCHEDULES[name], **options)
    assert "distributed_scheduler" not in capsys.readouterr().err
    if name == "StepLR" and options.get("wrap"):
        assert rates == [pytest.approx(0.25**4)] * 2
