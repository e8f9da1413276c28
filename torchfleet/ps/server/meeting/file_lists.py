"""Lists of files that workers share. Each file goes to one worker, and to another one if that worker dies."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from torchfleet.base.errors import DataError
from torchfleet.ps.server.meeting.file_pass import END, Pass
from torchfleet.ps.server.meeting.presence import MAX_NAME

MAX_LISTS = 256
MAX_LIST = 1 << 24  # bytes of a list
MAX_NAMES = 1 << 12  # remembered names of lists with dropped passes
_NAMES = "Give all workers one whole list, or different lists different names (set_filelist(..., name=...))."


class FilesBody(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    number: int  # of the pass
    lease: float  # seconds of silence after which the worker's files go to others
    files: list[str] = []
    done: list[str] = []
    take: int = 0  # > 0: asks for a file; numbers the client's requests, so that a repeat gets the same answer


class FileLists:
    """Passes over lists of files, by name and number. A finished pass takes little memory."""

    def __init__(self) -> None:
        self._passes: OrderedDict[tuple[str, int], Pass | int] = (
            OrderedDict()
        )  # of finished passes only a digest of the list
        self._first: dict[str, int] = {}  # by name: passes before this one that are not in `_passes` were dropped

    def ask(self, client: int, worker: int, body: FilesBody, now: float, hold: object = None) -> tuple[str, str]:
        """("file", path); WAIT while other workers hold the last files; END; or ("", "") if no file was asked for.

        `hold`: kept as long as the list, if this request opens it.
        """
        place = (body.name, body.number)
        if place not in self._passes and body.number < self._first.get(body.name, 0):
            return (END, "") if body.take else ("", "")
        if place not in self._passes and not body.files:
            raise DataError(f"file list '{body.name}', pass {body.number}: not known to this server; was it restarted?")
        if place not in self._passes:
            self._open(place, body.files, hold)
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
        current.check(client, worker)
        self.expire(now)  # not before a check: a request that is refused is not logged, so it must change nothing
        if current.is_former(client):
            return (END, "") if body.take else ("", "")
        holder = current.holder(client, worker, body.lease, now)
        for path in body.done:
            current.num_done += path in holder.files
            holder.files.discard(path)
        answer = current.next_file(client, body.take) if body.take else ("", "")
        if current.is_over:
            self._passes[place] = _digest(current.files)
        return answer

    def leave(self, worker: int) -> None:
        for current in self._passes.values():
            for client, holder in list(current.holders.items()) if isinstance(current, Pass) else ():
                if isinstance(current, Pass) and holder.worker == worker:
                    current.give_up(client)

    def expire(self, now: float) -> bool:
        """Take back the files of workers that were silent for longer than their lease. Returns whether any were."""
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
        if len(self._passes) >= MAX_LISTS:
            self._drop(*self._droppable(place))
        self._passes[place] = Pass(frozenset(files), deque(files), hold=hold)

    def _droppable(self, opened: tuple[str, int]) -> tuple[str, int]:
        """The oldest finished pass; without any, the oldest one that its workers left for a later pass of its name.
        `opened`: the pass that needs its place."""
        last = dict(sorted([*self._passes, opened]))
        left: list[tuple[str, int]] = []
        for (name, number), current in self._passes.items():
            if isinstance(current, int):
                return name, number
            if not current.holders and number < last[name]:
                left.append((name, number))
        if not left:
            raise DataError(
                f"{MAX_LISTS} lists of files are open already, the most at once, and none has been read to its end. "
                "Read lists to their ends, or read one list again under the same name."
            )
        return left[0]

    def _drop(self, name: str, number: int) -> None:
        del self._passes[name, number]
        first = self._first.pop(name, 0)
        self._first[name] = max(first, number + 1)  # at the end: the oldest name is forgotten first
        if len(self._first) > MAX_NAMES:
            del self._first[next(iter(self._first))]


def _digest(files: Iterable[str]) -> int:
    """A digest of a list in any order. Not Python's hash(), which differs between processes: a replica must agree."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(files):
        digest.update(path.encode(errors="surrogatepass") + b"\0")
    return int.from_bytes(digest.digest(), "little")
