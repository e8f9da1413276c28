"""Runs a child in the foreground: forwards signals to it, and exits with its status.

SIGUSR1 asks a job to save and to end (docs/cluster/slurm.md). The child starts with SIGUSR1 blocked, so that the
signal kills neither a script that has not yet checked for it nor a program that the script starts. The script checks
whether the signal is pending.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

_PAUSE = 0.1  # seconds between two polls of the child
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
    """How a child is ended. `grace`: seconds that it has for saving after the first SIGTERM to this process."""

    grace: float = 0.0
    received: int = 0  # the signal that told this process to end
    is_asked: bool = field(default=False, init=False)  # the child was asked to save and to end
    deadline: float | None = field(default=None, init=False)
    is_told: bool = field(default=False, init=False)  # the child was told to end

    def ask(self, child: Running) -> None:
        """Ask the child to save, if it is the process that saves, and to end."""
        self.is_asked = True
        send(child, signal.SIGUSR1)

    def look(self, child: Running) -> None:
        """Act on the signal that this process received: ask the child to save, forward the signal, at last SIGKILL."""
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
    """Forward signals until the child has ended. Returns its exit status, or 128 + N if signal N ended it. No process
    of its group is left when this returns.

    The child must be started within `asks_blocked`. `meanwhile` is called ten times a second.
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
    """Block SIGUSR1 in this thread, which must be the main one, and in all threads and processes that it starts."""
    # Existing threads, such as those of a library, do not block it: the handler redirects it to this thread.
    own = threading.get_ident()
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: signal.pthread_kill(own, number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # discards a pending SIGUSR1, which would end this process
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGUSR1, handler)


def send(child: Running, number: int) -> None:
    """Send SIGUSR1 to the child alone, any other signal to its whole group."""
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
    """Reap orphans, which this process inherits when it is process 1 of a container."""
    if os.getpid() != 1:
        return
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)
