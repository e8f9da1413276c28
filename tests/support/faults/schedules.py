"""One schedule: a script, a fleet and faults, all from one seed; run to its end and checked."""

from __future__ import annotations

import contextlib
import functools
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from support.faults.clocks import IDLE, LOADS, MAX_DRIFT, Load
from support.faults.logged_fleet import LoggedFleet
from support.faults.logged_replica_fleet import LoggedReplicaFleet
from support.faults.replica_fleet import ReplicaFleet
from support.faults.setting import Fleet, Setting
from support.faults.workloads.elastic_job import ElasticJob
from support.faults.workloads.geo_rounds import GeoRounds
from support.faults.workloads.lost_workers import AwaitedWorkers, LostWorkers
from support.faults.workloads.meetings import Meetings
from support.faults.workloads.policies import Policies
from support.faults.workloads.slow_starts import SlowStarts
from support.faults.workloads.sync_steps import SyncSteps
from support.faults.workloads.tokens import Tokens
from support.lossy import Faults

from torchfleet.ps.server.job.warm import compile_all
from torchfleet.ps.server.state.budgets import SpareMemory

LONGEST = 1500.0  # virtual seconds of a schedule
HORIZON = 12.0  # seconds in which faults happen

Script = Any
SCRIPTS: dict[str, Callable[[Setting, int], Script]] = {
    "awaited workers": AwaitedWorkers,
    "elastic": ElasticJob,
    "geo": GeoRounds,
    "lost workers": LostWorkers,
    "meetings": Meetings,
    "policies": Policies,
    "slow starts": SlowStarts,
    "sync": SyncSteps,
    "tokens": Tokens,
}
WEIGHTS = {"awaited workers": 1, "elastic": 1, "lost workers": 1}  # they take the most time; others: 2
FLEETS: dict[str, Callable[[Setting], Fleet]] = {
    "both": LoggedReplicaFleet,
    "logged": LoggedFleet,
    "plain": Fleet,
    "replicas": ReplicaFleet,
}


@dataclass(frozen=True)
class Plan:
    """What one seed stands for."""

    seed: int
    script: str
    fleet: str
    num_shards: int
    num_workers: int
    faults: Faults
    num_disturbances: int
    drift: float  # of clocks
    load: Load
    share_lost: float  # of the coordinator's answers
    is_unlucky: bool  # replicas: what goes wrong does so when a view changes, and clocks differ as much as they may

    @classmethod
    def of(cls, seed: int, script: str | None = None, fleet: str | None = None) -> Plan:
        dice = random.Random(f"plan {seed}")
        (chosen_script,) = dice.choices(sorted(SCRIPTS), [WEIGHTS.get(name, 2) for name in sorted(SCRIPTS)])
        chosen = chosen_script, dice.choice(sorted(FLEETS))
        worst = dice.choice([0.0, 0.1, 0.3])
        rates = [dice.uniform(0, worst) for _ in range(3)]
        faults = Faults(rates[0], rates[1], dice.choice([0.002, 0.05, 0.4]), rates[2] / 2)
        return cls(
            seed, script or chosen[0], fleet or chosen[1], dice.randint(1, 2), dice.randint(2, 3), faults,
            dice.randint(0, 5), dice.choice([0.0, MAX_DRIFT]), dice.choice(LOADS), dice.choice([0.0, 0.1]),
            dice.random() < 0.3,
        )  # fmt: skip


@dataclass
class Outcome:
    plan: Plan
    digest: str
    num_ops: int
    num_events: int
    seconds: float  # of virtual time


@functools.cache
def load_kernels() -> None:
    """Compile or load them once per process, in real time: no schedule is to do it."""
    compile_all()


def run(plan: Plan) -> Outcome:
    """Raises what was found wrong: a Violation, Stuck, or the error of a client."""
    load_kernels()
    setting = Setting.make(plan.seed, plan.faults, plan.num_shards, plan.num_workers)
    setting.on_loss = getattr(SCRIPTS[plan.script], "on_loss", setting.on_loss)
    setting.min_workers = getattr(SCRIPTS[plan.script], "min_workers", 0)
    setting.drift, setting.share_lost, setting.is_unlucky = plan.drift, plan.share_lost, plan.is_unlucky
    # What a machine has left of its memory, and what it prints, is no part of a schedule.
    with setting.world.in_charge(), _without_memory_limits(), contextlib.redirect_stderr(io.StringIO()), setting.stack:
        fleet = setting.fleet = FLEETS[plan.fleet](setting)
        script = SCRIPTS[plan.script](setting, plan.seed)
        script.begin()
        _plan_faults(plan, setting, fleet)
        setting.world.load = plan.load
        try:
            setting.world.run(lambda: setting.are_done, LONGEST)
        finally:
            _raise_errors(setting)
        setting.has_faults = False
        _heal(setting, fleet)
        fleet.settle()
        script.check(fleet)
        fleet.check()
        if fleet.can_crash:
            fleet.restart_all()
            script.check(fleet)
            fleet.begin_next_run()
        history = setting.history
        return Outcome(plan, history.digest(), len(history.ops), setting.world.num_events, setting.world.now)


def _without_memory_limits() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(SpareMemory, "check", return_value=None)


def _raise_errors(setting: Setting) -> None:
    for actor in setting.world.actors:
        if actor.error is not None:
            raise actor.error


def _plan_faults(plan: Plan, setting: Setting, fleet: Fleet) -> None:
    dice = random.Random(f"faults {plan.seed}")
    for _ in range(plan.num_disturbances):
        setting.world.at(dice.uniform(0.2, HORIZON), lambda: _disturb(setting, fleet, dice))
    setting.world.at(3 * HORIZON, lambda: _heal(setting, fleet) if setting.has_faults else None)


def _heal(setting: Setting, fleet: Fleet) -> None:
    setting.history.note("healed")
    setting.world.load = IDLE
    fleet.heal()


def _disturb(setting: Setting, fleet: Fleet, dice: random.Random) -> None:
    if not setting.has_faults:
        return
    (kind,) = dice.choices(["stop", "freeze", "cut", "clock", "own"], (2, 1, 2, 1, 4))
    seconds = dice.choice([0.3, 1.0, 5.0, 15.0])
    if kind == "stop":
        node = dice.choice(fleet.nodes)
        setting.history.note(f"{node.name} is stopped for {seconds:g} s")
        node.freeze(seconds)
    elif kind == "freeze":
        actor = dice.choice(setting.world.actors)
        setting.history.note(f"{actor.name} is stopped for {seconds:g} s")
        actor.freeze(seconds)
    elif kind == "clock" and setting.drift:
        node = dice.choice(fleet.nodes)
        setting.history.note(f"the clock of {node.name} jumps")
        node.clock.jump(dice)
    elif kind == "cut":
        one, other = dice.choice(setting.world.actors).name, dice.choice(fleet.nodes).name
        both = dice.random() < 0.5
        setting.history.note(f"{one} -> {other} is cut for {seconds:g} s{', and back' if both else ''}")
        setting.network.cut(one, other, seconds)
        if both:
            setting.network.cut(other, one, seconds)
    else:
        fleet.disturb(dice)
