"""Passes a file through a user's command, yields its output, and checks its exit status."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

from torchfleet.base.errors import DataError
from torchfleet.data.reading import streams
from torchfleet.data.reading.watchdog import marked_environment

_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
_TAIL = 2000
_LINES = 20
_POLL_MS = 100  # between two calls of `is_over`


def piped(path: str, command: str, skip: bool, is_over: Callable[[], bool] = lambda: False) -> Iterator[bytes]:
    """The output of `command` with the file's contents as its input.

    `skip`: tells a generator script to skip bad lines. `is_over`: whether to end the command early; checked while it
    has no output.
    """
    is_plain = streams.is_local(path) and not streams.compression(path)
    stdin: Any = streams.open_file(path) if is_plain else subprocess.PIPE
    with tempfile.TemporaryFile() as complaints:
        try:
            process = subprocess.Popen(
                command,
                shell=True,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,
                env={**marked_environment(), "FLEET_ON_BAD_LINE": "skip" if skip else "error"},
            )
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: the pipe command `{command[:200]}` cannot be run ({error})") from error
        finally:
            if is_plain:
                stdin.close()
        feeder = None if is_plain else _Feeder(path, process)
        try:
            assert process.stdout is not None
            _widen(process.stdout)
            yield from _output(process.stdout, is_over)
            status = _wait(process, is_over)
            if feeder is not None:
                feeder.finish(is_over)
            if status:
                raise DataError(_failure(path, command, status, complaints))
        finally:
            _end(process)


def _output(pipe: IO[bytes], is_over: Callable[[], bool]) -> Iterator[bytes]:
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLIN)
    while True:
        while not poll.poll(_POLL_MS):
            if is_over():
                return
        if not (data := os.read(pipe.fileno(), streams.CHUNK)):
            return
        yield data


def _wait(process: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> int:
    while not is_over():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_MS / 1000)
    return 0


class _Feeder:
    """Writes a decompressed or remote file to the command, in a separate thread from the one that reads its output."""

    def __init__(self, path: str, process: subprocess.Popen[bytes]) -> None:
        self._path, self._process = path, process
        self._error: Exception | None = None
        assert process.stdin is not None
        _widen(process.stdin)
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def finish(self, is_over: Callable[[], bool]) -> None:
        """Wait until the whole file is written, or `is_over`: a command that does not read blocks the thread."""
        while self._thread.is_alive() and not is_over():
            self._thread.join(_POLL_MS / 1000)
        if self._error is not None:
            raise self._error

    def _feed(self) -> None:
        assert self._process.stdin is not None
        try:
            for data in streams.chunks(streams.open_file(self._path), self._path):
                self._process.stdin.write(data)
        except BrokenPipeError:
            pass  # the command needs no more input, as `head` does
        except Exception as error:  # raised by `finish`: the command takes its partial input for the whole file
            self._error = error
        finally:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def _widen(pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # a system limit: the pipe keeps its size
        fcntl.fcntl(pipe.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)


def _failure(path: str, command: str, status: int, complaints: IO[bytes]) -> str:
    size = complaints.seek(0, os.SEEK_END)
    complaints.seek(max(0, size - _TAIL))
    lines = complaints.read().decode(errors="replace").strip().splitlines()[-_LINES:]
    ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    output = "\n  ".join(["it wrote to stderr:", *lines]) if lines else "it wrote nothing to stderr"
    return f"{path}: the pipe command `{command}` {ended}; {output}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and the processes that it has started."""
    if process.returncode is None:  # not waited for yet, so its process id is still valid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    process.wait()
