"""The models of links and queues, against formulas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.grids import first_of
from support.messages import naming

from torchfleet.base.errors import RoleError
from torchfleet.base.network_links import Link, Port, parse_link
from torchfleet.launch.simulate.conditions import Conditions, parse_straggler
from torchfleet.launch.simulate.queueing import Queues, Round, StepModel, predict

FREE = Link(1e18, 1e-12)  # costs nothing


@pytest.mark.parametrize("load", first_of([0.7, 0.3]))
def test_waits_at_a_server_are_those_of_an_md1_queue(load: float) -> None:
    """Poisson arrivals, a fixed time of service s: the mean wait before it is s · load / (2 (1 - load))."""
    num = 30_000
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1.0 / load, num))
    queues = Queues(FREE, num, 1)
    waits = [queues.ask(i, time, Round(0.0, 0.0, 1.0))[1] - time - 1.0 for i, time in enumerate(arrivals)]
    assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.1)
    assert queues.busy / arrivals[-1] == pytest.approx(load, rel=0.02)


def test_messages_pass_a_link_one_after_the_other() -> None:
    link = Link(bytes_per_second=1e6, latency=0.001)
    out, into = Port(link), Port(link)
    first = into.end(out.begin(0.0, 1000) + link.latency, 1000)
    second = into.end(out.begin(0.0, 1000) + link.latency, 1000)
    later = into.end(out.begin(0.5, 2000) + link.latency, 2000)
    assert (first, second, later) == pytest.approx((0.002, 0.003, 0.503))


def test_a_ring_moves_every_byte_twice_and_a_tree_doubles() -> None:
    link = Link(bytes_per_second=1e6, latency=0.0001)
    assert link.ring_seconds(8000, 4, passes=2) == pytest.approx(6 * (0.0001 + 0.002))
    assert link.tree_seconds(1000, 5) == pytest.approx(3 * (0.0001 + 0.001))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ({}, 4 / (0.010 + 2 * 0.001)),  # a step: compute, and two requests of a millisecond
        ({"pulls_ahead": True, "pushes_beside": True}, 4 / 0.010),  # requests cost no time of training
        ({"pulls_ahead": True, "pushes_beside": True, "reduce_seconds": 0.002}, 4 / 0.012),
    ],
)
def test_rates_without_queues_are_those_of_one_worker_times_workers(mode: dict[str, object], expected: float) -> None:
    what = Round(0.0, 0.0, 0.001)
    model = StepModel(what, what, np.full(4, 0.010), **mode)
    # Workers that begin apart do not meet at the server: it takes 8 ms of their 12.
    assert predict(model, FREE, 1, 200, 100).steps_per_s == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("mode", [{"is_joint": True}, {"pulls_ahead": True, "reduce_seconds": 1e-9}])
def test_with_jitter_steps_of_all_take_the_time_of_the_slowest_of_them(mode: dict[str, object]) -> None:
    what = Round(0.0, 0.0, 1e-9)
    model = StepModel(what, what, np.full(8, 0.010), jitter=0.3, **mode)
    slowest = Conditions(jitter=0.3)
    drawn = [list(itertools.islice(slowest.step_factors(worker), 4000)) for worker in range(8)]
    assert np.mean(drawn) == pytest.approx(1.0, abs=0.01)
    assert np.std(drawn) == pytest.approx(0.3, rel=0.05)
    expected = 8 / (0.010 * np.max(drawn, axis=0).mean())
    assert predict(model, FREE, 1, 2100, 100).steps_per_s == pytest.approx(expected, rel=0.02)
    assert expected < 0.75 * 8 / 0.010


def test_workers_that_do_not_wait_for_each_other_lose_nothing_to_jitter() -> None:
    what = Round(0.0, 0.0, 1e-9)
    model = StepModel(what, what, np.full(8, 0.010), jitter=0.3, pulls_ahead=True, pushes_beside=True)
    assert predict(model, FREE, 1, 2100, 100).steps_per_s == pytest.approx(8 / 0.010, rel=0.02)


def test_a_full_server_bounds_all_modes_alike() -> None:
    what = Round(0.0, 0.0, 0.001)
    for mode in ({}, {"is_joint": True}, {"pulls_ahead": True, "pushes_beside": True}):
        model = StepModel(what, what, np.full(50, 0.010), **mode)
        found = predict(model, FREE, 1, 60, 20)
        assert found.steps_per_s == pytest.approx(1 / 0.002, rel=0.15 if mode else 0.02)


def test_the_age_of_rows_counts_the_other_workers() -> None:
    """One push of each other worker lies between a pull and its push; asked for a batch ahead, two, and one's own."""
    what = Round(0.0, 0.0, 1e-6)
    apart = predict(StepModel(what, what, np.full(8, 0.01)), FREE, 2, 60, 20)
    ahead = predict(StepModel(what, what, np.full(8, 0.01), pulls_ahead=True, pushes_beside=True), FREE, 2, 60, 20)
    assert apart.staleness == pytest.approx(7, abs=0.5)
    assert ahead.staleness == pytest.approx(15, abs=0.5)


def test_settings_are_read_or_refused() -> None:
    assert parse_link("10Gbit") == Link(1.25e9, 50e-6)
    assert parse_link("100Mbit,0.5ms") == Link(12.5e6, 0.0005)
    for wrong in ("10", "10GB", "0Gbit", "10Gbit,5", "10Gbit,0us", "-1Gbit"):
        with pytest.raises(RoleError, match=naming(f"--link {wrong}")):
            parse_link(wrong)
    assert parse_straggler("0.05x3") == (0.05, 3.0)
    for wrong in ("3", "0x3", "2x3", "0.1x0.5", "x"):
        with pytest.raises(RoleError, match=naming(f"--straggler {wrong}")):
            parse_straggler(wrong)
    slow = Conditions(slow_share=0.05, slow_factor=3.0, seed=1)
    assert len(slow.slow_workers(64)) == 4
    assert slow.slow_workers(64) == Conditions(slow_share=0.05, seed=1).slow_workers(64)
    assert slow.factor("server", min(slow.slow_workers(64)), 64) == 1.0
