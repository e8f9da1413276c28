"""FolderSource: hourly or daily parts in a folder that another program writes."""

from __future__ import annotations

import re
import sys
from typing import Any

from torchfleet.apps.online.listing import FoundPart, PartTree
from torchfleet.apps.online.parts import Part, time_of
from torchfleet.base.errors import DataError
from torchfleet.data.dataset import file_shard

_RECENT = 48  # last parts kept in a position: a part between them that is not in this list was not trained and is late
_NAME = re.compile(r"\d{8}(/\d{2})?")


class FolderSource:
    """Parts as folders `20261115/07` with a file `_SUCCESS` when they are finished, below a path or any fsspec URL.

    pattern   other names: "{day}{hour}", "logs/dt={day}/h={hour}"; or files, "part-{day}-{hour}*". Without {hour}: days
    done      the file in a part's folder that marks it as finished. For parts that are files, a name beside them with
              {day} and {hour}; or None: one file per part, which appears by rename
    files     which files of a part's folder are data; those that begin with _ or . never are
    start     the first part to train, "20261115/00", when nothing has been trained yet
    until     the last part, after which the source is over. Without it, the source never ends
    wait_for_unfinished   True: wait for a part that has begun, even if later ones are finished. False: skip it, with a
              line on stderr, as soon as a later one is finished

    Parts are taken in the order of (day, hour). A part that is finished after a later one was trained is skipped, with
    a line on stderr.
    """

    def __init__(
        self,
        path: str,
        pattern: str = "{day}/{hour}",
        done: str | None = "_SUCCESS",
        files: str = "*",
        *,
        start: str | None = None,
        until: str | None = None,
        wait_for_unfinished: bool = True,
    ) -> None:
        self._tree = PartTree(path, pattern)
        self._done, self._files = done, files
        self._start, self._until = _checked("start", start), _checked("until", until)
        self._waits_for_unfinished = wait_for_unfinished
        self._ends: list[str] | None = None  # a position after which there are no more parts
        self._reported: set[tuple[str, str]] = set()  # (part, reason) of lines that are printed once

    def next(self, position: Any) -> Part | None:
        recent = _recent(position)
        last, first = (recent[-1], recent[0]) if recent else ("", self._start or "")
        self._reported = {(part, reason) for part, reason in self._reported if part >= first}
        passed: list[str] = []
        unfinished: list[FoundPart] = []
        for found_part in self._tree.parts(first[:8]):
            if found_part.name <= last or found_part.name < first:
                self._report_if_late(found_part, recent)
                continue
            is_beyond = self._is_beyond(found_part.name)
            if not self._is_finished(found_part):
                if is_beyond:
                    return None
                unfinished.append(found_part)
                continue
            if self._must_wait_for(unfinished, found_part):
                return None
            if is_beyond:
                self._ends = recent
                return None
            files = self._files_of(found_part)
            if files:
                return self._part(found_part, files, [*recent, *passed, found_part.name])
            passed.append(found_part.name)
            self._report_once(found_part, "empty", "finished, and has no files; passed over")
            if self._is_last(found_part.name):
                self._ends = recent
        return None

    def is_over(self, position: Any) -> bool:
        recent = _recent(position)
        return recent == self._ends or any(self._is_last(name) or self._is_beyond(name) for name in recent[-1:])

    def files_of(self, part: Part, worker: int, num_workers: int) -> list[str]:
        return file_shard(part.files, worker, num_workers)

    def done(self, part: Part) -> None:
        """Do nothing: the files belong to another program."""

    def _part(self, found_part: FoundPart, files: list[str], recent: list[str]) -> Part:
        hour = int(found_part.hour or 0)
        position = {"recent": recent[-_RECENT:]}  # the next part follows the last of them
        places = [self._tree.place(path) for path in files]
        return Part(found_part.name, time_of(found_part.day, hour), found_part.day, hour, position, places)

    def _is_finished(self, found_part: FoundPart) -> bool:
        if self._done is not None and "{day}" in self._done:
            return self._tree.exists(self._done_name(found_part))
        is_folder = [self._tree.is_folder(path) for path in found_part.paths]
        if self._done is None:
            if any(is_folder):
                raise DataError(
                    f"{self._tree.place(found_part.paths[0])} is a folder, and nothing says when it is finished: give "
                    "FolderSource(done=...) the name of the file that is written into it last"
                )
            return True
        if not all(is_folder):
            raise DataError(
                f"{self._tree.place(found_part.paths[0])} is a file, so there is no {self._done} in it: give "
                "FolderSource(done=...) a name with {day} and {hour}; or None, if files appear by rename"
            )
        return all(self._tree.exists(f"{path}/{self._done}") for path in found_part.paths)

    def _files_of(self, found_part: FoundPart) -> list[str]:
        found: list[str] = []
        for path in found_part.paths:
            found += self._tree.files(path, self._files) if self._tree.is_folder(path) else [path]
        markers = {self._done_name(found_part), *(f"{path}/{self._done}" for path in found_part.paths)}
        return [path for path in found if path not in markers]

    def _done_name(self, found_part: FoundPart) -> str:
        return (self._done or "").replace("{day}", found_part.day).replace("{hour}", found_part.hour)

    def _must_wait_for(self, unfinished: list[FoundPart], later: FoundPart) -> bool:
        if unfinished and self._waits_for_unfinished:
            how = "waiting for it. Remove it to go on without it, or use wait_for_unfinished=False"
            self._report_once(unfinished[0], "unfinished", f"not finished, but {later.name} is: {how}")
            return True
        for found_part in unfinished:
            self._report_once(found_part, "unfinished", f"not finished, but {later.name} is: passed over")
        unfinished.clear()
        return False

    def _report_if_late(self, found_part: FoundPart, recent: list[str]) -> None:
        if recent and found_part.name > recent[0] and found_part.name not in recent and self._is_finished(found_part):
            self._report_once(found_part, "late", f"finished now, but {recent[-1]} has been trained already: left out")

    def _is_last(self, name: str) -> bool:
        return name in (self._until, f"{self._until}/23")

    def _is_beyond(self, name: str) -> bool:
        return self._until is not None and name[: len(self._until)] > self._until

    def _report_once(self, found_part: FoundPart, reason: str, text: str) -> None:
        if (found_part.name, reason) not in self._reported:
            self._reported.add((found_part.name, reason))
            print(f"part {self._tree.place(found_part.name)}: {text}", file=sys.stderr, flush=True)


def _recent(position: Any) -> list[str]:
    """The names of the last parts, in order. A position set by the user may also be a single name."""
    names = [position] if isinstance(position, str) else position["recent"] if position else []
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        raise DataError(f"a position of a FolderSource is the name of a part, as 20261115/07; found {position!r}")
    return list(names)


def _checked(option: str, name: str | None) -> str | None:
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise DataError(f"FolderSource({option}=...): expected a part as 20261115/07, or a day, found {name!r}")
    return name
