"""Python's threads, locks and clocks in virtual time: put in the place of the real ones, in a simulated process.

Conditions, events, semaphores and queues of the standard library are built of one lock, `_allocate_lock` of threading.
With another lock there, all of them wait in virtual time. Locks that were made before stay real ones.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
from collections import deque
from typing import Any

from torchfleet.launch.simulate.inside.actors import NEVER, Actor, Schedule


class VirtualLock:
    """As `_thread.lock`. Whoever waited first gets it first."""

    schedule: Schedule  # of this process

    def __init__(self) -> None:
        self._is_held = False
        self._free_at = 0.0  # by then it was released, on the clock of the actor that released it
        self._waiting: deque[tuple[Actor, float]] = deque()  # actors, and when they give up

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking and timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        if timeout < 0 and timeout != -1:
            raise ValueError("timeout value must be a non-negative number")
        schedule = self.schedule
        now = schedule.reach()
        deadline = now if not blocking else NEVER if timeout == -1 else now + timeout
        is_mine = self._take(now, deadline)
        schedule.go_on()
        return is_mine

    def _take(self, now: float, deadline: float) -> bool:
        """Within a pause."""
        if not self._is_held and self._free_at <= now:
            self._is_held = True
            return True
        if deadline <= now:
            return False
        schedule, me = self.schedule, self.schedule.current
        if self._is_held:
            self._waiting.append((me, deadline))
            schedule.wait(deadline, "a lock")
            if (me, deadline) not in self._waiting:
                return True  # it was handed over
            self._waiting.remove((me, deadline))
            return False
        # Free, but only later: on this actor's clock, the one that has released it still holds it.
        now = schedule.wait(min(self._free_at, deadline), "a lock")
        return self._take(now, deadline)

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        now = self.schedule.now()
        for actor, deadline in self._waiting:
            if deadline >= now:  # else it has given up by then
                self._waiting.remove((actor, deadline))
                self.schedule.wake(actor, now)
                return
        self._is_held, self._free_at = False, now

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]


class _Started:
    """What a thread's start waits for, in real time: the thread is there at once."""

    def __init__(self) -> None:
        self._closed = _thread.allocate_lock()
        self._closed.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._closed.release()

    def wait(self, timeout: float | None = None) -> bool:
        with self._closed:
            return self._is_set


def install(schedule: Schedule, epoch: float) -> None:
    """From now on this process has virtual time. `epoch`: the time of day at its beginning."""
    VirtualLock.schedule = schedule
    threads: Any = threading
    threads._allocate_lock = threads.Lock = VirtualLock
    threads._CRLock = None  # so that RLock is made in Python, of the lock above
    queues: Any = queue
    queues.SimpleQueue = queues._PySimpleQueue
    _install_threads(schedule)
    _install_clocks(schedule, epoch)


def _install_threads(schedule: Schedule) -> None:
    kind: Any = threading.Thread
    really_start, really_join, is_really_alive = kind.start, kind.join, kind.is_alive

    def start(self: Any) -> None:
        if not getattr(self, "_started", None) or self._started.is_set():
            really_start(self)  # which raises
            return
        self._started = _Started()
        schedule.reach()
        actor, work = schedule.add(self.name), self.run
        self.actor, self.run = actor, lambda: schedule.run(actor, work)
        really_start(self)
        schedule.go_on()

    def join(self: Any, timeout: float | None = None) -> None:
        actor = getattr(self, "actor", None)
        if actor is None or actor is schedule.current:
            really_join(self, timeout)  # not started, or itself: which raises
        elif schedule.join(actor, timeout):
            really_join(self)

    def is_alive(self: Any) -> bool:
        actor = getattr(self, "actor", None)
        return is_really_alive(self) if actor is None else not schedule.has_ended(actor)

    kind.start, kind.join, kind.is_alive = start, join, is_alive


def _install_clocks(schedule: Schedule, epoch: float) -> None:
    def sleep(seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        now = schedule.reach()
        if seconds:
            schedule.wait(now + seconds, f"{seconds:g} s to pass")
        schedule.go_on()

    clocks: Any = time
    clocks.sleep = sleep
    clocks.monotonic = clocks.perf_counter = schedule.now
    clocks.monotonic_ns = clocks.perf_counter_ns = lambda: int(schedule.now() * 1e9)
    clocks.time = lambda: epoch + schedule.now()
    real = clocks.clock_gettime
    clocks.clock_gettime = lambda which: schedule.now() if which == clocks.CLOCK_BOOTTIME else real(which)
    clocks.time_ns = lambda: int((epoch + schedule.now()) * 1e9)
    for module in (threading, queue):  # which have taken monotonic by another name
        for name in ("_time", "time"):
            if getattr(module, name, None) is not None:
                setattr(module, name, schedule.now)


def end_threads() -> None:
    """As the interpreter does at its end: pools of threads are closed, and those are waited for that are no daemons."""
    for close in reversed(getattr(threading, "_threading_atexits", [])):
        close()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
