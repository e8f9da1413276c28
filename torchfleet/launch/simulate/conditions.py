"""The conditions of a simulation: the link, the speed of the workers, the stragglers."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.base.network_links import Link

# With --step_ms nothing is measured: the service time of a request is then given, too.
REQUEST_SECONDS = 50e-6
REQUEST_BYTE_SECONDS = 1e-9

_STRAGGLER = re.compile(r"(?P<share>\d*\.?\d+)x(?P<factor>\d*\.?\d+)")


@dataclass(frozen=True)
class Conditions:
    """The settings that do not come from the script."""

    link: Link = field(default_factory=Link)
    compute_scale: float = 1.0  # virtual seconds per second of this machine's processor
    step_seconds: float | None = None  # compute time of a step; None: it is measured
    slow_share: float = 0.0  # share of the workers that are slow
    slow_factor: float = 1.0
    jitter: float = 0.0  # standard deviation of the computing time of a worker's steps, over its mean
    seed: int = 0

    def __str__(self) -> str:
        link = f"a link of {8 * self.link.bytes_per_second / 1e9:g} Gbit/s and {1e6 * self.link.latency:g} us"
        steps = "measured" if self.step_seconds is None else f"{1000 * self.step_seconds:g} ms"
        slow = f"{self.slow_share:g} of the workers {self.slow_factor:g} times slower"
        return f"{link}, steps {steps} x {self.compute_scale:g}, {slow}, jitter {self.jitter:g}, seed {self.seed}"

    def slow_workers(self, num_workers: int) -> set[int]:
        """Return the slow workers: always the same for one seed."""
        num = math.ceil(self.slow_share * num_workers)
        return set(random.Random(self.seed).sample(range(num_workers), num))

    def factor(self, role: str, index: int, num_workers: int) -> float:
        """Return the factor by which a process computes slower than a normal one."""
        return self.slow_factor if role == "worker" and index in self.slow_workers(num_workers) else 1.0

    def step_factors(self, worker: int) -> Iterator[float]:
        """Yield, for each step of a worker, the factor by which it computes longer than on average: lognormal, with a
        mean of 1, always the same for one seed."""
        drawn, deviation = random.Random(f"{self.seed} {worker}"), lognormal_deviation(self.jitter)
        while True:
            yield drawn.lognormvariate(-(deviation**2) / 2, deviation) if self.jitter else 1.0

    def request_seconds(self, num_bytes: int) -> float:
        """Return the service time of a request that is added to the measured processor time."""
        return 0.0 if self.step_seconds is None else REQUEST_SECONDS + num_bytes * REQUEST_BYTE_SECONDS


def lognormal_deviation(jitter: float) -> float:
    """Return the deviation of the logarithm of a lognormal number whose own deviation is `jitter` times its mean."""
    return math.sqrt(math.log1p(jitter**2))


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
    """A job to simulate: every part runs the same script; servers come first."""

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
    """Parse `0.05x3`: a share of 0.05 of the workers is 3 times slower."""
    found = _STRAGGLER.fullmatch(text)
    if found is None or not 0 < float(found["share"]) <= 1 or float(found["factor"]) < 1:
        raise RoleError(
            f"--straggler {text}: expected a share of the workers above 0, at most 1, and how many times slower they "
            "are, at least 1: 0.05x3"
        )
    return float(found["share"]), float(found["factor"])
