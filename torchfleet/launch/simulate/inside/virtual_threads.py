"""Python's threads, locks and clocks in virtual time. They replace the real ones in a simulated process.

Conditions, events, semaphores and queues of the standard library are built on one lock, threading._allocate_lock.
Replacing that lock makes all of them wait in virtual time. Locks created earlier stay real.
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
    """Like `_thread.lock`. Waiting actors get it in first-come, first-served order."""

    schedule: Schedule  # of this process

    def __init__(self) -> None:
        self._is_held = False
        self._free_at = 0.0  # when it was released, by the clock of the actor that released it
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
        """Call within a pause."""
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
        # Released at a later time: by this actor's clock, the other actor still holds it.
        now = schedule.wait(min(self._free_at, deadline), "a lock")
        return self._take(now, deadline)

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        now = self.schedule.now()
        for actor, deadline in self._waiting:
            if deadline >= now:  # otherwise its timeout has expired
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
    """Replaces the event that Thread.start waits for. It blocks in real time: a start takes no virtual time."""

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
    """Switch this process to virtual time. `epoch`: the time of day at virtual time 0."""
    VirtualLock.schedule = schedule
    threads: Any = threading
    threads._allocate_lock = threads.Lock = VirtualLock
    threads._CRLock = None  # so that RLock uses the Python version, built on the lock above
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
            really_join(self, timeout)  # raises: not started, or the current thread
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
    for module in (threading, queue):  # these imported monotonic under another name
        for name in ("_time", "time"):
            if getattr(module, name, None) is not None:
                setattr(module, name, schedule.now)


def end_threads() -> None:
    """Do what the interpreter does at exit: close thread pools and join all threads that are not daemons."""
    for close in reversed(getattr(threading, "_threading_atexits", [])):
        close()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
