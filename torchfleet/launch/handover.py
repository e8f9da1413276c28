"""How a notebook and the processes that it starts exchange a call and its results: by anonymous files in memory.

The processes inherit the open descriptors. No other process can write to these files, and the file with the function
is sealed before a process gets it: every process calls exactly what the notebook wrote.
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
from torchfleet.base.prepared_types import prepared

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_VALUE, _FAILURE = b"v", b"f"  # the first byte of a result


class Call(msgspec.Struct):
    """A function to call in another process, with what that process needs to load it."""

    path: list[str]  # sys.path of the notebook
    sources: dict[str, list[str]]  # source lines of the cells, for tracebacks
    pickled: bytes  # function, args, kwargs


class Failure(msgspec.Struct):
    """An exception raised by the call."""

    error: str  # the last line of the traceback
    traceback: str
    time: float  # the earliest failure of a job counts as the cause of the others


def sealed_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return a read-only file in memory with the call. The caller closes it. Raises FleetError if pickling fails."""
    try:
        pickled = _pickle().dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # pickled objects may raise anything
        raise FleetError(
            f"fleet.notebook.run: {function!r:.200} cannot be sent to other processes: {error}. Make what it uses "
            "within the function, or give it as args."
        ) from error
    file = os.memfd_create("fleet-call", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write(file, msgspec.msgpack.encode(Call(list(sys.path), _cells(), pickled)))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:  # out of memory, or an interrupt
        os.close(file)
        raise
    return file


def read_call(file: int) -> Call:
    """Read the call in a process that inherited the file."""
    return msgspec.msgpack.decode(_read(file), type=prepared(Call))


def loaded(call: Call) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Unpickle the function and its arguments. Raises any exception that importing its modules raises."""
    sys.path[:] = [*call.path, *(place for place in sys.path if place not in call.path)]
    for name, lines in call.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    function, args, kwargs = _pickle().loads(call.pickled)
    return function, args, kwargs


@contextlib.contextmanager
def result_files(num: int) -> Iterator[list[int]]:
    """Yield empty files in memory, one for the result of each process."""
    files: list[int] = []
    try:
        for _ in range(num):
            files.append(os.memfd_create("fleet-result", os.MFD_CLOEXEC))
        yield files
    finally:
        for file in files:
            os.close(file)


def write_outcome(file: int, value: Any, what: str) -> None:
    """Write the value that the call returned. It replaces the result of an earlier start of this process."""
    _replace(file, _VALUE + pack(value, what))


def write_failure(file: int, failure: Failure) -> None:
    """Write how the call failed."""
    _replace(file, _FAILURE + msgspec.msgpack.encode(failure))


def read_outcome(file: int) -> tuple[Any, Failure | None] | None:
    """Return the result of a process: a value, or a failure. None if the process ended without a result."""
    data = _read(file)
    if not data:
        return None
    if data[:1] == _FAILURE:
        return None, msgspec.msgpack.decode(data[1:], type=prepared(Failure))
    return unpack(data[1:]), None


def _cells() -> dict[str, list[str]]:
    """Return the sources that are not in files: IPython's cells."""
    entries = [(name, entry) for name, entry in list(linecache.cache.items()) if len(entry) == 4]
    return {name: entry[2] for name, entry in entries if entry[1] is None and not os.path.exists(name)}


def _pickle() -> ModuleType:
    """Return the pickle module. It is used only between processes of the notebook's user: docs/security.md."""
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
    """Read the whole file, independent of the file position, which the processes share."""
    size, parts, num = os.fstat(file).st_size, [], 0
    while num < size and (part := os.pread(file, size - num, num)):
        parts.append(part)
        num += len(part)
    return b"".join(parts)
