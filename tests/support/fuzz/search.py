"""The search: inputs that take new branches are kept and spoiled further; undeclared errors are faults."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from support.fuzz.branches import Branches
from support.fuzz.mutation import Mutator

from torchfleet.base.errors import FleetError

SLOWEST = 2.0  # processor seconds of one execution
_ALWAYS = 3000  # executions that are all watched; of later ones, only some
_EVERY = 16
_MOST_FAULTS = 20


@dataclass
class Target:
    """A decoder: `run` takes bytes, and may raise `allowed` only."""

    name: str
    run: Callable[[bytes], Any]
    seeds: Sequence[bytes]
    modules: Sequence[ModuleType]
    tokens: Sequence[bytes] = ()
    allowed: tuple[type[BaseException], ...] = (FleetError,)


@dataclass
class Found:
    """What a search has come to."""

    executions: int = 0
    kept: list[bytes] = field(default_factory=list)
    taken: int = 0
    branches: int = 0
    faults: dict[str, bytes] = field(default_factory=dict)  # what happened → an input


class Search:
    """One target's. The same seed does the same, as long as it is not cut off by time."""

    def __init__(self, target: Target, seed: int = 0) -> None:
        self._target = target
        self._dice = random.Random(seed)
        self._mutator = Mutator(seed, target.tokens)
        self._branches = Branches(target.modules)
        self.found = Found(kept=list(target.seeds))
        for data in target.seeds:
            self._execute(data, is_watched=True)

    def go_on(self, executions: int, seconds: float = float("inf")) -> Found:
        """Run this many more executions, or until the time is up."""
        deadline, found = time.monotonic() + seconds, self.found
        for _ in range(executions):
            kept = found.kept
            recent = kept[-16:] if self._dice.random() < 0.5 else kept
            data = self._mutator.spoiled(self._dice.choice(recent), self._dice.choice(kept))
            is_watched = found.executions < _ALWAYS or found.executions % _EVERY == 0
            if self._execute(data, is_watched):
                kept.append(data)
            if found.executions % 256 == 0 and (time.monotonic() > deadline or len(found.faults) >= _MOST_FAULTS):
                break
        found.taken, found.branches = self._branches.counts()
        return found

    def _execute(self, data: bytes, is_watched: bool) -> bool:
        """Whether the input took a new way."""
        target, found = self._target, self.found
        found.executions += 1
        size, started = len(self._branches.seen), time.thread_time()
        try:
            if is_watched:
                self._branches.watch(lambda: target.run(data))
            else:
                target.run(data)
        except target.allowed:
            pass
        except BaseException as error:  # whatever it is
            if isinstance(error, KeyboardInterrupt):
                raise
            found.faults.setdefault(f"{type(error).__name__} at {_place(error)}", data)
        if not is_watched and time.thread_time() - started > SLOWEST:
            found.faults.setdefault("slow", data)
        return len(self._branches.seen) > size


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"
