"""A rank's meetings with the others: about batches, and at the places where all of them come together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torchfleet.collective.meeting.attendance import Attendance
from torchfleet.collective.meeting.batch_agreement import Agreement
from torchfleet.collective.world import World

Note = Callable[[], object]


class JobMeetings:
    """One of a job. Ranks that have not begun to attend, and one alone, are not watched: `meet` does nothing then."""

    def __init__(self) -> None:
        self._attendance: Attendance | None = None
        self._agreement: Agreement | None = None

    def attend(self, world: World, timeout: float) -> tuple[Note, Note]:
        """What to call when a step begins and when it has ended. All ranks come here together."""
        store = world.own_store() if world.size > 1 else None
        if store is None:
            return _nothing, _nothing
        attendance = self._attendance = Attendance(store, world.rank, world.size, timeout)
        return attendance.begin_step, partial(attendance.end_step, world.device.type == "cuda")

    def meet(self, what: str) -> None:
        """All ranks come to this place. Raises WorkerMissing if one waits in a step for this one."""
        if self._attendance is not None:
            self._attendance.meet(what)

    def leave(self, alone: bool = False) -> None:
        """After the last meeting; `alone`: the others are not waited for."""
        attendance, self._attendance = self._attendance, None
        if attendance is not None:
            attendance.close(alone)

    def batches(self, loader: Iterable[Any], world: World) -> Iterator[Any]:
        """The loader's, for as long as every rank has one. All ranks come here together."""
        if world.size == 1:
            return iter(loader)
        if self._agreement is None:
            self._agreement = Agreement(world.rank, world.size, "gloo")  # the flags lie in host memory
        return self._agreement.batches(loader)


def _nothing() -> None:
    pass
