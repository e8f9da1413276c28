"""In geo training schedulers count the steps of all workers, as a scheduler of plain torch in one process does."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Part
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, OneCycleLR, SequentialLR, StepLR

STEPS = 20  # of each worker

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda inner: StepLR(inner, 10, 0.25),
    "OneCycleLR": lambda inner: OneCycleLR(inner, max_lr=1.0, total_steps=2 * STEPS + 1, cycle_momentum=False),
    "SequentialLR": lambda inner: SequentialLR(inner, [ConstantLR(inner), ExponentialLR(inner, 0.9)], milestones=[3]),
    "ChainedScheduler": lambda inner: ChainedScheduler([ConstantLR(inner, 0.5, 7), ExponentialLR(inner, 0.9)]),
}


def plain_rate(make: Callable[[Any], Any], num_steps: int) -> float:
    """The rate of plain torch in one process after this number of steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
    return float(optimizer.param_groups[0]["lr"])


def run_schedule(
    make: Callable[[Any], Any],
    num_workers: int = 2,
    wrap: bool = False,
    every: int = 1,
    num: int = 1,
    mode: str = "geo",
    first: int = 0,
) -> list[float]:
    """STEPS steps with `num` calls of the scheduler after every `every` steps; it is made before step `first`. Returns
    the rates at the end."""

    def body(part: Part) -> float:
        scheduler: Any = None
        for step in range(STEPS):
            if step == first:
                scheduler = make(part.optimizer)
                scheduler = part.job.distribute_scheduler(scheduler) if wrap else scheduler
            part.model(torch.ones(1, 2)).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            for _ in range(num if scheduler is not None and (step + 1) % every == 0 else 0):
                scheduler.step()
        return float(part.optimizer.param_groups[0]["lr"])

    make_model = lambda: torch.nn.Linear(2, 1)  # noqa: E731
    return jobs.run(body, make_model, lambda m: jobs.sgd(m, 1.0), mode=mode, num_workers=num_workers).results


@each_of("wrap", [False, True])
@each_of("name", SCHEDULES)
def test_a_scheduler_that_advances_with_every_step_counts_those_of_all_workers(name: str, wrap: bool) -> None:
    expected = plain_rate(SCHEDULES[name], 2 * STEPS)
    assert run_schedule(SCHEDULES[name], wrap=wrap) == [pytest.approx(expected, rel=1e-9)] * 2


@each_of(
    ("options", "num_steps"),
    [
        ({"every": 5}, STEPS // 5),  # per epoch
        ({"num": 2}, 2 * STEPS),  # the script counts for all workers by itself
        ({"num": 3}, 3 * STEPS),
        ({"num_workers": 1}, STEPS),
        ({"mode": "async"}, STEPS),
        ({"first": 8}, 2 * (STEPS - 8)),  # made when training was under way
    ],
    ids=str,
)
@each_of("name", ["StepLR", "SequentialLR"])
def test_other_schedulers_count_as_their_script_does(name: str, options: dict[str, Any], num_steps: int) -> None:
    rates = run_schedule(SCHEDULES[name], **options)
    assert rates == [pytest.approx(plain_rate(SCHEDULES[name], num_steps), rel=1e-9)] * options.get("num_workers", 2)


def test_a_schedule_of_a_fixed_length_ends_where_workers_round_their_shares_up() -> None:
    """39 steps, of which each of two workers makes 20."""
    short = lambda inner: OneCycleLR(inner, max_lr=1.0, total_steps=2 * STEPS - 1, cycle_momentum=False)  # noqa: E731
    assert run_schedule(short) == [pytest.approx(plain_rate(short, 2 * STEPS - 1), rel=1e-9)] * 2


def test_its_state_can_be_saved_and_loaded() -> None:
    """Without torchfleet's own objects, which torch.load would refuse."""

    def body(part: Part) -> tuple[int, int]:
        scheduler = StepLR(part.optimizer, 10)
        for _ in range(3):
            part.model(torch.ones(1, 2)).sum().backward()
            part.optimizer.step()
            scheduler.step()
        kept = io.BytesIO()
        torch.save(scheduler.state_dict(), kept)
        kept.seek(0)
        other = StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 10)
        other.load_state_dict(torch.load(kept, weights_only=True))
        assert isinstance(scheduler, StepLR)
        assert scheduler.__reduce_ex__(2)[1] == (StepLR,)  # pickled as its own class
        return scheduler.last_epoch, other.last_epoch

    done = jobs.run(body, lambda: torch.nn.Linear(2, 1), lambda m: jobs.sgd(m, 1.0), mode="geo", num_workers=2)
    assert done.results == [(6, 6)] * 2
