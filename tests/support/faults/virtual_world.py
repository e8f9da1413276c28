"""Virtual time and its events; clients as actors whose blocking code runs in threads, one at a time.

Everything that happens is an event at a time, and events of one time happen in the order in which they were asked for.
An actor runs only while an event has handed it the baton. So one seed gives one history, bit for bit.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import itertools
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from support.faults.clocks import IDLE, Load, MachineClock

MAX_EVENTS = 400_000


class Over(BaseException):
    """Ends an actor's thread that is not needed any longer, or what a killed process was doing."""


class Stuck(AssertionError):
    """Somebody waits, and nothing is going to happen; or far too much happens."""


class Actor:
    """A client's thread: runs from one wait to the next."""

    def __init__(self, world: World, name: str, work: Callable[[], None]) -> None:
        self.name, self._world, self._work = name, world, work
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._turn = 0  # which wait it is in: an event for an earlier one comes too late
        self._is_over = False
        self.has_ended = False
        self.error: BaseException | None = None
        self.frozen_until = 0.0
        self._is_late = False  # it should run, and has not got the processor yet
        self.clock = world.clock  # of the machine that it was started on
        _thread.start_new_thread(self._live, ())
        world.after(0.0, lambda: self._go_on(0))

    def wait(self, seconds: float) -> None:
        """Called by the actor itself: go on after so long, or when somebody wakes it."""
        turn = self._turn
        self._world.after(seconds, lambda: self._go_on(turn))
        self._world.baton.release()
        self._gate.acquire()
        if self._is_over:
            raise Over

    def wake(self) -> None:
        """What it waits for may be here."""
        turn = self._turn
        self._world.after(0.0, lambda: self._go_on(turn))

    def freeze(self, seconds: float) -> None:
        """Stopped: nothing wakes it before."""
        self.frozen_until = max(self.frozen_until, self._world.now + seconds)

    def end(self) -> None:
        """Called by the world: the thread ends where it waits."""
        if not self.has_ended:
            self._is_over = True
            self._hand_over()

    def _go_on(self, turn: int) -> None:
        if turn != self._turn or self.has_ended:
            return
        self.freeze(self._world.load.pause(self._world.dice) if not self._is_late else 0.0)
        self._is_late = self._world.now < self.frozen_until
        if self._is_late:
            self._world.at(self.frozen_until, lambda: self._go_on(turn))
            return
        self._turn += 1
        self._hand_over()

    def _hand_over(self) -> None:
        world = self._world
        before, clock = world.current, world.clock
        world.current, world.clock = self, self.clock
        self._gate.release()
        world.baton.acquire()
        world.current, world.clock = before, clock

    def _live(self) -> None:
        self._gate.acquire()
        try:
            if not self._is_over:
                self._work()
        except Over:
            pass
        except BaseException as error:  # raised again by the schedule
            self.error = error
        self.has_ended = True
        self._world.baton.release()


class World:
    """The clock, the dice and what is going to happen."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.dice = random.Random(seed)
        self.load: Load = IDLE
        self.clients_clock = MachineClock(self)
        self.clock = self.clients_clock  # of the machine whose code runs
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.current: Actor | None = None
        self.actors: list[Actor] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()
        self.num_events = 0
        self._depth = 0  # events that wait for others to happen
        self._errors: list[Exception] = []

    def at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._ties), happen))

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.at(self.now + seconds, happen)

    def spawn(self, name: str, work: Callable[[], None]) -> Actor:
        self.actors.append(Actor(self, name, work))
        return self.actors[-1]

    def sleep(self, seconds: float) -> None:
        """Of the actor that runs; or of an event, during which others happen."""
        if self.current is None:
            self.pass_time(seconds)
            return
        until = self.now + seconds
        while self.now < until:
            self.current.wait(until - self.now)

    def monotonic(self) -> float:
        """As time.monotonic, of the machine whose code runs."""
        return self.clock.monotonic()

    def time(self) -> float:
        """As time.time, of the machine whose code runs."""
        return self.clock.time()

    def run(self, until: Callable[[], bool], deadline: float) -> None:
        """Let things happen until it is enough. Raises Stuck if that does not come by `deadline`."""
        while not until():
            if not self._events or self._events[0][0] > deadline or self.num_events > MAX_EVENTS:
                waiting = [actor.name for actor in self.actors if not actor.has_ended]
                raise Stuck(f"at {self.now:.1f} s, after {self.num_events:,} events, these still wait: {waiting}")
            self._step()

    def pass_time(self, seconds: float) -> None:
        """Let everything happen in the next seconds."""
        until, current, clock = self.now + seconds, self.current, self.clock
        self.current, self.clock = None, self.clients_clock
        while self._events and self._events[0][0] <= until:
            self._step()
        self.now, self.current, self.clock = max(self.now, until), current, clock

    def _step(self) -> None:
        """The next event. What an event raises while another one waits is not for the code that waits."""
        self.now, _, happen = heapq.heappop(self._events)
        self.num_events += 1
        self._depth += 1
        try:
            happen()
        except Exception as error:
            self._errors.append(error)
        finally:
            self._depth -= 1
        if self._errors and not self._depth:
            raise self._errors[0]

    @contextlib.contextmanager
    def on_machine(self, clock: MachineClock) -> Iterator[None]:
        """What runs within this sees this clock."""
        before, self.clock = self.clock, clock
        try:
            yield
        finally:
            self.clock = before

    @contextlib.contextmanager
    def in_charge(self) -> Iterator[None]:
        """Clocks and random numbers of this process are the world's; in the end all threads of actors have ended."""
        system = random.Random(self.dice.random())
        real = time.clock_gettime

        def uptime(which: int) -> float:
            return self.clock.monotonic() if which == time.CLOCK_BOOTTIME else real(which)

        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (time, "monotonic", self.monotonic),
            (time, "sleep", self.sleep),
            (time, "time", self.time),
            (time, "clock_gettime", uptime),
            (secrets, "randbits", system.getrandbits),
            (os, "urandom", system.randbytes),
        ]
        with contextlib.ExitStack() as stack:
            for module, name, other in replaced:
                stack.enter_context(mock.patch.object(module, name, other))
            try:
                yield
            finally:
                for actor in self.actors:
                    actor.end()
