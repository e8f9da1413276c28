"""Lists of files that workers share. Each file goes to one worker, and to another one if that worker dies."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from torchfleet.base.errors import DataError
from torchfleet.ps.server.meeting.presence import MAX_NAME

MAX_LISTS = 256
MAX_LIST = 1 << 24  # bytes of a list
WAIT, END = "wait", "end"
_NAMES = "Give all workers one whole list, or different lists different names (set_filelist(..., name=...))."


class FilesBody(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    number: int  # of the pass
    lease: float  # seconds of silence after which the worker's files go to others
    files: list[str] = []
    done: list[str] = []
    take: int = 0  # > 0: asks for a file; numbers the client's requests, so that a repeat gets the same answer


Answer = tuple[int, str, str]  # a client's `take`, "file" or WAIT, the path


@dataclass
class Holder:
    """A worker's process that takes files."""

    worker: int
    heard: float
    lease: float
    files: set[str] = field(default_factory=set)
    answered: Answer = (0, "", "")


@dataclass
class Pass:
    files: frozenset[str]
    waiting: deque[str]
    holders: dict[int, Holder] = field(default_factory=dict)  # by client
    num_done: int = 0
    wishes: dict[int, int] = field(default_factory=dict)  # by client: its last `take`; a lower one is a late copy
    hold: object = None  # charges the list's memory to its client's budget
    former: set[int] = field(default_factory=set)  # clients of workers that have been restarted since
    answers: dict[int, Answer] = field(default_factory=dict)  # by client: its holder's last, when that was given up

    @property
    def is_over(self) -> bool:
        return self.num_done == len(self.files)

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        holders = {c: [h.worker, h.heard, h.lease, sorted(h.files), h.answered] for c, h in self.holders.items()}
        return {
            "files": sorted(self.files), "waiting": list(self.waiting), "holders": holders, "num_done": self.num_done,
            "wishes": self.wishes, "former": sorted(self.former), "answers": self.answers,
        }  # fmt: skip

    @classmethod
    def restored(cls, kept: dict[str, Any]) -> Pass:
        """Restore the state from the result of `export`."""
        holders = {
            client: Holder(worker, heard, lease, set(files), (answered[0], answered[1], answered[2]))
            for client, (worker, heard, lease, files, answered) in kept["holders"].items()
        }
        made = cls(frozenset(kept["files"]), deque(kept["waiting"]), holders, kept["num_done"], dict(kept["wishes"]))
        made.former = set(kept["former"])
        made.answers = {client: (wish, what, path) for client, (wish, what, path) in kept.get("answers", {}).items()}
        return made

    def give_up(self, client: int) -> None:
        """Return the client's files to the front of the queue."""
        holder = self.holders.pop(client)
        self.answers[client] = holder.answered
        self.waiting.extendleft(sorted(holder.files, reverse=True))


