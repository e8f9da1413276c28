"""Logs as JSON lines, on request: one object for each line of output.

{"time": "2026-11-16T15:04:05.123+00:00", "role": "worker", "index": 0, "level": "info", "text": "step 100 ..."}
"""

from __future__ import annotations

import json
import os
import re
import select
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.log_file import LogFile

VARIABLE = "FLEET_LOG_FORMAT"
FORMATS = ("text", "json")
MOST = 1 << 16  # bytes of a line; a longer one is split into several objects
_PIECE = 1 << 16  # bytes read from a pipe at a time
_LOOK = 200  # milliseconds between two checks whether a pipe was closed
_PATIENCE = 10.0  # seconds to read the rest of a pipe after it was closed
_LEVELS = ("debug", "info", "warning", "error", "critical")
_COMMANDS = re.compile("[\x7f-\x9f]")  # JSON need not escape these control characters; terminals execute them
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
# The prefix of Python's logging, with or without a time; warnings; the first and last lines of a traceback.
_NAMED = re.compile(r"^(?:[\[\]\d\s:.,TZ+/-]*)(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b")
_WARNING = re.compile(r"(?:^|\s)\w*Warning: ")
_FAILURE = re.compile(r"^(?:Traceback \(most recent call last\):|[\w.]+(?:Error|Exception|Interrupt|Exit)(?::|$))")


def log_format(environment: str | None = None) -> str:
    """The value of FLEET_LOG_FORMAT, text if it is not set. Raises RoleError."""
    found = (os.environ.get(VARIABLE) if environment is None else environment) or FORMATS[0]
    if found not in FORMATS:
        raise RoleError(f"{VARIABLE} must be one of {', '.join(FORMATS)}; found {found!r}")
    return found


def json_line(text: str, role: str, index: int, replica: int = 0, level: str | None = None) -> str:
    """The JSON object of a line, without a newline. `level`: None to derive it from the line."""
    found: dict[str, object] = {"time": datetime.now().astimezone().isoformat(timespec="milliseconds")}
    found |= {"role": role, "index": index, "level": level or level_of(text)}
    if replica:
        found["replica"] = replica
    line = _ENCODE({**found, "text": text})
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def level_of(text: str) -> str:
    """The level that the beginning of the line shows; info by default."""
    if named := _NAMED.match(text):
        word = named[1].lower()
        return {"warn": "warning", "fatal": "critical"}.get(word, word)
    if _FAILURE.match(text):
        return "error"
    return "warning" if _WARNING.search(text) else "info"


def readable(line: str) -> str:
    """The text of a log line in either format."""
    if line.startswith('{"time": '):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return line
        if isinstance(found, dict) and found.get("level") in _LEVELS and isinstance(found.get("text"), str):
            return str(found["text"])
    return line


def last_lines(end: bytes, num: int) -> list[str]:
    """The last lines of a log as readable text. `end` holds the last bytes of the log."""
    text = end.decode(errors="replace")
    objects = text.rstrip("\n").split("\n")  # not splitlines(): JSON does not escape other line separators
    if readable(objects[-1]) == objects[-1]:
        return text.splitlines()[-num:]
    whole = objects if readable(objects[0]) != objects[0] else objects[1:]  # the first may be incomplete
    return [readable(line) for line in whole][-num:]


class LineSplitter:
    """Joins pieces of output into lines. Bytes that are not UTF-8 are replaced."""

    def __init__(self, most: int = MOST) -> None:
        self._rest, self._most = b"", most

    def lines(self, data: bytes) -> Iterator[str]:
        """The lines that this piece completes. A line longer than `most` is returned in parts."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield from self._parts(line)
        while len(self._rest) > self._most:
            part, self._rest = self._rest[: self._most], self._rest[self._most :]
            yield _text(part)

    def end(self) -> Iterator[str]:
        """The last line, if it has no newline."""
        rest, self._rest = self._rest, b""
        if rest:
            yield from self._parts(rest)

    def _parts(self, line: bytes) -> Iterator[str]:
        for begin in range(0, max(1, len(line)), self._most):
            yield _text(line[begin : begin + self._most])


class JsonLog:
    """Takes the output of a process in pieces and writes it as JSON lines."""

    def __init__(self, write: Callable[[bytes], None], role: str, index: int, replica: int = 0) -> None:
        self._write, self._who, self._splitter = write, (role, index, replica), LineSplitter()

    def write(self, data: bytes) -> None:
        self._put(self._splitter.lines(data))

    def end(self) -> None:
        self._put(self._splitter.end())

    def _put(self, lines: Iterator[str]) -> None:
        if made := "".join(f"{json_line(line, *self._who)}\n" for line in lines):
            self._write(made.encode(errors="replace"))


class JsonPipe:
    """A named pipe in place of a log file. Everything written to it is logged as JSON lines.

    A thread reads until all writers have closed the pipe or `close` is called. It owns `log`.
    """

    def __init__(self, path: Path, log: LogFile, role: str, index: int) -> None:
        self._path, self._log, self._json = path, log, JsonLog(log.write, role, index)
        self._is_over = False
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a writer
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until everything written is in the log, unless a writer keeps writing."""
        self._is_over = True
        self._thread.join(_PATIENCE)
        self._path.unlink(missing_ok=True)

    def _copy(self) -> None:
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        while True:
            found = waiting.poll(_LOOK)
            if found and found[0][1] & select.POLLIN:
                self._json.write(os.read(self._end, _PIECE))
            elif found or self._is_over:  # the last writer has closed the pipe
                break
        self._json.end()
        self._log.close()
        os.close(self._end)


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
