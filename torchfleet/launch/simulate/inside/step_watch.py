"""Reports the steps of a simulated worker to the coordinator."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from torchfleet.api.job.worker_role import WorkerRole
from torchfleet.launch.simulate.inside.actors import NEVER, Schedule
from torchfleet.launch.simulate.packets import STEPS
from torchfleet.ps.worker.distributed_optimizer import DistributedOptimizer
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.modes.communicator import Communicator

_STEP = struct.Struct("<d?xxxxxxxqddd")
STEP, FINAL, SETTINGS = 0, 1, 2  # mailboxes of the coordinator: a step; the statistics at the end; the strategy


@dataclass(slots=True)
class StepRecord:
    """The end of a step, with the samples trained and the seconds waited up to then."""

    time: float
    is_broken: bool  # since the previous step the worker also did something else, such as an evaluation or a barrier
    samples: int
    pull: float
    push: float
    reduce: float

    def encode(self) -> bytes:
        return _STEP.pack(self.time, self.is_broken, self.samples, self.pull, self.push, self.reduce)


def decode_step(frame: memoryview) -> StepRecord:
    return StepRecord(*_STEP.unpack(frame))


def decode_body(frame: memoryview) -> dict[str, Any]:
    return msgspec.msgpack.decode(frame, type=dict[str, Any])


class StepWatch:
    """Watches the steps of this process's worker. If `step_seconds` is given, a step takes that time. `factors`: for
    each step, the factor by which it takes longer."""

    def __init__(self, schedule: Schedule, step_seconds: float, factors: Iterator[float]) -> None:
        self._schedule, self._step_seconds, self._factors = schedule, step_seconds, factors
        self._is_broken = True  # the time before the first step is not a step
        self._settings: dict[str, Any] = {}
        self._may_pull_ahead = False
        self._reduce_seconds = 0.0  # that the worker waited for other ranks

    def install(self) -> None:
        """Start to report steps."""
        watch = self
        _around(DistributedOptimizer, "_begin_step", after=watch.begin)  # of every mode, hybrid too
        _around(DistributedOptimizer, "step_apart", before=watch.begin)
        _around(WorkerRole, "_bind", after=watch.tell_settings)
        _around(WorkerRole, "_step_made", after=watch.note)
        _around(WorkerRole, "barrier", after=watch.break_off)
        _around(WorkerRole, "stop", after=watch.end)
        _around(Communicator, "pull", before=watch.look_at_pull)
        _around(Engine, "prefetch", before=watch.look_at_prefetch)

    def begin(self, *arguments: Any) -> None:
        """Called when the gradients of a step are ready."""
        if self._step_seconds:
            self._schedule.pause()
            self._schedule.spend(self._step_seconds * self._schedule.pace)
            self._schedule.go_on()

    def look_at_pull(self, communicator: Communicator, keys: Any, create: bool, *more: Any, **named: Any) -> None:
        """Called for a pull. Without `create` the rows are read for prediction."""
        if not create:
            self._is_broken = True

    def break_off(self, *arguments: Any) -> None:
        self._is_broken = True

    def note_reduce(self, seconds: float) -> None:
        self._reduce_seconds += seconds

    def note(self, role: WorkerRole, result: Any) -> None:
        self._schedule.pause()
        waited = role.communicator.stats()
        pull, push = (waited[f"{name}_wait_ms"] * waited["steps"] / 1000 for name in ("pull", "push"))
        now = self._schedule.current.time
        record = StepRecord(now, self._is_broken, role.engine.num_samples, pull, push, self._reduce_seconds)
        self._is_broken = False
        self._schedule.post((STEPS, STEP), 0, [record.encode()], hops=NEVER)
        self._schedule.pace = next(self._factors)  # until the end of the next step
        self._schedule.go_on()

    def tell_settings(self, role: WorkerRole, result: Any) -> None:
        configs = role.strategy.a_sync_configs
        self._may_pull_ahead = role.communicator.pulls_ahead
        self._settings = {"mode": role.strategy.mode, "queue_size": configs.send_queue_size, "pulls_ahead": False}
        self._tell(SETTINGS, self._settings)

    def look_at_prefetch(self, engine: Engine, *arguments: Any) -> None:
        """Called for a prefetch. The mode and the script decide whether rows are pulled one batch ahead."""
        if self._may_pull_ahead and not self._settings["pulls_ahead"]:
            self._settings["pulls_ahead"] = True
            self._tell(SETTINGS, self._settings)

    def end(self, role: WorkerRole, final: Mapping[str, Any]) -> None:
        self._tell(FINAL, final)

    def _tell(self, box: int, body: Mapping[str, Any]) -> None:
        self._schedule.pause()
        self._schedule.post((STEPS, box), 0, [msgspec.msgpack.encode(body)], hops=NEVER)
        self._schedule.go_on()


def _around(owner: type, name: str, before: Any = None, after: Any = None) -> None:
    """Wrap a method: call `before` with its arguments, and `after` with the object and the result."""
    method = getattr(owner, name)

    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(self, *arguments, **named)
        result = method(self, *arguments, **named)
        if after is not None:
            after(self, result)
        return result

    setattr(owner, name, called)
