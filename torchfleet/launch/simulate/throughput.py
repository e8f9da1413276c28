"""Forecasts samples per second: a short simulation of few workers, then a queue model for any number."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from torchfleet.base.errors import FleetError
from torchfleet.base.network_links import Link
from torchfleet.launch.simulate.conditions import Conditions, Job
from torchfleet.launch.simulate.forecast import Figures
from torchfleet.launch.simulate.queueing import Prediction, Round, StepModel, predict
from torchfleet.launch.simulate.simulation import Simulation
from torchfleet.launch.simulate.trace import Exchange, Trace
from torchfleet.ps.net.wire import Command

PROFILE_WORKERS, PROFILE_SERVERS = 2, 2  # at most, in the short simulation
_PROFILE_STEPS = 20  # of each worker
_STEPS, _WARM = 30, 10  # of each worker, in the model
_PULLS, _PUSHES = (Command.PULL,), (Command.PUSH, Command.PULL_CHANGED)


@dataclass(frozen=True)
class Profile:
    """A step, as measured by the short simulation."""

    mode: str
    queue_size: int
    pulls_ahead: bool
    compute: float  # seconds of a worker without stragglers
    samples: float  # of a worker
    pull: Exchange
    push: Exchange
    fixed: float  # seconds of a server for a request without rows
    reduced: float  # bytes that a worker all-reduces


def forecast_throughput(job: Job, num_workers: int, num_servers: int, run_dir: Path, say: Callable[[str], None]) -> int:
    """Print the throughput of a job with `num_workers` workers and `num_servers` servers under the conditions of `job`.
    `job` itself is small: it is simulated without stragglers and jitter to measure a step. Returns an exit status."""
    trace = Trace(len(job.servers))
    measured = replace(job, conditions=replace(job.conditions, slow_share=0.0, jitter=0.0))
    simulation = Simulation(measured, run_dir, say, trace=trace, max_steps=_PROFILE_STEPS)
    code = simulation.run()
    if code:
        return code
    assert simulation.figures is not None
    profile = profile_of(simulation, trace, simulation.figures, job.num_workers)
    started = time.monotonic()
    model = step_model(profile, job.conditions, num_workers, num_servers)
    found = predict(model, job.conditions.link, num_servers, _STEPS, _WARM)
    figures = _figures(found, profile, num_workers, num_servers, time.monotonic() - started)
    (run_dir / "simulation.json").write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    for line in (_measured(profile, job), *figures.lines()):
        say(f"[fleetrun] {line}")
    return 0


def profile_of(simulation: Simulation, trace: Trace, figures: Figures, num_workers: int) -> Profile:
    """Return the profile of the steps over which the short simulation measured its rates."""
    if not figures.samples_per_s:
        raise FleetError(
            f"the script made {figures.steps} steps, too few to measure one: give it data for at least "
            f"{_PROFILE_STEPS} steps of {num_workers} workers"
        )
    start, end = figures.start, figures.end
    num_steps = simulation.forecast.num_steps(start, end)
    settings = simulation.forecast.settings
    waits = sum(figures.waits.values())
    return Profile(
        str(settings["mode"]),
        int(settings["queue_size"]),
        bool(settings["pulls_ahead"]),
        num_workers / figures.steps_per_s * (1 - waits),
        figures.samples_per_s / figures.steps_per_s,
        trace.exchange(_PULLS, start, end, num_steps),
        trace.exchange(_PUSHES, start, end, num_steps),
        trace.fixed_seconds(),
        trace.reduced_bytes(start, end, num_steps),
    )


def step_model(profile: Profile, conditions: Conditions, num_workers: int, num_servers: int) -> StepModel:
    """Return the step of a job of this size: every server gets its share of a request."""
    factors = [conditions.factor("worker", worker, num_workers) for worker in range(num_workers)]
    return StepModel(
        pull=_round(profile.pull, num_servers, profile.fixed),
        push=_round(profile.push, num_servers, profile.fixed),
        compute=np.array(factors) * profile.compute,
        jitter=conditions.jitter,
        seed=conditions.seed,
        steps_per_pull=_period(profile.pull),
        steps_per_push=_period(profile.push),
        is_joint=profile.mode == "sync",
        pulls_ahead=profile.pulls_ahead,
        pushes_beside=profile.mode in ("async", "hybrid", "geo"),
        queue_size=profile.queue_size,
        reduce_seconds=_reduce_seconds(conditions.link, profile.reduced, num_workers),
    )


def _round(exchange: Exchange, num_servers: int, fixed: float) -> Round:
    service = exchange.service(num_servers, fixed)
    return Round(exchange.sent / num_servers, exchange.received / num_servers, service)


def _period(exchange: Exchange) -> int:
    """Return the number of steps between two exchanges. An exchange that was never seen does not occur."""
    return max(1, round(1 / exchange.per_step)) if exchange.per_step else 1 << 30


def _reduce_seconds(link: Link, num_bytes: float, num_workers: int) -> float:
    return link.ring_seconds(int(num_bytes), num_workers, passes=2) if num_bytes and num_workers > 1 else 0.0


def _figures(found: Prediction, profile: Profile, num_workers: int, num_servers: int, wall: float) -> Figures:
    seconds = (_STEPS - _WARM) * num_workers / found.steps_per_s
    return Figures(
        num_workers,
        num_servers,
        virtual_seconds=seconds,
        wall_seconds=wall,
        steps=(_STEPS - _WARM) * num_workers,
        end=seconds,
        samples_per_s=found.steps_per_s * profile.samples,
        steps_per_s=found.steps_per_s,
        waits={"pull": found.pull_wait, "push": found.push_wait, "reduce": found.reduce_wait},
        servers_busy=[found.server_busy],
        staleness={"all tables": found.staleness},
    )


def _measured(profile: Profile, job: Job) -> str:
    pull, push = (1000 * one.seconds for one in (profile.pull, profile.push))
    return (
        f"measured with {job.num_workers} workers: {profile.mode}, {profile.samples:,.0f} samples a step, "
        f"{1000 * profile.compute:.2f} ms of computing, {pull:.2f} ms of servers for a pull of "
        f"{profile.pull.received / 1e6:.2f} MB, {push:.2f} ms for a push of {profile.push.sent / 1e6:.2f} MB"
    )
