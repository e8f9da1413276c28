"""Warms a server up, so that its first requests are not slow: compiles or loads the kernels, and keeps freed memory."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from msgspec.structs import replace
from numba.core import event

from torchfleet.base.errors import FleetError
from torchfleet.ps.kernels.jit import KERNELS, is_temporary, mark_of_all
from torchfleet.ps.kernels.merge import FEW_PLACES, unique
from torchfleet.ps.kernels.warm import warm_up_workers
from torchfleet.ps.server.log.log_records import LONG, crc32c
from torchfleet.ps.server.state.pending import PendingKeys, PendingRows
from torchfleet.ps.tables.kinds import make_table, samples
from torchfleet.ps.tables.rows.memory import keep_freed_memory
from torchfleet.ps.tables.settings.spec import KINDS, TableSpec
from torchfleet.ps.tables.settings.storage import IN_MEMORY, default_storage
from torchfleet.ps.tables.table import Table
from torchfleet.ps.tables.tiers.warm import warm_up_tiers
from torchfleet.ps.tables.warm import NUM_ROWS, keep, read_only, train, train_together

_BYTES, _DIM = 1 << 22, 64  # of the tables that are used
COMPILING = "compiling the kernels of its tables, as at the first start on a machine: ten seconds or more"
_LOCK_PAUSE = 0.2  # seconds between two tries to be the process that compiles
_loaded: list[bool] = []  # whether load_all has been called, in this process or in the one that forked it


def warm_up(specs: Sequence[TableSpec] = (), are_copied: bool = False) -> None:
    """Use the kernels with which tables of these descriptions are trained, on a few rows; `are_copied`: also those with
    which they are saved, copied and logged. Without `specs`: all kernels of all kinds of tables. The process also keeps
    freed memory, which the buffers of messages reuse. Once `load_all` was called, there is nothing to do for `specs`.
    """
    keep_freed_memory()
    if specs and _loaded:
        return
    with _without_collector():
        unique(np.arange(FEW_PLACES, dtype=np.uint64))  # more keys than `unique` has room for at first
        for table in (make_table(_small(spec), _BYTES) for spec in specs):
            train(table)
            if are_copied:
                keep(table)
        if not specs or are_copied:
            crc32c(bytes(LONG))
        if not specs or sum(spec.kind == "array" for spec in specs) > 1:
            train_together()
        if not specs or default_storage().memory or any(spec.storage.memory for spec in specs):
            warm_up_tiers()
        if not specs:
            PendingKeys().note(np.arange(3, dtype=np.uint64))
            pending = PendingRows()
            pending.note(np.arange(3))
            pending.take(2)
            for table in _all_kinds():
                train(table)
                keep(table)


def load_all() -> None:
    """Use all kernels, as warm_up without `specs` does; only the first time in a process and in those that it forks."""
    keep_freed_memory()
    if not _loaded:
        warm_up()
        _loaded.append(True)


def warm_up_rest() -> subprocess.Popen[bytes] | None:
    """Start a process that compiles all kernels into the cache, if this has not been done. It has the lowest priority,
    and only one is started on a machine: None if another server has done so. The caller ends it.
    """
    if is_temporary() or mark_of_all().exists():  # no other process finds kernels in a temporary folder
        return None
    lock = _lock()
    if lock is None:
        return None
    code = (
        "import os; os.nice(19); from torchfleet.ps.kernels import shared_cache; shared_cache.takes_locks = False; "
        "from torchfleet.ps.server.job.warm import compile_locked; compile_locked()"
    )
    nowhere = subprocess.DEVNULL
    try:  # the process inherits the lock, and holds it until it ends
        return subprocess.Popen(
            [sys.executable, "-c", code], stdin=nowhere, stdout=nowhere, stderr=nowhere, pass_fds=(lock,)
        )
    finally:
        os.close(lock)


def compile_all() -> None:
    """Compile all kernels into the cache, and note that they are there. Returns at once if a process is doing it."""
    lock = _lock()
    if lock is not None:
        try:
            compile_locked()
        finally:
            os.close(lock)


def compile_shown(show: Callable[[str], None]) -> None:
    """`compile_all`, with a text about the progress for `show` now and then; waits for a process that is doing it.
    Raises FleetError if this process has no folder to keep them in.
    """
    if is_temporary():
        raise FleetError(
            "kernels can be kept in no folder of this user: set NUMBA_CACHE_DIR to one to which only you can write"
        )

    class Shown(event.Listener):  # type: ignore[misc]
        def on_start(self, found: event.Event) -> None:
            pass

        def on_end(self, found: event.Event) -> None:
            num, all_of_them = sum(bool(kernel.signatures) for kernel in KERNELS), len(KERNELS)
            show(f"{'█' * (20 * num // all_of_them):<20} {num} of {all_of_them} kernels")

    while not mark_of_all().exists():
        lock = _lock()
        if lock is None:
            show("another process compiles them")
            time.sleep(_LOCK_PAUSE)
            continue
        try:
            with event.install_listener("numba:compile", Shown()):
                compile_locked()
        finally:
            os.close(lock)


def compile_locked() -> None:
    """`compile_all` in a process that has the lock."""
    warm_up()
    with _without_collector():
        _use_rest()
    mark_of_all().touch()


def _lock() -> int | None:
    """A file descriptor that holds the lock of the process that compiles; None if another process has it, or if files
    cannot be locked there."""
    mark = mark_of_all()
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(mark.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            os.close(lock)
    return None


def _use_rest() -> None:
    """Use the kernels that a server does not load when it starts: those of workers, and those of tables with arrays in
    read-only memory, as a log has them. A server that replays its log, and the first step of a worker, find them in the
    cache.
    """
    unique(read_only(np.zeros(1, np.uint64)))
    for table in _all_kinds():
        train(table, read_only)
        keep(table, read_only)
    warm_up_workers()


def _all_kinds() -> Iterator[Table]:
    return (make_table(spec, _BYTES) for kind in KINDS for spec in samples(kind))


@contextmanager
def _without_collector() -> Iterator[None]:
    """The compiler makes many objects that live on: looking for garbage among them takes a fifth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _small(spec: TableSpec) -> TableSpec:
    """A table that uses the same kernels."""
    few = {"dim": min(spec.dim, _DIM), "size": NUM_ROWS if spec.size else 0, "storage": IN_MEMORY}
    return replace(spec, shard=0, num_shards=1, **few)
