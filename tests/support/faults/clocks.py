"""Clocks of machines: each runs at its own rate and may jump. And how long a busy machine lets a process wait."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.faults.virtual_world import World

EPOCH = 1_700_000_000.0  # the time of day when a schedule begins
MAX_DRIFT = 0.05  # clocks of two machines differ by at most twice this share
MAX_JUMP = 0.05  # seconds that a monotonic clock may jump forward, once in a while
MAX_WALL_JUMP = 3600.0  # seconds that the time of day may jump, in both directions


@dataclass
class MachineClock:
    """What a process on one machine is told of the time."""

    world: World
    offset: float = 0.0
    rate: float = 1.0
    wall: float = 0.0

    def monotonic(self) -> float:
        return self.world.now * self.rate + self.offset

    def time(self) -> float:
        return EPOCH + self.world.now * self.rate + self.wall

    def jump(self, dice: random.Random) -> None:
        self.offset += dice.uniform(0.0, MAX_JUMP)
        self.wall += dice.uniform(-MAX_WALL_JUMP, MAX_WALL_JUMP)


@dataclass(frozen=True)
class Load:
    """How often a process loses the processor after a step, and for how long: mostly for `mean` seconds, sometimes for
    up to `longest`."""

    share: float = 0.0
    mean: float = 0.0
    longest: float = 0.0

    def pause(self, dice: random.Random) -> float:
        if not self.share or dice.random() >= self.share:
            return 0.0
        return dice.uniform(0.0, self.longest) if dice.random() < 0.02 else dice.expovariate(1 / self.mean)


IDLE = Load()
LOADS = (IDLE, IDLE, Load(0.3, 0.02, 0.4), Load(0.3, 0.06, 3.0))
