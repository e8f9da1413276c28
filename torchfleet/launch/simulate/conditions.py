"""Under which conditions a job is simulated: its link, how fast its workers compute, who is slow."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.launch.simulate.links import Link

# With --step_ms nothing is measured: what a request takes of its server is then given, too.
REQUEST_SECONDS = 50e-6
REQUEST_BYTE_SECONDS = 1e-9

_STRAGGLER = re.compile(r"(?P<share>\d*\.?\d+)x(?P<factor>\d*\.?\d+)")


@dataclass(frozen=True)
class Conditions:
    """What does not come from the script."""

    link: Link = field(default_factory=Link)
    compute_scale: float = 1.0  # virtual seconds per second of this machine's processor
    step_seconds: float | None = None  # what a worker computes for a step; None: it is measured
    slow_share: float = 0.0  # of the workers
    slow_factor: float = 1.0
    seed: int = 0

    def slow_workers(self, num_workers: int) -> set[int]:
        """Which workers are slow: always the same of one seed."""
        num = math.ceil(self.slow_share * num_workers)
        return set(random.Random(self.seed).sample(range(num_workers), num))

    def factor(self, role: str, index: int, num_workers: int) -> float:
        """How many times as long as others a process computes."""
        return self.slow_factor if role == "worker" and index in self.slow_workers(num_workers) else 1.0

    def request_seconds(self, num_bytes: int) -> float:
        """What a request takes of its server beside what is measured."""
        return 0.0 if self.step_seconds is None else REQUEST_SECONDS + num_bytes * REQUEST_BYTE_SECONDS


@dataclass(frozen=True)
class Part:
    """One process of a simulated job."""

    role: str  # "worker" or "server"
    index: int
    environment: dict[str, str]
    log: Path

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True)
class Job:
    """A job to be simulated: the same script for every part, servers first."""

    script: str
    arguments: Sequence[str]
    parts: Sequence[Part]
    servers: Sequence[str]  # their addresses, host:port
    conditions: Conditions
    is_module: bool = False  # the script is the name of a module

    @property
    def num_workers(self) -> int:
        return len(self.parts) - len(self.servers)


def parse_straggler(text: str) -> tuple[float, float]:
    """`0.05x3`: a share of 0.05 of the workers is 3 times slower."""
    found = _STRAGGLER.fullmatch(text)
    if found is None or not 0 < float(found["share"]) <= 1 or float(found["factor"]) < 1:
        raise RoleError(
            f"--straggler {text}: expected a share of the workers above 0, at most 1, and how many times slower they "
            "are, at least 1: 0.05x3"
        )
    return float(found["share"]), float(found["factor"])
