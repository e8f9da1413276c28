"""The watchdog: a process that ends the pipe commands of a worker when the worker has died, for any reason.

A worker's commands, and all processes that they start, carry its mark in their environment. The watchdog reads from a
pipe. When the worker dies, the system closes the worker's end; the watchdog then kills every process with the mark and
exits.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import uuid

MARK = "FLEET_PIPE_OWNER"

# Runs in a bare interpreter (-I -S), which starts in some ten milliseconds. A command that is just being started shows
# its parent's environment until exec: so the watchdog repeats the search until it finds nothing twice.
_WATCH = """
import os, sys, time
if os.fork():
    os._exit(0)
mark = sys.argv[1].encode()
sys.stdin.buffer.read()
calm = 0
while calm < 2:
    found = False
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and mark in open(f"/proc/{name}/environ", "rb").read().split(b"\\0"):
                os.kill(int(name), 9)
                found = True
        except OSError:
            pass
    calm = 0 if found else calm + 1
    time.sleep(0.1)
"""

_lock = threading.Lock()
_watched: tuple[str, int] | None = None  # (the mark of this process, its end of the pipe)


def marked_environment() -> dict[str, str]:
    """The environment for a command of this process: it carries the mark that the watchdog looks for."""
    global _watched
    with _lock:
        if _watched is None:
            _watched = _start()
        return {**os.environ, MARK: _watched[0]}


def _start() -> tuple[str, int]:
    mark = uuid.uuid4().hex
    theirs, own = os.pipe()
    os.set_inheritable(own, False)  # a command must not hold it open
    try:
        subprocess.run(  # returns once the watchdog has detached: it is not our child to wait for
            [sys.executable, "-I", "-S", "-c", _WATCH, f"{MARK}={mark}"],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the worker, not its watchdog
            check=True,
        )
    finally:
        os.close(theirs)
    return mark, own


def _forget_in_child() -> None:
    """Forget the watchdog in a forked process, which has its own commands and must not keep its parent's pipe open."""
    global _watched, _lock
    _lock = threading.Lock()
    if _watched is not None:
        with contextlib.suppress(OSError):
            os.close(_watched[1])
        _watched = None


os.register_at_fork(after_in_child=_forget_in_child)
