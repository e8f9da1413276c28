"""Finds parts below a path by a name pattern, on this machine or on any fsspec file system."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import fsspec

from torchfleet.apps.online.parts import time_of
from torchfleet.base.errors import DataError

_FIELDS = re.compile(r"(\{day\}|\{hour\}|\*|\?)")
_EXPRESSIONS = {"{day}": r"(?P<day>\d{8})", "{hour}": r"(?P<hour>\d{2})", "*": ".*", "?": "."}


@dataclass(frozen=True)
class FoundPart:
    """A part with an existing folder or files. It may be unfinished."""

    day: str
    hour: str  # "" if parts are whole days
    paths: tuple[str, ...]  # below the tree's path

    @property
    def name(self) -> str:
        return f"{self.day}/{self.hour}" if self.hour else self.day


@dataclass(frozen=True)
class _Match:
    """A path that matches the first components of the pattern, and the values of its fields."""

    path: str
    fields: dict[str, str]

    @property
    def day(self) -> str:
        return self.fields.get("day", "")

    @property
    def hour(self) -> str:
        return self.fields.get("hour", "")


class PartTree:
    """The parts below a path. `pattern` has {day} (20261115) and, for hourly parts, {hour} (07); * and ? are wild."""

    def __init__(self, path: str, pattern: str) -> None:
        if "{day}" not in pattern:
            raise DataError(f"a pattern of parts needs {{day}}, and {{hour}} where parts are hours; found {pattern!r}")
        self._is_local = "://" not in path and "::" not in path
        self.path = path.rstrip("/") or "/"
        self._steps = [_regex(step) for step in pattern.strip("/").split("/")]
        self._day_step = next(i for i, step in enumerate(self._steps) if "day" in step.groupindex)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.path)
        except Exception as error:  # every file system raises its own
            raise DataError(f"{path} cannot be opened: {type(error).__name__}: {error}") from error

    def parts(self, since: str) -> Iterator[FoundPart]:
        """The parts in their order, from day `since` on. A day is listed only when the iterator reaches it."""
        self._fs.invalidate_cache()  # from an earlier listing
        places = [_Match("", {})]
        for step in self._steps[: self._day_step + 1]:
            places = [found for place in places for found in self._matches(place, step)]
        places = sorted((place for place in places if place.day >= since), key=lambda place: place.day)
        for _, of_day in groupby(places, key=lambda place: place.day):
            yield from self._hours(of_day)

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(self._inner(path)))

    def is_folder(self, path: str) -> bool:
        return bool(self._fs.isdir(self._inner(path)))

    def files(self, folder: str, pattern: str) -> list[str]:
        """The data files of a folder that match, sorted. Names that begin with _ or . are never data."""
        names = [name for name, is_folder in self._list(folder) if not is_folder and not name.startswith(("_", "."))]
        return [f"{folder}/{name}" for name in names if fnmatchcase(name, pattern)]

    def place(self, path: str) -> str:
        """The path or URL with which datasets open it."""
        return f"{self.path.rstrip('/')}/{path}"

    def _hours(self, places: Iterable[_Match]) -> Iterator[FoundPart]:
        """The parts of one day."""
        for step in self._steps[self._day_step + 1 :]:
            places = [found for place in places for found in self._matches(place, step)]
        ordered = sorted(places, key=lambda place: (place.hour, place.path))
        for hour, of_hour in groupby(ordered, key=lambda place: place.hour):
            same = list(of_hour)
            yield FoundPart(same[0].day, hour, tuple(place.path for place in same))

    def _matches(self, place: _Match, step: re.Pattern[str]) -> Iterator[_Match]:
        for name, _ in self._list(place.path):
            match = step.fullmatch(name)
            if match is None:
                continue
            fields = match.groupdict()
            if all(place.fields.get(field, value) == value for field, value in fields.items()):
                found = _Match(f"{place.path}/{name}".lstrip("/"), {**place.fields, **fields})
                if _is_date(found):
                    yield found

    def _list(self, path: str) -> list[tuple[str, bool]]:
        """(name, whether it is a folder) of every entry of a folder, sorted; empty if the folder does not exist."""
        try:
            entries: list[dict[str, Any]] = self._fs.ls(self._inner(path), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for entry in entries:
            name = entry["name"].rstrip("/").rsplit("/", 1)[-1]
            kind = entry["type"]  # the type of a link is neither "directory" nor "file"
            found.append((name, kind == "directory" or (kind != "file" and bool(self._fs.isdir(entry["name"])))))
        return sorted(found)

    def _inner(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/") or "/"


def _regex(step: str) -> re.Pattern[str]:
    """The regular expression for one component of the pattern. A repeated field must match the same text."""
    text, seen = "", set()
    for token in _FIELDS.split(step):
        expression = _EXPRESSIONS.get(token)
        text += f"(?P={token[1:-1]})" if token in seen else expression or re.escape(token)
        if expression and token[0] == "{":
            seen.add(token)
    return re.compile(text)


def _is_date(match: _Match) -> bool:
    """Whether the match's day and hour exist: eight digits need not be a date."""
    try:
        time_of(match.day or "20000101", int(match.hour or 0))
    except ValueError:
        return False
    return True