class FileLists:
    """Passes over lists of files, by name and number. A finished pass takes little memory."""

    def __init__(self) -> None:
        self._passes: OrderedDict[tuple[str, int], Pass | int] = (
            OrderedDict()
        )  # of finished passes only a digest of the list
        self._first: dict[str, int] = {}  # by name: all passes before this one are finished or abandoned

    def ask(self, client: int, worker: int, body: FilesBody, now: float, hold: object = None) -> tuple[str, str]:
        """("file", path); WAIT while other workers hold the last files; END; or ("", "") if no file was asked for.

        `hold`: kept as long as the list, if this request opens it.
        """
        place = (body.name, body.number)
        if body.number < self._first.get(body.name, 0):
            return (END, "") if body.take else ("", "")
        if body.files and place not in self._passes:
            self._open(place, body.files, hold)
        if place not in self._passes:
            raise DataError(f"file list '{body.name}', pass {body.number}: not known to this server; was it restarted?")
        current = self._passes[place]
        if isinstance(current, int):
            if body.files and _digest(body.files) != current:
                raise DataError(
                    f"file list '{body.name}': pass {body.number} is over, and was over other files. {_NAMES}"
                )
            return (END, "") if body.take else ("", "")
        if body.files and frozenset(body.files) != current.files:
            raise DataError(
                f"file list '{body.name}': this worker has {len(body.files)} files and others have "
                f"{len(current.files)}, not the same ones. {_NAMES}"
            )
        if client in current.former:
            return (END, "") if body.take else ("", "")
        holder = self._holder(current, client, worker, body.lease, now)
        for path in body.done:
            current.num_done += path in holder.files
            holder.files.discard(path)
        answer = self._next(current, holder, client, body.take) if body.take else ("", "")
        if current.is_over:
            self._passes[place] = _digest(current.files)
        return answer

    def leave(self, worker: int) -> None:
        for current in self._passes.values():
            for client, holder in list(current.holders.items()) if isinstance(current, Pass) else ():
                if isinstance(current, Pass) and holder.worker == worker:
                    current.give_up(client)

    def expire(self, now: float) -> bool:
        """Take the files of workers that were silent for longer than their lease. Returns whether there are any."""
        is_any = False
        for current in self._passes.values():
            for client, holder in list(current.holders.items()) if isinstance(current, Pass) else ():
                if isinstance(current, Pass) and now > holder.heard + holder.lease:
                    current.give_up(client)
                    is_any = True
        return is_any

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        passes = [[*place, p if isinstance(p, int) else p.export()] for place, p in self._passes.items()]
        return {"passes": passes, "first": self._first}

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore the state from the result of `export`."""
        self._first = dict(kept["first"])
        self._passes = OrderedDict(
            ((name, number), p if isinstance(p, int) else Pass.restored(p)) for name, number, p in kept["passes"]
        )

    def _open(self, place: tuple[str, int], files: list[str], hold: object) -> None:
        if len(set(files)) < len(files):
            raise DataError(f"file list '{place[0]}': a file is in it twice")
        if len(self._passes) >= MAX_LISTS:  # drop the oldest pass of a list with several: finished or abandoned
            free = [known for known, current in self._passes.items() if isinstance(current, int) or not current.holders]
            if not free:
                raise DataError(f"{MAX_LISTS} lists of files are open already, which is the limit")
            name, number = free[0]
            del self._passes[free[0]]
            self._first[name] = max(self._first.get(name, 0), number + 1)
        self._passes[place] = Pass(frozenset(files), deque(files), hold=hold)

    @staticmethod
    def _holder(current: Pass, client: int, worker: int, lease: float, now: float) -> Holder:
        for other, holder in list(current.holders.items()):
            if holder.worker == worker and other != client:
                current.give_up(other)  # the worker was restarted: its previous process is gone
                current.former.add(other)
                current.answers.pop(other, None)
        if client not in current.holders:
            current.holders[client] = Holder(worker, now, lease, answered=current.answers.pop(client, (0, "", "")))
        current.holders[client].heard = now
        return current.holders[client]

    @staticmethod
    def _next(current: Pass, holder: Holder, client: int, wish: int) -> tuple[str, str]:
        if wish < current.wishes.get(client, 0):
            return WAIT, ""  # a late copy: the client ignores the answer
        if wish == holder.answered[0]:
            FileLists._hold_again(current, holder)
            return holder.answered[1:]
        current.wishes[client] = wish
        if current.is_over:
            return END, ""
        holder.answered = wish, WAIT, ""
        if current.waiting:
            holder.answered = wish, "file", current.waiting.popleft()
            holder.files.add(holder.answered[2])
        return holder.answered[1:]

    @staticmethod
    def _hold_again(current: Pass, holder: Holder) -> None:
        """A request came again. The client may have the first answer: it is never given another file, which it would
        not know of and hold to the end. If the lease has ended since, the file is taken out of the queue again; if
        another worker has it, the client is told to wait.
        """
        wish, what, path = holder.answered
        if what != "file" or path in holder.files:
            return
        if path in current.waiting:
            current.waiting.remove(path)
            holder.files.add(path)
        else:
            holder.answered = wish, WAIT, ""


def _digest(files: Iterable[str]) -> int:
    """A digest of a list in any order. Not Python's hash(), which differs between processes: a replica must agree."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(files):
        digest.update(path.encode(errors="surrogatepass") + b"\0")
    return int.from_bytes(digest.digest(), "little")
