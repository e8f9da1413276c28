"""Attempts to train: a rank that is killed is replaced, and the others begin the next attempt in their processes.

The launcher counts attempts in the store that all ranks share. When it replaces a rank, it adds one. A rank whose
exchange fails, or that sees the new number, leaves the broken process groups, meets the other ranks, and trains again.
A rank that does not come back in time ends itself, and is replaced too: its copies are in the launcher's memory.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.notices import tell
from torchfleet.collective.elastic.memory_files import VARIABLE
from torchfleet.collective.meeting.rendezvous import rendezvous
from torchfleet.collective.world import begun

_PREFIX = "torchfleet elastic"
_NUMBER = "attempt"  # key of the number of the present attempt
_PAUSE = 0.05  # seconds between two reads of the store while this rank waits
_LOOK = 0.5  # the same while it trains
_NOTICE = 10.0  # seconds in which the launcher notices that a rank has ended
_RETURN = 30.0  # seconds in which a rank must notice that an attempt is over, before it ends itself
_MEETING = 1800.0  # seconds in which all ranks must come to an attempt
_OPERATION = timedelta(seconds=60)  # time-out of one operation of the store


class Attempts:
    """The attempts of a job, as a rank or a launcher sees them. Each thread needs one of its own."""

    def __init__(self, store: Store, size: int) -> None:
        self._store, self._size = PrefixStore(_PREFIX, store), size

    @classmethod
    def of_launcher(cls) -> Attempts | None:
        """The attempts of the launcher that started this rank; None if it replaces no ranks."""
        if VARIABLE not in os.environ:
            return None
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return cls(TCPStore(*place, None, False, _OPERATION), int(os.environ["WORLD_SIZE"]))

    @property
    def number(self) -> int:
        return int(self._store.add(_NUMBER, 0))

    # A launcher

    def may_go_on(self) -> bool:
        """Whether the ranks are in attempts that follow each other, and have not all finished."""
        return bool(self._store.check([_begun(0)])) and self._store.add(_finished(self.number), 0) < self._size

    def begin_next(self) -> int:
        """End the present attempt. Returns the number of the next one."""
        return int(self._store.add(_NUMBER, 1))

    # A rank

    def meet(self) -> int:
        """Wait until all ranks are here for the present attempt; returns its number."""
        deadline = time.monotonic() + _MEETING
        while True:
            number = self.number
            here = self._store.add(_begun(number), 1)
            while here < self._size and self.number == number:
                if time.monotonic() > deadline:
                    raise FleetError(
                        f"{here} of {self._size} ranks have come to attempt {number} of fleet.elastic.run within "
                        f"{_MEETING:.0f} s: do all ranks call it? Their logs say where they are."
                    )
                time.sleep(_PAUSE)
                here = self._store.add(_begun(number), 0)
            if self.number == number:
                return number

    def finish(self, number: int) -> bool:
        """This rank has trained to the end. Wait for all, or for another attempt; returns whether all are done."""
        done = self._store.add(_finished(number), 1)
        while done < self._size and self.number == number:
            time.sleep(_PAUSE)
            done = self._store.add(_finished(number), 0)
        return bool(done == self._size)

    def is_over(self, number: int, patience: float) -> bool:
        """Whether the launcher has ended this attempt; waits up to `patience` seconds for it."""
        deadline = time.monotonic() + patience
        while self.number == number:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        return True


def _begun(number: int) -> str:
    return f"{number} begun"


def _finished(number: int) -> str:
    return f"{number} finished"


def run(train: Callable[[], object], leave: Callable[[], None]) -> None:
    """Call `train` until it ends on all ranks in the same attempt. `leave` gives up what a failed attempt left.

    An error of `train` is raised unless the launcher replaces a rank. Without a launcher that does, `train` is called
    once.
    """
    attempts = Attempts.of_launcher()
    if attempts is None:
        train()
        return
    while True:
        number = attempts.meet()
        rendezvous.begin(number)
        begun.num_stores = 0
        if _attempt(train, attempts, number):
            return
        leave()
        gc.collect()  # models are in reference cycles; the next attempt needs their memory


def _attempt(train: Callable[[], object], attempts: Attempts, number: int) -> bool:
    """Make one attempt. Returns whether all ranks have trained to the end; if not, another attempt has begun."""
    with _watched(number):
        try:
            train()
        except Exception as error:
            _leave_groups()  # so that ranks that wait for this one notice
            # torch raises RuntimeError for an exchange that fails, perhaps before the launcher has noticed why
            if not attempts.is_over(number, _NOTICE if isinstance(error, RuntimeError) else 0.0):
                raise
            first = next(iter(str(error).splitlines()), "")
            tell(f"fleet: a rank is replaced, so that attempt {number} is over ({type(error).__name__}: {first:.200})")
            return False
    if attempts.finish(number):
        return True
    _leave_groups()
    return False


def _leave_groups() -> None:
    """Break all process groups: exchanges under way fail, here and on ranks that wait for this one."""
    with _breaking:
        if dist.is_initialized():
            with contextlib.suppress(Exception):  # of groups that are broken already
                distributed_c10d._abort_process_group()
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


_breaking = threading.Lock()


@contextlib.contextmanager
def _watched(number: int) -> Iterator[None]:
    """Inside this context, a thread watches whether the attempt is over, and then breaks the process groups: an
    exchange with a rank that is gone may not fail by itself."""
    over = threading.Event()

    def watch() -> None:
        attempts = Attempts.of_launcher()
        assert attempts is not None
        while not over.wait(_LOOK):
            if attempts.number != number:
                break
        if over.is_set():
            return
        _leave_groups()
        if not over.wait(_RETURN):
            tell(
                f"fleet: attempt {number} is over, and this rank has not noticed for {_RETURN:.0f} s: it ends itself, "
                "and goes on as a new process"
            )
            os._exit(1)

    thread = BackgroundThreads([watch], "the watch over an attempt")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
