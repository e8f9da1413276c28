"""What a job waits for, from the shares that its servers and workers report."""

from __future__ import annotations

from typing import Any

from support.cases import each_of
from support.messages import names

from torchfleet.base.monitor.bottleneck import Machine, bottleneck, num_more_servers
from torchfleet.observe.watch.display import JobLoad

ROOMY = Machine(num_cores=16, num_processes=5)


@each_of(
    ("busy", "waits", "machine", "told"),
    [
        (
            [0.97],
            [0.6, 0.6],
            ROOMY,
            "servers are full: 2 more would help (servers compute 97 % of the time, workers wait",
        ),
        ([0.95, 0.93], [0.5] * 8, ROOMY, "servers are full: 3 more would help (servers compute 94 %"),
        ([0.97], [0.6], None, "servers are full: 2 more would help ("),
        ([0.97], [0.6], Machine(4, 3), "2 more would help, and this machine has 1 core free"),
        ([0.97], [0.6], Machine(4, 4), "2 more would help, but no core of this machine is free for one"),
        ([0.2, 0.4], [0.05, 0.1], ROOMY, "workers are what the job waits for: more of them would help (servers"),
        ([0.95], [0.1], ROOMY, "more of them would help, though servers are full too"),
        ([0.3, 0.2], [0.7, 0.8], ROOMY, "wait for the network"),
        ([0.1], [0.1] * 4, Machine(2, 5), "the machine is full: 5 processes on 2 cores"),  # no more workers, then
        ([0.4], [0.7] * 4, Machine(2, 5), "the machine is full: 5 processes on 2 cores"),
    ],
)
def test_it_says_what_the_job_waits_for(
    busy: list[float], waits: list[float], machine: Machine | None, told: str
) -> None:
    assert told in bottleneck(busy, waits, machine)


def test_in_sync_workers_wait_for_each_other() -> None:
    told = bottleneck([0.3], [0.5, 0.6], ROOMY, is_sync=True)
    assert "slowest" in told
    assert "55 %" in told
    assert "slowest" not in bottleneck([0.3], [0.6], ROOMY, is_sync=True)  # there is no other


def test_it_says_nothing_of_what_it_does_not_know() -> None:
    assert bottleneck([], [0.5], ROOMY) == bottleneck([0.5], [], ROOMY) == ""


@each_of(
    ("busy", "wait", "num_more"),
    [
        ([0.9], 0.5, 1),  # twice the requests: 1.8 loops' work, which fills two at 0.9
        ([1.0], 0.75, 4),  # four times the requests: 4 / 0.9, so 5 servers
        ([0.95, 0.95], 0.2, 1),
        ([1.0], 1.0, 22),  # workers that only wait: the model says twenty times, and no more
        ([0.91], 0.0, 1),  # full is full
    ],
)
def test_as_many_more_servers_as_take_the_requests_of_workers_that_do_not_wait(
    busy: list[float], wait: float, num_more: int
) -> None:
    assert num_more_servers(busy, wait) == num_more


def test_the_whole_job_is_the_mean_of_the_time_in_which_it_trained() -> None:
    load = JobLoad(num_cores=8)
    server: dict[str, Any] = {"role": "server", "busy": 0.0}
    worker: dict[str, Any] = {"mode": "async", "waiting": None}
    assert load.look({("server", 0): server, ("worker", 0): worker}) == ""  # still starting: not counted
    for busy, waiting in ((1.0, 0.4), (0.9, 0.6)):
        told = load.look({("server", 0): server | {"busy": busy}, ("worker", 0): worker | {"waiting": waiting}})
        assert "servers" in told
        assert "%" not in told  # the display shows these shares itself
    load.look({("server", 0): server, ("worker", 0): worker | {"waiting": 0.0, "left": True}})
    assert names(load.whole(), 2, "95 %", "50 %")
