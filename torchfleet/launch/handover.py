"""What a notebook and the processes that it starts give to each other: files in memory without a name.

The processes inherit them open. Nobody else can write to them, and the function's is sealed before anyone has it: what
a process calls is what this notebook wrote, to the byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import msgspec

from torchfleet.base.errors import FleetError
from torchfleet.base.extras import missing
from torchfleet.base.plain_values import pack, unpack

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_VALUE, _FAILURE = b"v", b"f"  # first bytes of an outcome


class Call(msgspec.Struct):
    """A function to be called elsewhere, and what is needed to find what it is made of."""

    path: list[str]  # where modules are looked for
    sources: dict[str, list[str]]  # lines of the cells, for tracebacks
    pickled: bytes  # function, args, kwargs


class Failure(msgspec.Struct):
    """How a call ended that raised."""

    error: str  # its last line
    traceback: str
    time: float  # the first failure of a job is the cause of the others


def sealed_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A file in memory that has the call and can only be read; close it. Raises FleetError if it cannot be sent."""
    try:
        pickled = _pickle().dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # whatever the objects that it refers to raise
        raise FleetError(
            f"fleet.notebook.run: {function!r:.200} cannot be sent to other processes: {error}. Make what it uses "
            "within the function, or give it as args."
        ) from error
    file = os.memfd_create("fleet-call", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write(file, msgspec.msgpack.encode(Call(list(sys.path), _cells(), pickled)))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:  # no memory for it, or an interrupt
        os.close(file)
        raise
    return file


def read_call(file: int) -> Call:
    """In a process that inherited the file: what is to be called."""
    return msgspec.msgpack.decode(_read(file), type=Call)


def loaded(call: Call) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function with its arguments, made again. Raises whatever its modules raise when they are imported."""
    sys.path[:] = [*call.path, *(place for place in sys.path if place not in call.path)]
    for name, lines in call.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    function, args, kwargs = _pickle().loads(call.pickled)
    return function, args, kwargs


@contextlib.contextmanager
def result_files(num: int) -> Iterator[list[int]]:
    """Empty files in memory, one for the outcome of each process."""
    files: list[int] = []
    try:
        for _ in range(num):
            files.append(os.memfd_create("fleet-result", os.MFD_CLOEXEC))
        yield files
    finally:
        for file in files:
            os.close(file)


def write_outcome(file: int, value: Any, what: str) -> None:
    """Leave what the call returned, in the place of what an earlier start of this process left."""
    _replace(file, _VALUE + pack(value, what))


def write_failure(file: int, failure: Failure) -> None:
    """Leave how the call failed."""
    _replace(file, _FAILURE + msgspec.msgpack.encode(failure))


def read_outcome(file: int) -> tuple[Any, Failure | None] | None:
    """What a process has left: a value, or how it failed. None if it ended before it could say."""
    data = _read(file)
    if not data:
        return None
    if data[:1] == _FAILURE:
        return None, msgspec.msgpack.decode(data[1:], type=Failure)
    return unpack(data[1:]), None


def _cells() -> dict[str, list[str]]:
    """The sources that are no files: IPython's cells."""
    entries = [(name, entry) for name, entry in list(linecache.cache.items()) if len(entry) == 4]
    return {name: entry[2] for name, entry in entries if entry[1] is None and not os.path.exists(name)}


def _pickle() -> ModuleType:
    """For functions of a notebook's user, within that user's own processes: docs/security.md."""
    try:
        return import_module("cloudpickle")
    except ImportError:
        raise missing("cloudpickle", "fleet.notebook.run", "notebook") from None


def _replace(file: int, data: bytes) -> None:
    os.ftruncate(file, 0)
    _write(file, data)


def _write(file: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(file, memoryview(data)[written:], written)


def _read(file: int) -> bytes:
    """All of it, wherever the place is that processes share."""
    size, parts, num = os.fstat(file).st_size, [], 0
    while num < size and (part := os.pread(file, size - num, num)):
        parts.append(part)
        num += len(part)
    return b"".join(parts)
