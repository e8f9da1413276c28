"""A child in the foreground: it gets the signals of this process, and this process ends as it ended.

SIGUSR1 asks a job to save and to end (docs/cluster/slurm.md). It is blocked in the child, so that neither the script
before it looks, nor any program that it starts, is ended by it: the script asks whether it is pending.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

_PAUSE = 0.1  # seconds between two looks at the child
_LAST_GRACE = 3.0  # seconds between SIGTERM and SIGKILL
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Running(Protocol):
    """A process that leads a group of its own."""

    @property
    def returncode(self) -> int | None: ...

    @property
    def pid(self) -> int: ...


@dataclass
class Ending:
    """How a child is ended. `grace`: seconds that it has to save, after the first SIGTERM to this process."""

    grace: float = 0.0
    received: int = 0  # the signal that this process was told to end with
    is_asked: bool = field(default=False, init=False)  # to save and to end
    deadline: float | None = field(default=None, init=False)
    is_told: bool = field(default=False, init=False)  # to end

    def ask(self, child: Running) -> None:
        """The child is to save, if it is the one that does, and to end."""
        self.is_asked = True
        send(child, signal.SIGUSR1)

    def look(self, child: Running) -> None:
        """Pass on what has come since the last look."""
        if not self.received:
            return
        now = time.monotonic()
        if self.deadline is None:
            self.deadline = now + self.grace
            if self.grace:
                self.ask(child)
        if now >= self.deadline and not self.is_told:
            self.is_told = True
            send(child, self.received)
        elif now >= self.deadline + _LAST_GRACE:
            send(child, signal.SIGKILL)


def run_child(child: Running, ending: Ending, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Pass signals on until the child has ended; returns its status, 128 + N if signal N ended it. Its group is gone.

    `asks_blocked` must be on when the child is started. `meanwhile` is called ten times a second.
    """
    try:
        with _signals_noted(ending):
            while child.returncode is None:
                if signal.sigtimedwait({signal.SIGUSR1}, _PAUSE):
                    ending.ask(child)
                ending.look(child)
                _reap(child.pid)
                meanwhile()
        code = child.returncode
        return code if code >= 0 else 128 - code
    finally:
        send(child, signal.SIGKILL)  # what is left of its group


@contextlib.contextmanager
def asks_blocked() -> Iterator[None]:
    """SIGUSR1 waits until it is asked for, in this process and in all that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        while signal.sigtimedwait({signal.SIGUSR1}, 0):
            pass  # one that nobody has asked for would end this process now
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def send(child: Running, number: int) -> None:
    """SIGUSR1 goes to the child alone, any other signal to its whole group."""
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGUSR1:
            os.kill(child.pid, number)
        else:
            os.killpg(child.pid, number)


@contextlib.contextmanager
def _signals_noted(ending: Ending) -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        ending.received = ending.received or number

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reap(child: int) -> None:
    """As process 1 of a container this process inherits orphans: their entries are taken from the table."""
    if os.getpid() != 1:
        return
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)
