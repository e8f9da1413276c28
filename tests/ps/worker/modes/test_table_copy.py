"""Copies of whole tables that the workers of a machine train together."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.jobs import Part, wait_until
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.modes import table_copy
from torchfleet.ps.worker.modes.table_copy import Sharing, TableCopy, common_copy, on_this_machine
from torchfleet.ps.worker.modes.whole_tables import WholeTables

SIZES = {"a": (40, 3), "b": (25, 1)}
NUM_ROWS, DIM = SIZES["a"]
PATIENCE = 60.0


class Tables(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (num_rows, dim) in SIZES.items():
            first = fleet.nn.Constant(0.5)
            self.add_module(name, fleet.nn.SparseEmbedding(dim, name=name, num_embeddings=num_rows, initializer=first))


def run(body: Any, num_workers: int, num_servers: int = 2, k_steps: int = 1) -> Any:
    return jobs.run(
        body, Tables, jobs.sgd, mode="geo", num_workers=num_workers, num_servers=num_servers, k_steps=k_steps
    )


def apart(monkeypatch: pytest.MonkeyPatch, machine_of: dict[int, str]) -> None:
    """As if workers were on these machines."""
    monkeypatch.setattr(table_copy, "_place", lambda worker: machine_of[worker])


def add(tables: WholeTables, row: int, amount: float, count: int = 1) -> None:
    tables.values["a"][row, :DIM] += np.float32(amount)
    tables.changes["a"][row] += np.uint32(count)


def test_workers_meet_by_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch, {0: "x", 1: "y", 2: "x"})
    brought = [b"2 x", b"0 x", b"1 y"]
    assert on_this_machine(lambda name, data: brought, 2) == Sharing((0, 2), 2, num_copies=2)
    assert on_this_machine(lambda name, data: brought, 1) == Sharing((1,), 1, num_copies=2)


def test_one_machine_is_one_copy_and_the_servers_have_all_of_it_in_the_end() -> None:
    """What one worker changes the others see at once; sums are exact, and each change reaches the servers once."""

    def body(part: Part) -> np.ndarray:
        tables = part.worker.whole_tables(None, shared=True)
        assert (tables.values["a"][:, :DIM] == 0.5).all(), "filled before anybody trains"
        part.barrier()
        add(tables, part.index, 1.0)
        part.barrier()
        assert (tables.values["a"][:4, :DIM] == 1.5).all()
        for _ in range(20):
            add(tables, 10 + part.index, 0.25)
            tables.step_done()
        tables.finish()
        part.barrier()
        tables.flush()
        return tables.values["a"][:, :DIM].copy()

    done = run(body, num_workers=4)
    expected = np.full((NUM_ROWS, DIM), 0.5, np.float32)
    expected[:4] += 1.0
    expected[10:14] += 5.0
    for found in (*done.results, done.rows("a", NUM_ROWS).numpy()):
        np.testing.assert_array_equal(found, expected)


def test_copies_of_two_machines_learn_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch, {0: "x", 1: "y", 2: "x", 3: "y"})

    def body(part: Part) -> np.ndarray:
        tables = part.worker.whole_tables(1.0, shared=True)
        part.barrier()
        add(tables, 7, 2.0**part.index)  # one at a time on each machine
        part.barrier()
        own = 0.5 + (5.0 if part.index % 2 == 0 else 10.0)
        assert (tables.values["a"][7, :DIM] == own).all(), "the other machine's have not come yet"
        part.barrier()
        tables.finish()
        part.barrier()
        tables.flush()
        return tables.values["a"][7, :DIM].copy()

    done = run(body, num_workers=4, k_steps=100)
    for found in (*done.results, done.rows("a", 8).numpy()[7]):
        np.testing.assert_array_equal(found, np.full(DIM, 15.5, np.float32))


def test_the_workers_of_a_copy_exchange_it_in_turn() -> None:
    """Every k_steps steps of each worker, one of them sends what all have changed."""

    def body(part: Part) -> list[int]:
        tables = part.worker.whole_tables(None, shared=True)
        counts = []
        for _ in range(12):
            part.barrier()
            tables.step_done()
            wait_until(lambda: tables.stats()["queue"] == 0, "the exchange ends", PATIENCE)
            counts.append(tables.stats()["exchanges"])
        part.barrier()
        return counts

    results = run(body, num_workers=3, num_servers=1, k_steps=2).results
    assert results[0] == [0] * 5 + [1] * 6 + [2]
    assert results[1] == [0] * 3 + [1] * 6 + [2] * 3
    assert results[2] == [0] + [1] * 6 + [2] * 5


def test_a_worker_that_was_started_again_is_refused_instead_of_waiting_for_nobody() -> None:
    def body(part: Part) -> None:
        if part.index == 1:
            setup = part.worker._setup
            setup.info = dataclasses.replace(setup.info, restart=1)
            with pytest.raises(FleetError, match=naming("shared=False")):
                part.worker.whole_tables(None, shared=True)
            assert part.worker.whole_tables(None).values["a"][0, 0] == 0.5
        part.barrier()

    run(body, num_workers=2, num_servers=1)


def both_sides(sizes: dict[str, tuple[int, int]]) -> tuple[TableCopy, TableCopy]:
    """A common copy as workers 0 and 1 of this process have it."""
    memory: list[bytes] = []
    one = common_copy(sizes, 1, Sharing((0, 1), 0, 1), lambda name, data: memory.append(data) or [data])
    return one, common_copy(sizes, 1, Sharing((0, 1), 1, 1), lambda name, data: [data, *memory])


def test_one_worker_at_a_time_exchanges() -> None:
    one, other = both_sides(SIZES)
    other.values["a"][3, 1] = 7.0
    assert one.values["a"][3, 1] == 7.0
    assert one.values["a"].ctypes.data % 64 == 0
    with one.alone(PATIENCE):
        with pytest.raises(FleetError, match=naming("0.05", 0, 1)), other.alone(0.05):
            pass
        entered = threading.Event()

        def enter() -> None:
            with other.alone(PATIENCE):
                entered.set()

        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.05)
    thread.join(PATIENCE)
    assert entered.is_set()
    one.close()
    other.close()


def test_the_lock_of_a_worker_that_is_killed_is_free() -> None:
    one, other = both_sides(SIZES)
    code = "import fcntl, os, sys, time; file = os.open(sys.argv[1], os.O_RDWR); fcntl.flock(file, fcntl.LOCK_EX)"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{code}; print('held', flush=True); time.sleep(60)",
            f"/proc/{os.getpid()}/fd/{one._file}",
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(FleetError, match=naming("0.05", "sync_timeout")), other.alone(0.05):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(PATIENCE)
    holder.stdout.close()
    with other.alone(PATIENCE):
        pass
    one.close()
    other.close()


def test_memory_of_a_worker_that_is_gone_is_an_error() -> None:
    def gather(name: str, data: bytes) -> list[bytes]:
        return [b"0 999999999 3", data]

    with pytest.raises(FleetError, match=naming("worker 0", "shared=False")):
        common_copy(SIZES, 1, Sharing((0, 1), 1, 1), gather)
