"""Which workers are present: where each joined from, and when the server last heard of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from torchfleet.base.errors import NumberTaken, RoleError, ServerBusy, WireError
from torchfleet.base.prepared_types import prepared
from torchfleet.base.role.role_info import LOSS_END

# Seconds before other workers learn that a worker has ended. Its launcher sees the exit status first, and names it as
# the cause.
GRACE = 2.0
MAX_PAUSE = 1.0  # seconds between two ticks; if more passed, the server itself stood still
# A worker that is being started again may take this many of its time-outs. Once a worker has ended, the server waits as
# long before it gives up all workers.
RESTART_TIMEOUTS = 6
QUIET = 0.3  # share of a worker's time-out without a sign of life, after which a launcher may report it as killed
MAX_NAME = 256  # characters


class JoinBody(msgspec.Struct, forbid_unknown_fields=True):
    host: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    pid: int
    num_workers: int  # of the job, in the worker's settings; the maximum for an elastic job
    timeout: float  # seconds of silence after which this worker counts as lost
    sync_timeout: float  # seconds that a step of all workers may take
    restart: int = 0  # number of restarts by its launcher
    again: bool = False  # a sign of life of a worker that has joined before
    ended: bool = False  # its process ends without having left
    finished: bool = False  # it makes no more steps, and stays until the others have left
    min_workers: int = 0  # of an elastic job, in the worker's settings
    on_worker_loss: str = LOSS_END  # in the worker's settings
    max_restart: int = 0  # how often its launcher starts it again, in a mode in which the others can wait for that
    waiting: float | None = None  # share of time that the worker waits for servers; None: not known yet


class StartingBody(msgspec.Struct, forbid_unknown_fields=True):
    workers: Annotated[list[int], msgspec.Meta(min_length=1)]
    seconds: float  # for which servers are to wait for them, from now on


@dataclass(slots=True)
class Member:
    """A worker that has joined."""

    body: JoinBody
    incarnation: int  # of its process
    heard: float
    joined: float
    ended: float | None = None  # when it said that its process ends
    is_noted: bool = False  # its silence has been printed

    @property
    def place(self) -> str:
        return f"{self.body.host}, pid {self.body.pid}"


class Presence:
    """The workers that have joined and not left. A worker that never joined does not count as lost."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        # By worker that its launcher is starting: until when to wait for it, and the seconds that the launcher said.
        self._starting: dict[int, tuple[float, float]] = {}
        self._looked = 0.0
        self.num_lost = 0  # workers that ended, or fell silent, without having left
        self.heard: float | None = None  # last sign of life of any worker; None: no worker has ever joined

    def join(self, worker: int, incarnation: int, body: JoinBody, now: float, is_given_up: bool = False) -> bool:
        """Add a worker, or note its sign of life. Returns whether it replaces another process.

        `is_given_up`: the previous process is excluded from the job, even if it still sends signs of life.

        Raises NumberTaken if another live process has the number, ServerBusy if this is a restart and the previous
        process has not been silent for long enough.
        """
        if not incarnation:
            raise WireError("a worker that joins says which process it is (incarnation), found 0")
        known = self._members.get(worker)
        is_other = known is not None and known.incarnation != incarnation
        may_replace = known is None or (is_given_up and not body.again) or self._may_replace(known, body, now)
        if known is not None and is_other and not may_replace:
            if not body.again and body.restart > known.body.restart:
                raise ServerBusy(
                    f"worker {worker} was started again, and its earlier process ({known.place}) was heard of "
                    f"{now - known.heard:.1f} s ago; its number is free when that is silent"
                )
            raise NumberTaken(
                f"worker {worker} is here already, from {known.place}, and {body.host}, pid {body.pid} came with the "
                "same number. Give every worker its own FLEET_WORKER_INDEX / PADDLE_TRAINER_ID; if the first one was "
                f"killed, its number is free after {known.body.timeout:g} s of silence."
            )
        self.heard = now
        if not body.again:
            self._starting.pop(worker, None)
            joined = now if known is None or is_other else known.joined
            self._members[worker] = Member(body, incarnation, now, joined)
        elif known is not None:  # a late copy does not bring back a worker that has left
            known.heard, known.is_noted, known.body = now, False, body
            known.ended = (known.ended or now) if body.ended else None
        return is_other and not body.again

    def expect(self, worker: int, seconds: float, now: float) -> bool:
        """The launcher is starting a process of the worker: wait for it for so long, or until it joins. Returns whether
        this is news."""
        is_news = not self._is_starting(worker, now)
        self._starting[worker] = max(self._starting.get(worker, (now, 0.0)), (now + seconds, seconds))
        if self.heard is not None:
            self.heard = now
        return is_news

    def check(self, worker: int, incarnation: int) -> None:
        """Raise RoleError if another process has joined under this number."""
        known = self._members.get(worker)
        if known is not None and known.incarnation != incarnation:
            raise RoleError(
                f"worker {worker} is another process now, {known.place}: it was started again when this one had been "
                "silent. What this process still sends is not taken; end it."
            )

    def check_joined(self, worker: int, incarnation: int) -> None:
        """Raise RoleError if a process has joined as this worker, and the process that asks in its name has not joined
        as any worker. Workers that share a copy of the tables ask in the name of one of them.
        """
        if worker in self._members and all(known.incarnation != incarnation for known in self._members.values()):
            self.check(worker, incarnation)

    def hear(self, worker: int, now: float) -> None:
        """Note a sign of life of the worker."""
        known = self._members.get(worker)
        if known is not None:
            known.heard = max(known.heard, now)

    def is_all(self, workers: Collection[int]) -> bool:
        """Whether `workers` are all workers that have joined and not left."""
        return all(worker in workers for worker in self._members)

    @property
    def has_any(self) -> bool:
        """Whether a worker has joined and not left."""
        return bool(self._members)

    def incarnation(self, worker: int) -> int | None:
        """The incarnation of the process that has joined as this worker; None if none has."""
        known = self._members.get(worker)
        return None if known is None else known.incarnation

    def others(self, worker: int, now: float) -> Literal["here", "quiet", "gone"]:
        """The state of the other workers: "gone" if no other is left, "quiet" if all have missed a sign of life."""
        lost = self.lost(now)
        left = [m for number, m in self._members.items() if number != worker and number not in lost and not m.ended]
        if any(now - member.heard < QUIET * member.body.timeout for member in left):
            return "here"
        return "quiet" if left else "gone"

    def leave(self, worker: int) -> None:
        self._members.pop(worker, None)
        self._starting.pop(worker, None)

    def pause(self, now: float) -> float:
        """Set the time to `now`. Returns for how long the server itself stood still; 0 for a normal tick."""
        pause, self._looked = now - self._looked, now
        return pause if pause > MAX_PAUSE else 0.0

    def forgive(self, pause: float, now: float) -> None:
        """Exclude `pause` seconds from every worker's silence."""
        if not pause:
            return
        if self.heard is not None:
            self.heard = min(now, self.heard + pause)
        for worker, (until, seconds) in self._starting.items():
            self._starting[worker] = min(now + seconds, until + pause), seconds
        for member in self._members.values():
            member.heard = min(now, member.heard + pause)

    def lost(self, now: float) -> dict[int, str]:
        """The workers that have ended or are silent, each with a message for the workers that wait for it."""
        found = {}
        for worker, member in self._members.items():
            if member.ended is not None:
                if now - member.ended >= GRACE:
                    found[worker] = f"worker {worker} ({member.place}) has ended without fleet.stop_worker()"
            elif now - member.heard >= member.body.timeout:
                seconds = now - member.heard
                found[worker] = f"worker {worker} ({member.place}) is lost: no sign of life for {seconds:.0f} s"
        return found

    def given_up(self, now: float) -> dict[int, str]:
        """As `lost`, without the workers that their launcher is starting again: those who wait for one of them would
        otherwise fail, be started again themselves, and leave the first one waiting."""
        return {worker: text for worker, text in self.lost(now).items() if not self._is_restarting(worker, now)}

    def news(self, now: float) -> list[str]:
        """Messages about workers that were lost since the last call."""
        fresh = [(worker, text) for worker, text in self.lost(now).items() if not self._members[worker].is_noted]
        for worker, _ in fresh:
            self._members[worker].is_noted = True
        self.num_lost += len(fresh)
        return [text for _, text in fresh]

    def is_deserted(self, num_left: int, num_workers: int, now: float, is_soon: bool = False) -> bool:
        """Whether all workers that have not left have ended, or have been silent for too long, and none is being
        started.

        `is_soon`: other workers have finished, so a silent worker only gets time for a restart.
        """
        if not self._members or num_left + len(self._members) < num_workers:
            return False
        if any(self._is_starting(worker, now) for worker in self._starting):
            return False
        any_ended = is_soon or any(member.ended is not None for member in self._members.values())
        return all(
            now - (member.heard if member.ended is None else member.ended)
            >= (RESTART_TIMEOUTS * member.body.timeout if any_ended else member.body.sync_timeout)
            for member in self._members.values()
        )

    def is_orphaned(self, timeout: float, now: float) -> bool:
        """Whether workers had joined, and none gave a sign of life for `timeout` seconds. Always False for 0."""
        return bool(timeout) and self.heard is not None and now - self.heard >= timeout

    def sync_timeout(self) -> float | None:
        """The seconds that a step of all workers may take; None if no worker has joined."""
        return min((member.body.sync_timeout for member in self._members.values()), default=None)

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        members = {
            worker: [msgspec.to_builtins(m.body), m.incarnation, m.heard, m.joined, m.ended]
            for worker, m in self._members.items()
        }
        return {"members": members, "heard": self.heard, "starting": self._starting}

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore the state from the result of `export`."""
        self.heard = kept["heard"]
        self._starting = {worker: (until, seconds) for worker, (until, seconds) in kept.get("starting", {}).items()}
        self._members = {
            worker: Member(msgspec.convert(body, prepared(JoinBody)), *rest)
            for worker, (body, *rest) in kept["members"].items()
        }

    def describe(self, now: float) -> list[dict[str, object]]:
        """Statistics of each worker: number, place, seconds since it joined and since its last sign of life, whether it
        is lost, its share of waiting, and its restarts."""
        lost = self.lost(now)
        return [
            {
                "worker": worker,
                "place": member.place,
                "age": max(0.0, now - member.joined),
                "silent": max(0.0, now - member.heard),
                "is_lost": worker in lost,
                "waiting": member.body.waiting,
                "restart": member.body.restart,
            }
            for worker, member in sorted(self._members.items())
        ]

    def _is_starting(self, worker: int, now: float) -> bool:
        return worker in self._starting and now < self._starting[worker][0]

    def _is_restarting(self, worker: int, now: float) -> bool:
        if self._is_starting(worker, now):
            return True
        member = self._members[worker]
        since = member.heard if member.ended is None else member.ended
        return member.body.restart < member.body.max_restart and now - since < RESTART_TIMEOUTS * member.body.timeout

    @staticmethod
    def _may_replace(known: Member, body: JoinBody, now: float) -> bool:
        silent = now - known.heard
        is_gone = known.ended is not None or silent >= known.body.timeout
        was_restarted = body.restart > known.body.restart and silent >= QUIET * known.body.timeout
        return not body.again and (is_gone or was_restarted)
