"""A rank's meetings with the others: agreement on batches, and the places where all ranks come together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torchfleet.collective.meeting.attendance import Attendance
from torchfleet.collective.meeting.batch_agreement import Agreement
from torchfleet.collective.world import World

Note = Callable[[], object]


class JobMeetings:
    """The meetings of a job. Before `attend`, and with a single rank, `meet` does nothing."""

    def __init__(self) -> None:
        self._attendance: Attendance | None = None
        self._agreement: Agreement | None = None

    def attend(self, world: World, timeout: float) -> tuple[Note, Note]:
        """Returns functions to call when a step begins and when it has ended. All ranks call it together."""
        store = world.own_store() if world.size > 1 else None
        if store is None:
            return _nothing, _nothing
        attendance = self._attendance = Attendance(store, world.rank, world.size, timeout)
        return attendance.begin_step, partial(attendance.end_step, world.device)

    def meet(self, what: str) -> None:
        """Wait until all ranks come here. Raises WorkerMissing if another rank waits for this one in a step."""
        if self._attendance is not None:
            self._attendance.meet(what)

    def leave(self, alone: bool = False) -> None:
        """Leave after the last meeting; `alone`: do not wait for the others."""
        attendance, self._attendance = self._attendance, None
        if attendance is not None:
            attendance.close(alone)

    def batches(self, loader: Iterable[Any], world: World) -> Iterator[Any]:
        """The loader's batches, as long as every rank has one. All ranks call it together."""
        if world.size == 1:
            return iter(loader)
        if self._agreement is None:
            self._agreement = Agreement(world.rank, world.size, "gloo")  # the flags are in host memory
        return self._agreement.batches(loader)


def _nothing() -> None:
    pass
