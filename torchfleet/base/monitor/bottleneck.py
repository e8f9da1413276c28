"""The bottleneck of a job with servers, in one sentence: its servers, its workers, the network or the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FULL = 0.9  # a server whose event loop is busy for this share of the time is saturated
MUCH = 0.2  # without a wait of this share of their time, workers would be a quarter faster


@dataclass(frozen=True)
class Machine:
    """The cores that a job's processes share, and how many processes there are."""

    num_cores: int
    num_processes: int

    @property
    def num_free(self) -> int:
        return max(0, self.num_cores - self.num_processes)


def bottleneck(
    busy: Sequence[float],
    waits: Sequence[float],
    machine: Machine | None,
    is_sync: bool = False,
    tells_shares: bool = True,
) -> str:
    """Describe the bottleneck in a sentence. Returns an empty string if `busy` or `waits` is empty.

    `busy`: for each server, the share of time that its event loop computes. `waits`: for each worker, the share of time
    that it waits for a pull or a push. `machine`: where more processes would run; None if unknown. `tells_shares`:
    append both means to the sentence. `is_sync`: workers make their steps together, if there are several.
    """
    if not busy or not waits:
        return ""
    load, wait = sum(busy) / len(busy), sum(waits) / len(waits)
    shares = f" (servers compute {load:.0%} of the time, workers wait {wait:.0%} of it)".replace("%", " %")
    return _sentence(busy, wait, machine, is_sync and len(waits) > 1) + (shares if tells_shares else "")


def _sentence(busy: Sequence[float], wait: float, machine: Machine | None, is_sync: bool) -> str:
    if max(busy) >= FULL and wait >= MUCH:
        return f"servers are full: {_advice(num_more_servers(busy, wait), machine)}"
    is_full = machine is not None and machine.num_processes > machine.num_cores
    if wait < MUCH and not is_full:
        also = ", though servers are full too" if max(busy) >= FULL else ""
        return f"workers are what the job waits for: more of them would help{also}"
    if machine is not None and is_full:
        return f"the machine is full: {machine.num_processes} processes on {_cores(machine.num_cores)}"
    if is_sync:
        return "workers wait for the slowest of them, or for the network: sync steps are made together"
    return "workers wait for the network, or for encoding and decoding messages"


def num_more_servers(busy: Sequence[float], wait: float) -> int:
    """The number of additional servers with which workers would no longer wait for the share `wait` of their time.

    Without waiting, workers would send 1 / (1 - wait) times as many requests, each with the same work. The result is
    the smallest number of servers that do this work without any being saturated.
    """
    work = sum(busy) / max(0.05, 1.0 - wait)
    return max(1, math.ceil(work / FULL - 1e-9) - len(busy))


def _advice(num_more: int, machine: Machine | None) -> str:
    help_ = f"{num_more} more would help"
    if machine is None or machine.num_free >= num_more:
        return help_
    if not machine.num_free:
        return f"{help_}, but no core of this machine is free for one: add a machine"
    return f"{help_}, and this machine has {_cores(machine.num_free)} free"


def _cores(num: int) -> str:
    return "1 core" if num == 1 else f"{num} cores"
