"""How long a server with many rows takes to go on from its log: `python -m benchmarks.durability --recovery_rows N`."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.timing import log
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import reserve
from torchfleet.ps.net.sockets import SocketChannel
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

SPEC = TableSpec("rows", dim=8, rule=Rule("adagrad"))
KEYS = 1 << 16  # of one push
AGAIN = 10  # every tenth row is pushed again after the copy
_BLOCK = 1 << 22  # bytes that are read at a time
_SECONDS = 1800.0
_PATIENCE = Patience(300.0, 3)


def recovery(given: argparse.Namespace, folder: Path) -> dict[str, float]:
    """A server with rows is killed: how long does the next one take until it serves?"""
    held, num_rows = folder / "recovery", given.recovery_rows
    store = ("--durability", "log", "--log_store", str(held), "--fsync_ms", str(given.fsync_ms))
    with ServerProcess("tcp://127.0.0.1:0", *store) as server:
        copied, expected = _fill(server, num_rows, folder / "saved", held)
        num_bytes = _size(held)
        server.kill()
    read = _seconds_to_read(held)
    empty = _seconds_to_start()
    log("  the server is killed, and started again")
    _forget_cached(held)
    began = time.perf_counter()
    with ServerProcess("tcp://127.0.0.1:0", *store, timeout=_SECONDS) as again:
        seconds = time.perf_counter() - began
        with _client(again) as client:
            found = client.stats()[0]["tables"]["rows"]["rows"]
            if found != num_rows or not np.array_equal(_some(client, num_rows), expected):
                raise AssertionError(f"expected {num_rows:,} rows as they were, found {found:,}, or other values")
    return {
        "recovered_rows": num_rows,
        "dim": SPEC.dim,
        "copy_bytes": copied,
        "entries_bytes": num_bytes - copied,
        "recovery_s": seconds,
        "empty_start_s": empty,
        "recovery_s_per_million_rows": (seconds - empty) / (num_rows / 1e6),
        "recovery_bytes_per_s": num_bytes / max(1e-9, seconds - empty),
        "read_s": read,
        "read_bytes_per_s": num_bytes / read,
    }


def _client(server: ServerProcess) -> Client:
    client = Client([SocketChannel(server.endpoint, None, Role.FIRST_WORKER)], patience=_PATIENCE)
    client.create_table(SPEC)
    return client


def _fill(server: ServerProcess, num_rows: int, saved: Path, held: Path) -> tuple[int, npt.NDArray[np.float32]]:
    """Rows, a copy of them in the log, and entries behind it. Returns the bytes of the copy, and some rows."""
    with _client(server) as client:
        _push(client, num_rows)
        log(f"  {num_rows:,} rows are pushed")
        before = {file.name for file in held.glob("segment*")}
        token, storage = secrets.randbits(62) + 1, Storage(str(saved))
        with reserve(storage, 1, token) as place:
            client.save(storage.path, place.folder, True, _SECONDS, token=token)
            place.release()
        while before & {file.name for file in held.glob("segment*")}:
            time.sleep(0.01)  # until the copy is whole
        shutil.rmtree(saved)
        copied = _size(held)
        _push(client, num_rows // AGAIN)
        return copied, _some(client, num_rows)


def _push(client: Client, num_rows: int) -> None:
    dice = np.random.default_rng(0)
    for start in range(0, num_rows, KEYS):
        keys = np.arange(start, min(start + KEYS, num_rows), dtype=np.uint64)
        client.push("rows", keys, dice.standard_normal((len(keys), SPEC.dim), np.float32))
    client.flush()


def _some(client: Client, num_rows: int) -> npt.NDArray[np.float32]:
    return client.pull("rows", np.arange(0, num_rows, max(1, num_rows // 1000), dtype=np.uint64)).result()


def _size(held: Path) -> int:
    return sum(file.stat().st_size for file in held.glob("segment*"))


def _forget_cached(held: Path) -> None:
    """Let the system drop what it keeps of the files in memory; shared memory stays where it is."""
    for file in held.glob("segment*"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds_to_read(held: Path) -> float:
    _forget_cached(held)
    buffer, began = bytearray(_BLOCK), time.perf_counter()
    for file in held.glob("segment*"):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - began


def _seconds_to_start() -> float:
    began = time.perf_counter()
    with ServerProcess("tcp://127.0.0.1:0"):
        return time.perf_counter() - began
