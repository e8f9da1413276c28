"""Virtual time inside a simulated process: every thread is an actor with a clock of its own, and one runs at a time.

While an actor runs, its clock advances by the processor time that it uses. Where it could interact with other actors
(a lock, a message, a sleep) it stops, and the actor with the earliest clock in all processes of the job continues. So
an actor sees everything that happened before its time, and nothing that happens after it.
"""

from __future__ import annotations

import _thread
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torchfleet.launch.simulate.packets import ENDED, GRANT, YIELD, Address, Line, Packet, Turn, packet

NEVER = float("inf")
_processor_time = time.thread_time  # the real one, before time.thread_time is replaced


class Actor:
    """One thread. `time` is its clock, `at` the time when it may continue. It runs when its gate opens."""

    def __init__(self, name: str, number: int, start: float) -> None:
        self.name, self.number = name, number
        self.time = self.at = start
        self.resumed = 0.0  # the thread's processor time when it last continued
        self.waits_for = ""  # description of what it waits for
        self.ended_at = NEVER
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.joining: list[Actor] = []  # actors that wait for its end


class Schedule:
    """The actors of this process. Only the running actor, `current`, calls its methods."""

    def __init__(self, line: Line, index: int, latency: float, scale: float) -> None:
        """`scale`: virtual seconds per processor second; 0: computing takes only the time that `spend` adds."""
        self.index, self.latency = index, latency
        self._line, self._scale = line, scale
        self.pace = 1.0  # the factor by which computing takes longer now; set it between `pause` and `go_on`
        self.current = self.main = Actor("main", 0, 0.0)
        self._actors = [self.main]
        self._num_actors = 1
        self._horizon = 0.0  # no other process can affect this one before this time
        self._limit = 0.0  # until this time the running actor need not check other actors
        self._outbox: list[Packet] = []
        self.mailboxes: dict[int, Mailbox] = {}
        self.busy = 0.0  # seconds that all actors have computed

    def now(self) -> float:
        """Return the time of the running actor."""
        me = self.current
        return me.time + (_processor_time() - me.resumed) * self._scale * self.pace

    def pause(self) -> None:
        """Stop the clock: the simulator's own work, which follows, takes no virtual time."""
        me = self.current
        seconds = (_processor_time() - me.resumed) * self._scale * self.pace
        me.time += seconds
        self.busy += seconds

    def go_on(self) -> None:
        """Start the clock again after `pause`."""
        self.current.resumed = _processor_time()

    def spend(self, seconds: float) -> None:
        """Add compute time to the running actor. Call between `pause` and `go_on`."""
        self.current.time += seconds
        self.busy += seconds

    def reach(self) -> float:
        """Block until everything before this actor's time has happened. Begins a pause."""
        self.pause()
        me = self.current
        if me.time >= self._limit:
            me.at = me.time
            self._switch()
        return me.time

    def wait(self, until: float, what: str) -> float:
        """Block the running actor until `until`, or until `wake`. Call within a pause."""
        me = self.current
        me.at, me.waits_for = until, what
        self._switch()
        me.waits_for = ""
        return me.time

    def wake(self, actor: Actor, at: float) -> None:
        """Let a waiting actor continue at this time, unless it continues earlier anyway."""
        if at < actor.at:
            actor.at = max(at, actor.time)
            self._limit = min(self._limit, actor.at)

    def add(self, name: str) -> Actor:
        """Add an actor that begins now. Its thread must call `run`."""
        actor = Actor(name, self._num_actors, self.current.time)
        self._num_actors += 1
        self._actors.append(actor)
        self._limit = min(self._limit, actor.at)
        return actor

    def run(self, actor: Actor, work: Callable[[], Any]) -> None:
        """Run an actor to its end in its own thread."""
        actor.gate.acquire()
        self.go_on()
        try:
            work()
        finally:
            self.reach()
            actor.ended_at = actor.time
            self._actors.remove(actor)
            for waiting in actor.joining:
                self.wake(waiting, actor.time)
            self._switch()

    def has_ended(self, actor: Actor) -> bool:
        ended = actor.ended_at <= self.reach()
        self.go_on()
        return ended

    def join(self, actor: Actor, timeout: float | None) -> bool:
        """Block up to `timeout` seconds for the end of an actor. Returns whether it has ended."""
        now = self.reach()
        deadline = NEVER if timeout is None else now + max(0.0, timeout)
        if actor.ended_at == NEVER and deadline > now:
            actor.joining.append(self.current)
            self.wait(deadline, f"the end of thread {actor.name}")
            actor.joining.remove(self.current)
        elif now < actor.ended_at <= deadline:
            self.wait(actor.ended_at, f"the end of thread {actor.name}")
        self.go_on()
        return actor.ended_at <= self.current.time

    def post(self, to: Address, box: int, frames: Sequence[Any], hops: float) -> None:
        """Send frames now. Call within a pause. Their effects return here after `hops` latencies at the earliest."""
        now = self.current.time
        self._outbox.append(packet(to, (self.index, box), now, frames))
        self._horizon = min(self._horizon, now + hops * self.latency)
        self._limit = min(self._limit, self._horizon)

    def end(self, code: int) -> None:
        """End the process. No method may be called after this."""
        self.reach()
        self._line.send(Turn(ENDED, self.current.time, self.busy, code, packets=self._outbox))

    def describe(self) -> str:
        """Describe what every actor waits for."""
        return "; ".join(f"{actor.name} waits for {actor.waits_for or 'its turn'}" for actor in self._actors)

    def _switch(self) -> None:
        """Run the actor with the earliest time. Returns when it is the caller's turn again."""
        me = self.current
        following = self._next()
        while following.at >= self._horizon:
            self._yield(following.at)
            following = self._next()
        others = (actor.at for actor in self._actors if actor is not following)
        self._limit = min(self._horizon, min(others, default=NEVER))
        following.time = max(following.time, following.at)
        following.at = NEVER
        if following is not me:
            self.current = following
            following.gate.release()
            if me.ended_at == NEVER:
                me.gate.acquire()

    def _next(self) -> Actor:
        return min(self._actors, key=lambda actor: (actor.at, actor.number))

    def _yield(self, at: float) -> None:
        """Tell the coordinator that nothing happens here before `at`, and block until it grants the next turn."""
        is_stuck = self.main.at == NEVER
        self._line.send(Turn(YIELD, at, self.busy, is_stuck=is_stuck, packets=self._outbox))
        self._outbox = []
        turn = self._line.receive()
        while turn.kind != GRANT:
            self._line.send(Turn(YIELD, at, packets=[packet((0, 0), (0, 0), at, [self.describe().encode()])]))
            turn = self._line.receive()
        self._horizon = turn.time
        for received in turn.packets:
            mailbox = self.mailboxes.get(received.to[1])
            if mailbox is not None:  # otherwise the receiver has closed it
                mailbox.deliver(received)


class Mailbox:
    """Queues packets for one socket of this process. One actor at a time takes them."""

    def __init__(self, schedule: Schedule, number: int, what: str) -> None:
        self._schedule, self.number, self._what = schedule, number, what
        self._packets: deque[Packet] = deque()
        self._waiting: Actor | None = None
        schedule.mailboxes[number] = self

    def deliver(self, received: Packet) -> None:
        self._packets.append(received)
        if self._waiting is not None:
            self._schedule.wake(self._waiting, received.time)

    def take(self, timeout: float) -> Packet | None:
        """Return the next packet; None if none arrives within `timeout` seconds. Begins a pause."""
        now = self._schedule.reach()
        if timeout > 0 and not (self._packets and self._packets[0].time <= now):
            self._waiting = self._schedule.current
            first = self._packets[0].time if self._packets else NEVER
            now = self._schedule.wait(min(now + timeout, first), self._what)
            self._waiting = None
        if self._packets and self._packets[0].time <= now:
            return self._packets.popleft()
        return None

    def close(self) -> None:
        self._schedule.mailboxes.pop(self.number, None)
        self._packets.clear()
