"""Whole-table geo training: what goes to the servers and when, what comes back, and what goes wrong.

The oracles are plain numpy. Where all numbers are small multiples of a power of two no sum is rounded, in whatever
order it is taken, and values are compared to the bit; else to 1e-5.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import jobs
from support.fleets import Fleet, ForkedServer, Talk, assert_ok, eighths, in_process, keys_of, refusal
from support.jobs import Part, Servers, one_worker, wait_until
from support.lossy import Faults, Network
from support.messages import names, naming
from support.searches import examples

import torchfleet as fleet
from torchfleet.api.current_job import get_worker
from torchfleet.api.job.worker_role import WorkerRole
from torchfleet.base.errors import FleetError, ModelError, ServerUnreachable, StrategyError, TableError
from torchfleet.base.role.role_info import WORKER, RoleInfo
from torchfleet.ps.kernels.differences import fold_in, share_by_count, take_differences
from torchfleet.ps.kernels.vector_instructions import padded
from torchfleet.ps.net.wire import DELTA, Array, Command
from torchfleet.ps.server import commands
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state.changes import Changes
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience
from torchfleet.ps.worker.client.future import Changed
from torchfleet.ps.worker.modes import whole_tables as module
from torchfleet.ps.worker.modes.table_copy import Sharing, TableCopy, alone, common_copy
from torchfleet.ps.worker.modes.whole_tables import WholeTables

NUM_A, DIM_A = 40, 3  # the table "a"; "b" has one number a row
NUM_B = 25
SIZES = {"a": (NUM_A, DIM_A), "b": (NUM_B, 1)}
FIRST = 0.5
HOT = 16
SOON = 60.0  # seconds; what takes longer hangs, on busy cores too


class Tables(torch.nn.Module):
    """Two tables of declared sizes, every number FIRST to begin with, or as the default initializer has it."""

    def __init__(self, initializer: Any = None, **options: Any) -> None:
        super().__init__()
        made: dict[str, Any] = {"initializer": initializer or fleet.nn.Constant(FIRST), **options}
        self.a = fleet.nn.SparseEmbedding(DIM_A, name="a", num_embeddings=NUM_A, **made)
        self.b = fleet.nn.SparseEmbedding(1, name="b", num_embeddings=NUM_B, **made)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(ids), self.b(ids)], dim=-1)


def random_tables() -> torch.nn.Module:
    return Tables(fleet.nn.Uniform(-0.05, 0.05))


def first_rows(part: Part, table: str, ids: Any) -> np.ndarray:
    """What rows start with, worked out without any server."""
    spec = msgspec.structs.replace(part.job.plan.sparse[table].spec, num_shards=1)
    return SparseTable(spec, jobs.MAX_TABLE_BYTES).pull(np.asarray(ids, np.uint64))


def first_values() -> dict[str, np.ndarray]:
    return {name: np.full(size, FIRST, np.float32) for name, size in SIZES.items()}


def add(copy: WholeTables, table: str, rows: Any, amount: Any, count: int = 1) -> None:
    """What training does: change distinct rows, then count."""
    dim = SIZES[table][1]
    copy.values[table][rows, :dim] += np.float32(amount)
    copy.changes[table][rows] += np.uint32(count)


def own(copy: WholeTables) -> dict[str, np.ndarray]:
    return {name: copy.values[name][:, :dim].copy() for name, (_, dim) in SIZES.items()}


def held(part: Part) -> dict[str, np.ndarray]:
    """What the servers hold."""
    return {name: part.rows(name, range(num)).numpy() for name, (num, _) in SIZES.items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 0.0) -> None:
    for name in SIZES:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=tolerance, err_msg=name)


def is_idle(copy: WholeTables) -> bool:
    return copy.stats()["queue"] == 0


def step(copy: WholeTables) -> None:
    """One step, and whatever exchange it starts, to its end."""
    copy.step_done()
    wait_until(lambda: is_idle(copy), "the exchange ends", SOON)


def within(work: Callable[[], Any], seconds: float = SOON) -> Any:
    """What `work` returns or raises; an error if it hangs."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def guarded() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:  # raised below
            outcome.append((None, error))

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"hangs: not over after {seconds:g} s"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def one_worker_with_whole_tables(
    num_servers: int = 1,
    share: float | None = None,
    model: torch.nn.Module | None = None,
    servers: Servers | None = None,
    k_steps: int = 1,
) -> Iterator[tuple[Part, WholeTables]]:
    """The only worker of a geo job; stopped at the end unless the test failed."""
    made = model or Tables()
    with one_worker(made, mode="geo", num_servers=num_servers, servers=servers, k_steps=k_steps) as part:
        yield part, part.worker.whole_tables(share)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "PSERVER_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with jobs.clean_facade():
        yield


# The kernels


@pytest.mark.parametrize("dim", [1, 3, 16, 100])
def test_differences_are_taken_as_the_formula_says(dim: int) -> None:
    """out = (x - b) · share; b += out; more than `rest` left counts as a change. To the bit, in float32."""
    rng = np.random.default_rng(dim)
    width = dim if dim == 1 else padded(dim)
    values = rng.normal(size=(50, width)).astype(np.float32)
    base = values[:, :dim] + rng.choice([0, 1e-4, 1e-3, 0.1], (50, 1)).astype(np.float32)
    rows = rng.permutation(50)[:30]
    changes = rng.integers(0, 5, 50).astype(np.uint32)
    rest, shares = np.float32(1e-3), rng.choice([1.0, 0.5, 1 / 3, 0.07], 30).astype(np.float32)

    difference = values[rows, :dim] - base[rows]
    sent = difference * shares[:, None]
    expected_base, expected_changes, before = base.copy(), changes.copy(), values.copy()
    expected_base[rows] += sent
    expected_changes[rows] += (np.abs(difference - sent).max(axis=1) > rest).astype(np.uint32)

    out = np.full((30, dim), np.nan, np.float32)
    take_differences(values, base, rows, shares, rest, changes, out)
    np.testing.assert_array_equal(out, sent)
    np.testing.assert_array_equal(base, expected_base)
    np.testing.assert_array_equal(changes, expected_changes)
    np.testing.assert_array_equal(values, before)


def test_no_rows_make_no_differences() -> None:
    values, base, changes = np.ones((3, 16), np.float32), np.zeros((3, 2), np.float32), np.zeros(3, np.uint32)
    none = np.empty(0, np.int64)
    no_shares = np.empty(0, np.float32)
    take_differences(values, base, none, no_shares, np.float32(0), changes, np.empty((0, 2), np.float32))
    fold_in(values, base, none, np.empty((0, 2), np.float32))
    assert (values == 1).all()
    assert not base.any()
    assert not changes.any()


def share_of(num_changes: Any, num_copies: int) -> Any:
    """Copies that each go 1 - r of a way are given the weight with which their sum goes 1 - r^copies of it."""
    r = np.exp(-np.maximum(num_changes, 1) / 10)
    return (1 - r**num_copies) / (num_copies * (1 - r))


@pytest.mark.parametrize("num_copies", [1, 2, 8, 1000])
def test_shares_by_count_are_those_of_the_formula(num_copies: int) -> None:
    counts = np.array([0, 1, 2, 16, 1000, 2**32 - 1], np.uint32)
    found = np.empty(len(counts), np.float32)
    share_by_count(counts, num_copies, found)
    np.testing.assert_allclose(found, share_of(counts.astype(float), num_copies), rtol=1e-6)
    assert (np.diff(found) <= 0).all()
    assert found[-1] == np.float32(1 / num_copies)
    if num_copies == 1:
        assert (found == 1).all(), "one copy sends all that it has learned"


@pytest.mark.parametrize("dim", [1, 3, 16, 100])
def test_what_the_servers_have_is_folded_in_as_the_formula_says(dim: int) -> None:
    """x += s - b; b = s. To the bit; other rows and what is beyond dim stay as they are."""
    rng = np.random.default_rng(dim)
    width = dim if dim == 1 else padded(dim)
    values, base = rng.normal(size=(50, width)).astype(np.float32), rng.normal(size=(50, dim)).astype(np.float32)
    rows, new = rng.permutation(50)[:20], rng.normal(size=(20, dim)).astype(np.float32)
    expected, expected_base = values.copy(), base.copy()
    expected[rows, :dim] += new - base[rows]
    expected_base[rows] = new
    fold_in(values, base, rows, new)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(base, expected_base)


# First values


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_the_first_values_are_the_servers(num_servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 7)  # several messages a table
    with one_worker_with_whole_tables(num_servers, model=random_tables()) as (part, copy):
        assert_same(own(copy), held(part))
        for name, (num, dim) in SIZES.items():
            expected = first_rows(part, name, range(num))
            np.testing.assert_array_equal(copy.values[name][:, :dim], expected)
            assert expected.any()
            assert copy.values[name].shape == (num, 1 if dim == 1 else padded(dim))
            assert copy.values[name].dtype == np.float32
            assert not copy.values[name][:, dim:].any()
            assert (copy.changes[name].dtype, copy.changes[name].shape) == (np.uint32, (num,))
            assert not copy.changes[name].any()


def test_what_was_trained_through_the_model_before_is_in_the_whole_tables() -> None:
    with one_worker(Tables(), mode="geo", num_servers=2, k_steps=100) as part:
        part.model(torch.tensor([3, 4])).sum().backward()
        part.optimizer.step()  # not exchanged yet
        copy = part.worker.whole_tables(None)
        expected = first_values()
        for name in SIZES:
            expected[name][[3, 4]] -= 0.5  # the rate of jobs.sgd
        assert_same(own(copy), expected)
        assert_same(held(part), expected)


@pytest.mark.parametrize("k_steps", [2, 5])
def test_steps_are_counted_on_from_those_before_the_whole_tables(k_steps: int) -> None:
    """Schedules go by this number. The exchanges come every k steps of the whole tables."""
    with one_worker(Tables(), mode="geo", k_steps=k_steps) as part:
        for _ in range(3):
            part.model(torch.tensor([3, 4])).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
        copy = part.worker.whole_tables(None)
        before = copy.stats()["exchanges"]
        assert copy.stats()["steps"] == 3
        for _ in range(k_steps - 1):
            copy.step_done()
        assert (copy.stats()["steps"], copy.stats()["exchanges"]) == (2 + k_steps, before)
        copy.step_done()
        copy.flush()
        assert copy.stats()["exchanges"] >= before + 1


# One worker


@pytest.mark.parametrize("num_servers", [1, 2, 3])
@pytest.mark.parametrize("k_steps", [1, 3])
def test_with_one_worker_the_servers_hold_the_whole_tables_to_the_bit(num_servers: int, k_steps: int) -> None:
    rng = np.random.default_rng(k_steps)
    expected = first_values()
    with one_worker_with_whole_tables(num_servers, k_steps=k_steps) as (part, copy):
        for i in range(40):
            for name, (num, dim) in SIZES.items():
                rows = rng.permutation(num)[: rng.integers(0, num)]
                amounts = eighths(rng, len(rows), dim)
                add(copy, name, rows, amounts)
                expected[name][rows] += amounts
            if i % 2:
                step(copy)
            else:
                copy.step_done()  # the next changes meet the exchange
        copy.flush()
        assert_same(own(copy), expected)
        assert_same(held(part), expected)
        assert copy.stats()["exchanges"] >= 40 // k_steps // 2


def test_with_one_worker_any_numbers_reach_the_servers() -> None:
    """Not exact sums: x - b is rounded, and so is b + (x - b). The worker keeps its own."""
    rng = np.random.default_rng(5)
    with one_worker_with_whole_tables(2, model=random_tables()) as (part, copy):
        for _ in range(60):
            add(copy, "a", rng.permutation(NUM_A)[:10], rng.normal(size=(10, DIM_A)) * 0.1)
            add(copy, "b", rng.permutation(NUM_B)[:10], rng.normal(size=(10, 1)) * 0.1)
            step(copy)
        copy.finish()
        assert_same(held(part), own(copy), 1e-6)


def test_a_large_table_goes_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 4)
    servers = Servers(2)
    with one_worker_with_whole_tables(servers=servers) as (part, copy):
        before = servers.counts("PUSH")[0]
        amounts = np.arange(NUM_A * DIM_A).reshape(NUM_A, DIM_A) / 8
        add(copy, "a", np.arange(NUM_A), amounts)
        copy.flush()
        assert servers.counts("PUSH")[0] == before + NUM_A // 4
        np.testing.assert_array_equal(held(part)["a"], np.float32(FIRST + amounts))


def test_a_change_that_nobody_counted_goes_with_finish() -> None:
    with one_worker_with_whole_tables() as (part, copy):
        copy.values["a"][7, 2] += 1.0
        copy.flush()
        assert held(part)["a"][7, 2] == FIRST
        copy.finish()
        assert held(part)["a"][7, 2] == FIRST + 1.0


# Which rows go when


def test_hot_rows_go_at_once_and_others_with_every_sixteenth_exchange() -> None:
    with one_worker_with_whole_tables() as (part, copy):
        expected = first_values()["a"][:, 0]
        step(copy)  # the first exchange takes all rows; so do those after 16 and 32
        for exchange in range(1, 33):
            add(copy, "a", [0], 1.0, HOT)
            add(copy, "a", [1], 1.0, HOT - 1)  # 15, then 30: with every second exchange
            if exchange in (1, 20):
                add(copy, "a", [2], 1.0)
            step(copy)
            expected[0] = FIRST + exchange
            if exchange % 2 == 0 or exchange % HOT == 0:
                expected[1] = FIRST + exchange
            if exchange in (16, 32):
                expected[2] = copy.values["a"][2, 0]
            np.testing.assert_array_equal(held(part)["a"][:, 0], expected, err_msg=f"exchange {exchange}")


def test_the_first_exchange_takes_rows_that_were_changed_once() -> None:
    with one_worker_with_whole_tables() as (part, copy):
        add(copy, "b", [3], 1.0)
        step(copy)
        assert held(part)["b"][3] == FIRST + 1.0


def test_flush_sends_all_rows() -> None:
    with one_worker_with_whole_tables() as (part, copy):
        step(copy)
        add(copy, "a", [1, 2], 1.0)
        step(copy)
        assert_same(held(part), first_values())
        copy.flush()
        assert_same(held(part), own(copy))
        assert (held(part)["a"][1:3] == FIRST + 1.0).all()


def test_a_count_is_used_up_by_the_exchange_that_takes_the_row() -> None:
    with one_worker_with_whole_tables() as (_, copy):
        add(copy, "a", [1, 2], 1.0, 100)
        copy.flush()
        assert copy.stats()["rows_sent"] == 2
        assert not copy.changes["a"].any()
        copy.flush()
        assert copy.stats()["rows_sent"] == 2


# When there is an exchange


def test_steps_of_all_threads_are_counted_together() -> None:
    with one_worker_with_whole_tables(k_steps=10) as (_, copy):
        for round_number in range(3):
            jobs.in_threads(lambda i: [copy.step_done() for _ in range(3)], 3)
            time.sleep(0.02)
            assert copy.stats()["exchanges"] == round_number, "nine steps are none"
            step(copy)
            assert copy.stats()["exchanges"] == round_number + 1
        assert copy.stats()["steps"] == 30


def test_no_step_of_many_threads_is_lost() -> None:
    with one_worker_with_whole_tables(k_steps=7) as (_, copy):
        jobs.in_threads(lambda i: [copy.step_done() for _ in range(500)], 4)
        assert copy.stats()["steps"] == 2000
        jobs.wait_until(lambda: copy.stats()["exchanges"] > 0, "the first exchange")  # its thread gets its turn
        copy.flush()
        assert 2 <= copy.stats()["exchanges"] <= 2000 // 7 + 1


def test_steps_do_not_wait_for_a_slow_server() -> None:
    servers = Servers(2)
    with one_worker_with_whole_tables(servers=servers) as (part, copy):
        servers.hold_pushes()
        for _ in range(50):
            add(copy, "a", [1], 1.0, HOT)
            copy.step_done()
        assert copy.stats()["queue"] == 1, "one exchange at a time"
        assert copy.stats()["exchanges"] == 0
        servers.release_pushes()
        copy.flush()
        assert (held(part)["a"][1] == FIRST + 50).all()


# What is sent of a difference


def test_a_share_of_a_difference_is_sent_and_the_rest_later() -> None:
    with one_worker_with_whole_tables(share=0.25) as (part, copy):
        add(copy, "a", [1], 1.0)
        left = 1.0
        for _ in range(3):
            copy.flush()
            left *= 0.75
            assert (held(part)["a"][1] == FIRST + 1.0 - left).all()
            assert (copy.values["a"][1, :DIM_A] == FIRST + 1.0).all(), "its own value is its own"
        copy.finish()
        assert (held(part)["a"][1] == FIRST + 1.0).all()


def test_what_a_share_leaves_over_goes_with_later_exchanges_by_itself() -> None:
    with one_worker_with_whole_tables(share=0.5) as (part, copy):
        add(copy, "a", [1], 1.0)
        for exchange in range(17):
            step(copy)
            expected = FIRST + (0.5 if exchange < 16 else 0.75)
            assert (held(part)["a"][1] == expected).all(), exchange


def test_a_rest_too_small_to_travel_arrives_with_finish() -> None:
    small = 2.0**-10
    with one_worker_with_whole_tables(share=0.5) as (part, copy):
        add(copy, "a", [1], small)
        for _ in range(3):
            copy.flush()
            assert (held(part)["a"][1] == FIRST + small / 2).all()
        copy.finish()
        assert (held(part)["a"][1] == FIRST + small).all()


def test_stop_sends_what_a_share_has_left_over() -> None:
    servers = Servers(2)
    with one_worker_with_whole_tables(share=0.125, servers=servers) as (part, copy):
        add(copy, "a", [1, 30], 1.0)
        copy.flush()
        add(copy, "b", [5], 2.0)
        expected = own(copy)
    client = Client(servers.connect())
    for name, (num, _) in SIZES.items():
        client.attach(part.job.plan.sparse[name].spec)
        np.testing.assert_array_equal(client.pull(name, np.arange(num)).result(), expected[name])


def test_finish_sends_all_while_an_exchange_is_under_way() -> None:
    """The exchange has sent its share of table a and is about to take table b: what it leaves over of b is less than
    what counts as a change, and must still go with finish."""
    servers = Servers()
    small = 2.0**-10
    with one_worker_with_whole_tables(share=0.5, servers=servers) as (part, copy):
        servers.hold_pushes()
        add(copy, "a", [1], small)
        add(copy, "b", [1], small)
        copy.step_done()
        wait_until(lambda: copy.changes["a"][1] == 0, "the exchange has taken a's row", SOON)
        opener = threading.Timer(0.2, servers.release_pushes)
        opener.start()
        copy.finish()
        opener.join()
        assert_same(held(part), own(copy))


def test_the_share_goes_by_the_changes_of_a_row_unless_given() -> None:
    counts = np.array([1, 5, 1000])

    def body(part: Part) -> None:
        copy = part.worker.whole_tables(None)
        part.barrier()
        if part.index == 0:
            for row, count in enumerate(counts):
                add(copy, "a", [row], 1.0, count)
            copy.flush()
            expected = FIRST + share_of(counts, 4)
            np.testing.assert_allclose(held(part)["a"][:3], np.tile(expected, (DIM_A, 1)).T, rtol=1e-6)
        part.barrier()

    jobs.run(body, Tables, jobs.sgd, mode="geo", num_workers=4, num_servers=2, k_steps=5)


@pytest.mark.parametrize("share", [0, 0.0, -0.5, 1.5, float("nan"), float("inf")])
def test_a_share_out_of_range_is_refused_and_the_job_goes_on(share: float) -> None:
    with one_worker(Tables(), mode="geo", k_steps=1) as part:
        with pytest.raises(FleetError, match=naming("whole_tables(share=", 0, 1)):
            part.worker.whole_tables(share)
        part.model(torch.tensor([1])).sum().backward()
        part.optimizer.step()
        part.flush()
        assert (held(part)["a"][1] == 0.0).all()
        assert (part.worker.whole_tables(1.0).values["a"][1, :DIM_A] == 0.0).all()


# Several workers


@pytest.mark.parametrize(
    ("num_workers", "num_servers", "share", "k_steps"),
    [(2, 1, 1.0, 1), (3, 2, 1.0, 2), (2, 3, None, 1), (3, 1, None, 3), (3, 3, 0.2, 2), (4, 2, 1.0, 1)],
)
def test_all_changes_of_all_workers_add_up(
    num_workers: int, num_servers: int, share: float | None, k_steps: int
) -> None:
    """After finish, a barrier and a flush every copy and the servers hold the first values and what all workers
    added, each time it was. To the bit where differences are sent whole."""
    num_steps = 20
    plans = []
    for worker in range(num_workers):
        rng = np.random.default_rng(worker)
        plans.append(
            [
                {
                    name: (rng.permutation(num)[: num // 2], eighths(rng, num // 2, dim))
                    for name, (num, dim) in SIZES.items()
                }
                for _ in range(num_steps)
            ]
        )
    expected = first_values()
    for changes in (change for plan in plans for change in plan):
        for name, (rows, amounts) in changes.items():
            expected[name][rows] += amounts

    def body(part: Part) -> dict[str, np.ndarray]:
        copy = part.worker.whole_tables(share)
        for changes in plans[part.index]:
            for name, (rows, amounts) in changes.items():
                # fold_in may be at the same rows: one at a time here, for what both change at once may be lost
                wait_until(lambda: is_idle(copy), "the exchange ends", SOON)
                add(copy, name, rows, amounts)
            copy.step_done()
        copy.finish()
        part.barrier()
        copy.flush()
        part.barrier()
        return own(copy)

    done = jobs.run(
        body, Tables, jobs.sgd, mode="geo", num_workers=num_workers, num_servers=num_servers, k_steps=k_steps
    )
    tolerance = 0.0 if share == 1.0 else 2e-5
    for found in (*done.results, {name: done.rows(name, num).numpy() for name, (num, _) in SIZES.items()}):
        assert_same(found, expected, tolerance)


def test_what_another_worker_sent_comes_in_and_own_changes_stay() -> None:
    def body(part: Part) -> None:
        copy = part.worker.whole_tables(1.0)
        part.barrier()
        add(copy, "a", [5], 1.0 + part.index)
        if part.index == 0:
            copy.flush()
        part.barrier()
        if part.index == 1:
            assert (copy.values["a"][5, :DIM_A] == FIRST + 2.0).all()
            copy.flush()
            assert (copy.values["a"][5, :DIM_A] == FIRST + 3.0).all()
            assert (held(part)["a"][5] == FIRST + 3.0).all()
            assert not copy.values["a"][:, DIM_A:].any()
        part.barrier()
        if part.index == 0:
            copy.flush()
            assert (copy.values["a"][5, :DIM_A] == FIRST + 3.0).all()
        part.barrier()

    jobs.run(body, Tables, jobs.sgd, mode="geo", num_workers=2, num_servers=2, k_steps=100)


def test_a_whole_tables_made_later_begins_with_what_the_others_sent() -> None:
    def body(part: Part) -> None:
        if part.index == 0:
            copy = part.worker.whole_tables(1.0)
            add(copy, "a", [5], 1.0)
            copy.flush()
        part.barrier()
        if part.index == 1:
            copy = part.worker.whole_tables(1.0)
            assert (copy.values["a"][5, :DIM_A] == FIRST + 1.0).all()
            copy.finish()
            assert (held(part)["a"][5] == FIRST + 1.0).all()
        part.barrier()

    jobs.run(body, Tables, jobs.sgd, mode="geo", num_workers=2, num_servers=2, k_steps=100)


# Several threads


def test_changes_by_threads_during_exchanges_all_reach_the_servers() -> None:
    """Every thread has rows of its own, so that it is known what they must hold."""
    num_threads, rounds = 3, 400
    with one_worker_with_whole_tables(2, share=0.5) as (part, copy):

        def train(thread: int) -> None:
            for number in range(1, rounds + 1):
                add(copy, "a", np.arange(thread, NUM_A, num_threads), 0.125)
                add(copy, "b", np.arange(thread, NUM_B, num_threads), -0.125)
                copy.step_done()
                if number % 100 == 0:  # an exchange was asked for since the last time: it gets its turn
                    least = number // 100
                    jobs.wait_until(lambda least=least: copy.stats()["exchanges"] >= least, f"{least} exchanges")

        jobs.in_threads(train, num_threads)
        copy.finish()
        assert copy.stats()["exchanges"] > 3
        expected = {"a": first_values()["a"] + rounds / 8, "b": first_values()["b"] - rounds / 8}
        assert_same(own(copy), expected)
        assert_same(held(part), expected, 1e-5)


def test_threads_of_several_workers_leave_servers_and_whole_tables_equal() -> None:
    """Here a change may meet another of the same number; what the servers hold is still what the copies hold."""

    def body(part: Part) -> dict[str, np.ndarray]:
        copy = part.worker.whole_tables(None)

        def train(thread: int) -> None:
            rng = np.random.default_rng([part.index, thread])
            for _ in range(150):
                add(copy, "a", rng.permutation(NUM_A)[:20], rng.normal(size=(20, DIM_A)) * 0.01)
                copy.step_done()

        jobs.in_threads(train, 2)
        copy.finish()
        part.barrier()
        copy.flush()
        part.barrier()
        return own(copy)

    done = jobs.run(body, Tables, jobs.sgd, mode="geo", num_workers=2, num_servers=2, k_steps=2)
    servers = {name: done.rows(name, num).numpy() for name, (num, _) in SIZES.items()}
    for found in done.results:
        assert_same(found, servers, 1e-5)
        assert np.abs(found["a"] - FIRST).max() > 1e-3


def test_every_thread_that_flushes_finds_its_changes_on_the_servers() -> None:
    with one_worker_with_whole_tables(2) as (part, copy):

        def work(thread: int) -> None:
            with part.worker._connect() as client:
                for i in range(1, 21):
                    add(copy, "a", [thread], 1.0)
                    copy.flush()
                    assert (client.pull("a", [thread]).result() == FIRST + i).all()

        jobs.in_threads(work, 5)
        assert is_idle(copy)


# What goes wrong


TIMEOUT = 8.0  # many times what 10 steps take, on busy cores too


@contextlib.contextmanager
def real_servers(num: int, timeout: float = TIMEOUT) -> Iterator[tuple[list[ServerProcess], Part, WholeTables]]:
    """Servers in processes, given up after `timeout` seconds without an answer, and a worker with a copy."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(ForkedServer()) for _ in range(num)]
        for process in processes:
            stack.callback(continue_again, process)
        places = tuple(process.endpoint.removeprefix("tcp://") for process in processes)
        settings = jobs.strategy("geo", rpc_timeout=timeout, k_steps=1)
        part = jobs.make_part(Tables, jobs.sgd, settings, RoleInfo(WORKER, 0, 1, 0, places))
        part.worker = WorkerRole(part.job)
        stack.callback(part.worker.client.close)
        yield processes, part, part.worker.whole_tables(None)


def continue_again(process: ServerProcess) -> None:
    if process.returncode is None:
        os.kill(process.pid, signal.SIGCONT)


def train_until_error(copy: WholeTables, seconds: float) -> tuple[FleetError, int]:
    """Steps until one raises: its error, and the number of steps before."""
    num_steps, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        add(copy, "a", [1], 0.125)
        try:
            copy.step_done()
        except FleetError as error:
            return error, num_steps
        num_steps += 1
        time.sleep(0.001)
    raise AssertionError(f"no error after {seconds:g} s")


def assert_fails_everywhere(copy: WholeTables, match: str) -> None:
    """Once an exchange has failed, every user of the copy gets the error, and nothing is left running."""
    for work in (copy.step_done, copy.flush, copy.finish, copy.stop):
        with pytest.raises(FleetError, match=match):
            within(work)
    assert not copy._thread.is_alive()


@pytest.mark.slow
def test_a_server_that_stops_for_less_than_the_time_out_stops_no_training_and_loses_nothing() -> None:
    with real_servers(2, SOON) as (processes, part, copy):
        add(copy, "a", np.arange(NUM_A), 1.0)
        step(copy)

        os.kill(processes[0].pid, signal.SIGSTOP)
        for _ in range(20):  # a step that waited would fail after the time-out
            add(copy, "a", np.arange(NUM_A), 0.5)
            copy.step_done()
            time.sleep(0.01)
        os.kill(processes[0].pid, signal.SIGCONT)
        within(copy.finish)
        assert (own(copy)["a"] == FIRST + 11.0).all()
        assert_same(held(part), own(copy))


@pytest.mark.slow
def test_a_server_that_stops_for_good_is_reported_in_time() -> None:
    with real_servers(2) as (processes, _, copy):
        add(copy, "a", np.arange(NUM_A), 1.0)
        step(copy)
        os.kill(processes[1].pid, signal.SIGSTOP)
        start = time.monotonic()
        error, num_steps = train_until_error(copy, SOON)
        assert isinstance(error, ServerUnreachable)
        assert names(str(error), "server 1", f"tcp://{processes[1].endpoint.removeprefix('tcp://')}")
        assert time.monotonic() - start > 0.75 * TIMEOUT
        assert num_steps > 10, "a step waited"
        assert_fails_everywhere(copy, "server 1")


@pytest.mark.slow
def test_a_killed_server_is_reported() -> None:
    with real_servers(1) as (processes, part, copy):
        processes[0].kill()
        error, num_steps = train_until_error(copy, SOON)
        assert isinstance(error, ServerUnreachable)
        assert num_steps > 10, "a step waited"
        assert_fails_everywhere(copy, "server 0")
        with pytest.raises(FleetError, match="server 0"):
            within(part.worker.stop)


@pytest.mark.parametrize("what", ["flush", "finish", "stop"])
def test_a_server_that_is_gone_is_told_by_whatever_is_called_first(what: str) -> None:
    servers = jobs.SocketServers(Tables, jobs.sgd, 1, 1)
    servers.start()
    settings = jobs.strategy("geo", rpc_timeout=TIMEOUT, k_steps=1)
    part = jobs.make_part(Tables, jobs.sgd, settings, servers.info(0, 1))
    part.worker = WorkerRole(part.job)
    with contextlib.closing(part.worker.client):
        copy = part.worker.whole_tables(None)
        servers.close()
        add(copy, "a", [1], 1.0)
        with pytest.raises(ServerUnreachable, match=naming("server 0")):
            within(getattr(copy, what))
        assert_fails_everywhere(copy, "server 0")


def test_a_server_that_is_gone_before_the_whole_tables_is_made_is_told() -> None:
    servers = jobs.SocketServers(Tables, jobs.sgd, 1, 1)
    servers.start()
    settings = jobs.strategy("geo", rpc_timeout=TIMEOUT, k_steps=1)
    part = jobs.make_part(Tables, jobs.sgd, settings, servers.info(0, 1))
    part.worker = WorkerRole(part.job)
    with contextlib.closing(part.worker.client):
        servers.close()
        with pytest.raises(ServerUnreachable, match=naming("server 0")):
            within(lambda: part.worker.whole_tables(None))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_reaches_the_caller_and_not_the_servers(value: float) -> None:
    servers = Servers(2)
    with contextlib.suppress(TableError), one_worker_with_whole_tables(servers=servers) as (part, copy):
        add(copy, "b", [3, 4], [[value], [1.0]])
        with pytest.raises(TableError, match=naming("NaN", "'b'")):
            within(copy.flush)
        assert_same(held(part), first_values())
        assert_fails_everywhere(copy, naming("NaN", "'b'"))


def test_nan_reaches_the_training_threads() -> None:
    with contextlib.suppress(TableError), one_worker_with_whole_tables() as (_, copy):
        copy.values["a"][2, 1] = np.nan
        copy.changes["a"][2] += 1
        with pytest.raises(TableError, match="NaN"):
            wait_until(lambda: copy.step_done() is not None, "the error comes", SOON)
        with pytest.raises(TableError, match="NaN"):
            jobs.in_threads(lambda i: copy.step_done(), 2)


def test_an_error_of_our_own_in_the_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("our own mistake")

    with contextlib.suppress(FleetError), one_worker_with_whole_tables() as (_, copy):
        monkeypatch.setattr(module, "take_differences", fail)
        add(copy, "a", [1], 1.0)
        with pytest.raises(FleetError, match=naming("ZeroDivisionError: our own mistake")):
            within(copy.flush)


# fleet.whole_tables()


def start(
    make_model: Callable[[], torch.nn.Module] = Tables, dirname: str | None = None, strategy: Any = None
) -> tuple[torch.nn.Module, Any]:
    """A job in one process."""
    fleet.init()
    model = fleet.distributed_model(make_model())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), strategy)
    fleet.init_worker(dirname)
    return model, optimizer


def test_before_init_worker_it_says_what_to_call() -> None:
    with pytest.raises(FleetError, match="init_worker"):
        fleet.whole_tables()


@pytest.mark.parametrize("mode", list(jobs.MODES))
def test_in_one_process_any_mode_will_do(mode: str) -> None:
    start(strategy=jobs.strategy(mode))
    copy = fleet.whole_tables()
    add(copy, "a", [1], 1.0)
    copy.step_done()
    fleet.flush()
    assert (get_worker().client.pull("a", [1]).result() == FIRST + 1.0).all()
    fleet.stop_worker()


def test_a_second_whole_tables_is_refused_and_the_first_goes_on() -> None:
    start()
    copy = fleet.whole_tables()
    add(copy, "a", [1], 1.0)
    for share in (None, 0.5):
        with pytest.raises(FleetError, match="whole_tables"):
            fleet.whole_tables(share)
    fleet.flush()
    assert (get_worker().client.pull("a", [1]).result() == FIRST + 1.0).all()
    fleet.stop_worker()


@pytest.mark.parametrize("mode", ["sync", "half_async", "async"])
def test_with_servers_other_modes_than_geo_are_refused_and_the_job_goes_on(mode: str) -> None:
    with one_worker(Tables(), mode=mode, num_servers=2) as part:
        with pytest.raises(StrategyError, match=naming(mode, "k_steps")):
            part.worker.whole_tables(None)
        part.model(torch.tensor([1])).sum().backward()
        part.optimizer.step()
        part.flush()
        assert (held(part)["a"][1] == 0.0).all()


class Unsized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sized = fleet.nn.SparseEmbedding(2, name="sized", num_embeddings=5)
        self.any = fleet.nn.SparseEmbedding(2, name="any ids", initializer=fleet.nn.Constant(FIRST))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.sized(ids) + self.any(ids)


class WithDense(Unsized):
    def __init__(self) -> None:
        super().__init__()
        self.any = fleet.nn.SparseEmbedding(2, name="any ids", initializer=fleet.nn.Constant(FIRST), num_embeddings=5)
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale


@pytest.mark.parametrize(
    ("make_model", "match"),
    [(Unsized, naming("'any ids'", "num_embeddings")), (WithDense, "scale")],
)
@pytest.mark.parametrize("is_local", [True, False])
def test_models_that_cannot_be_held_whole_are_refused_and_the_job_goes_on(
    make_model: Callable[[], torch.nn.Module], match: str, is_local: bool
) -> None:
    def check(worker: WorkerRole, model: torch.nn.Module, optimizer: Any) -> None:
        before = set(threading.enumerate())
        with pytest.raises(ModelError, match=match):
            worker.whole_tables(None)
        assert set(threading.enumerate()) <= before
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        worker.communicator.flush()
        found = worker.client.pull("any ids", [1, 2], create=False).result()
        np.testing.assert_allclose(found, FIRST - 0.5)

    if is_local:
        model, optimizer = start(make_model)
        check(get_worker(), model, optimizer)
        fleet.stop_worker()
    else:
        with one_worker(make_model(), mode="geo", num_servers=2) as part:
            check(part.worker, part.model, part.optimizer)


def test_parameters_that_are_not_trained_do_no_harm() -> None:
    class WithFixed(Tables):
        def __init__(self) -> None:
            super().__init__()
            self.fixed = torch.nn.Parameter(torch.ones(2), requires_grad=False)
            self.register_buffer("buffer", torch.ones(2))

    with one_worker_with_whole_tables(model=WithFixed()) as (part, copy):
        add(copy, "a", [1], 1.0)
        copy.flush()
        assert_same(held(part), own(copy))


def test_steps_of_the_optimizer_are_refused_and_the_whole_tables_goes_on() -> None:
    with one_worker_with_whole_tables(2) as (part, copy):
        part.model(torch.tensor([1])).sum().backward()
        with pytest.raises(ModelError, match=naming("fleet.whole_tables", "optimizer.step")):
            part.optimizer.step()
        part.optimizer.zero_grad()
        assert_same(held(part), first_values())
        add(copy, "a", [1], 1.0)
        step(copy)
        assert (held(part)["a"][1] == FIRST + 1.0).all()


@pytest.mark.parametrize("is_eval", [True, False])
def test_lookups_read_what_the_servers_hold(is_eval: bool) -> None:
    with one_worker_with_whole_tables(2) as (part, copy):
        part.model.train(not is_eval)
        ids = torch.tensor([[1, 2], [3, 1]])
        for i in range(1, 4):
            add(copy, "a", [1], 1.0)
            add(copy, "b", [3], 2.0)
            assert (part.model(ids)[0, 0, :DIM_A] == FIRST + i - 1).all()
            copy.flush()
            expected = np.concatenate([own(copy)["a"][ids], own(copy)["b"][ids]], axis=-1)
            np.testing.assert_array_equal(part.model(ids).detach().numpy(), expected)


def test_fleet_stats_count_steps_exchanges_and_rows() -> None:
    start(strategy=jobs.strategy("geo"))
    copy = fleet.whole_tables()
    first = fleet.stats()["worker"]
    assert (first["steps"], first["exchanges"], first["rows_sent"], first["queue"]) == (0, 0, 0, 0)
    add(copy, "a", [1, 2, 3], 1.0)
    add(copy, "b", [1], 1.0)
    for _ in range(5):
        copy.step_done()
    fleet.flush()
    fleet.flush()
    found = fleet.stats()["worker"]
    assert (found["steps"], found["exchanges"], found["rows_sent"], found["queue"]) == (5, 2, 4, 0)
    fleet.stop_worker()


def test_a_saved_whole_tables_is_trained_on(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    rng = np.random.default_rng(0)
    start(random_tables)
    copy = fleet.whole_tables()
    add(copy, "a", np.arange(NUM_A), rng.normal(size=(NUM_A, DIM_A)))
    add(copy, "b", np.arange(0, NUM_B, 2), rng.normal(size=(13, 1)))
    fleet.save_persistables(folder)
    saved = own(copy)
    fleet.stop_worker()

    model, _ = start(random_tables, folder)
    again = fleet.whole_tables()
    assert_same(own(again), saved, 1e-6)
    add(again, "a", [3], 1.0)
    fleet.flush()
    model.eval()
    with torch.no_grad():
        found = model(torch.tensor([3])).numpy()[0]
    np.testing.assert_allclose(found[:DIM_A], saved["a"][3] + 1.0, atol=1e-6)
    fleet.stop_worker()


def test_what_several_servers_and_workers_saved_is_loaded_by_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")

    def body(part: Part) -> dict[str, np.ndarray]:
        copy = part.worker.whole_tables(None)
        for i in range(20):
            add(copy, "a", np.arange(part.index, NUM_A, 2), i / 8)
            add(copy, "b", np.arange(part.index, NUM_B, 2), -i / 8)
            step(copy)
        copy.finish()
        part.barrier()
        if part.index == 0:
            part.worker.save(folder, "full")
        copy.flush()
        part.barrier()
        return own(copy)

    done = jobs.run(body, Tables, jobs.sgd, mode="geo", num_workers=2, num_servers=3, k_steps=1)
    start(dirname=folder)
    loaded = own(fleet.whole_tables())
    assert_same(loaded, done.results[0], 1e-5)
    assert_same(loaded, {"a": first_values()["a"] + 23.75, "b": first_values()["b"] - 23.75}, 1e-5)
    fleet.stop_worker()


def test_a_job_over_sockets_from_init_to_stop_worker() -> None:
    servers = jobs.SocketServers(Tables, jobs.sgd, 2, 1)
    servers.start()
    before = set(threading.enumerate())
    fleet.init(fleet.UserDefinedRoleMaker(0, "worker", 1, list(servers.endpoints)))
    model = fleet.distributed_model(Tables())
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), jobs.strategy("geo", k_steps=2))
    fleet.init_worker()
    copy = fleet.whole_tables()
    for _ in range(20):
        add(copy, "a", np.arange(0, NUM_A, 3), 0.25, HOT)
        step(copy)
    fleet.flush()
    assert fleet.stats()["worker"]["exchanges"] == 11
    assert fleet.stats()["mode"] == "geo"
    found = get_worker().client.pull("a", np.arange(NUM_A)).result()
    np.testing.assert_array_equal(found, own(copy)["a"])
    assert (found[::3] == FIRST + 5.0).all()
    fleet.stop_worker()
    assert set(threading.enumerate()) <= before, "a thread was left behind"
    assert servers.is_over(SOON)


# The end


def test_stop_worker_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    start()
    copy = fleet.whole_tables()
    assert copy._thread.is_alive()
    fleet.stop_worker()
    assert not copy._thread.is_alive()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("what", ["flush", "finish", "stop"])
def test_after_the_end_a_whole_tables_does_not_hang(what: str) -> None:
    """Its thread is gone: a caller that waits for an exchange would wait for ever."""
    with one_worker_with_whole_tables() as (_, copy):
        add(copy, "a", [1], 1.0)
    with contextlib.suppress(FleetError):
        within(getattr(copy, what))


def test_a_flush_meets_the_end_and_returns() -> None:
    """Threads that flush all the time while the worker is stopped: each is served or told, none is left waiting."""
    with one_worker_with_whole_tables() as (_, copy):
        over = threading.Event()

        def flush_on(thread: int) -> None:
            with contextlib.suppress(FleetError):
                while not over.is_set():
                    copy.flush()

        threads = [threading.Thread(target=flush_on, args=(i,), daemon=True) for i in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
    over.set()
    wait_until(lambda: not any(thread.is_alive() for thread in threads), "every flush has returned", SOON)


# Which rows others changed: server/changes.py

ONE = 7  # the number of a table


def test_replies_are_bounded_and_the_rest_comes_with_the_next() -> None:
    changes = Changes()
    number, _, rest = changes.since(0, 0, {ONE: 4})
    assert rest == 0
    changes.note(ONE, np.arange(10, dtype=np.uint64), worker=1)
    found: list[int] = []
    for expected in (6, 2, 0):
        number, changed, rest = changes.since(0, number, {ONE: 4})
        assert rest == expected
        assert len(changed[ONE]) <= 4
        found += changed[ONE].tolist()
    assert sorted(found) == list(range(10))
    assert not len(changes.since(0, number, {ONE: 4})[1][ONE])


def test_a_lost_reply_is_made_again_within_the_limit() -> None:
    changes = Changes()
    number, _, _ = changes.since(0, 0, {ONE: 4})
    changes.note(ONE, np.arange(6, dtype=np.uint64), worker=1)
    changes.since(0, number, {ONE: 4})  # lost
    changes.note(ONE, np.arange(4, 9, dtype=np.uint64), worker=1)
    found: list[int] = []
    rest = 1
    while rest:
        number, changed, rest = changes.since(0, number, {ONE: 4})
        assert len(changed[ONE]) <= 4
        found += changed[ONE].tolist()
    assert sorted(found) == list(range(9))


def test_a_row_that_changes_again_after_it_was_sent_is_sent_again() -> None:
    changes = Changes()
    number, _, _ = changes.since(0, 0, {ONE: 2})
    changes.note(ONE, np.array([1, 2, 3], np.uint64), worker=1)
    number, first, _ = changes.since(0, number, {ONE: 2})
    changes.note(ONE, first[ONE], worker=1)
    found: list[int] = []
    rest = 1
    while rest:
        number, changed, rest = changes.since(0, number, {ONE: 2})
        found += changed[ONE].tolist()
    assert sorted(found) == [1, 2, 3]


KEYS = st.lists(st.integers(0, 12), max_size=8)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.integers(0, 2), st.sampled_from([ONE, 8]), KEYS),
        st.tuples(st.just("ask"), st.integers(0, 1), st.integers(1, 5), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=examples(50))
@given(ACTIONS)
def test_changes_keep_their_account(actions: list[Any]) -> None:
    """Against sets: what a worker is owed is what others changed since the last reply that arrived and had it. Every
    reply brings rows that are owed, as many as there is room for, and says how many are left."""
    changes = Changes()
    tables = (ONE, 8)
    received = {worker: changes.since(worker, 0, dict.fromkeys(tables, 1))[0] for worker in (0, 1)}
    owed: dict[int, dict[int, set[int]]] = {worker: {table: set() for table in tables} for worker in (0, 1)}

    def ask(worker: int, most: int, arrives: bool) -> int:
        number, changed, rest = changes.since(worker, received[worker], {ONE: most, 8: most + 1})
        left = 0
        for table, room in ((ONE, most), (8, most + 1)):
            keys = changed[table].tolist()
            assert len(set(keys)) == len(keys)
            assert set(keys) <= owed[worker][table]
            assert len(keys) == min(room, len(owed[worker][table]))
            left += len(owed[worker][table]) - len(keys)
            if arrives:
                owed[worker][table] -= set(keys)
        assert rest == left
        if arrives:
            received[worker] = number
        return left

    for action in actions:
        if action[0] == "note":
            _, worker, table, keys = action
            changes.note(table, np.array(keys, np.uint64), worker)
            for other in {0, 1} - {worker}:
                owed[other][table] |= set(keys)
        else:
            ask(*action[1:])
    for worker in (0, 1):
        while ask(worker, 3, True):
            pass
        assert not any(owed[worker].values())


@settings(max_examples=examples(40))
@given(ACTIONS, st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_late_copies_of_requests_lose_nothing(actions: list[Any], copies: list[int]) -> None:
    """A copy of an old request may come at any time; its reply goes nowhere."""
    changes = Changes()
    received = {worker: [changes.since(worker, 0, {ONE: 1, 8: 1})[0]] for worker in (0, 1)}
    owed: dict[int, dict[int, set[int]]] = {worker: {ONE: set(), 8: set()} for worker in (0, 1)}

    def ask(worker: int, most: int, arrives: bool) -> int:
        number, changed, rest = changes.since(worker, received[worker][-1], {ONE: most, 8: most})
        for table, keys in changed.items():
            assert len(keys) <= most
            if arrives:
                owed[worker][table] -= set(keys.tolist())
        if arrives:
            received[worker].append(number)
        return rest

    for action, copy in zip(actions, copies, strict=False):
        if action[0] == "note":
            _, worker, table, keys = action
            changes.note(table, np.array(keys, np.uint64), worker)
            for other in {0, 1} - {worker}:
                owed[other][table] |= set(keys)
        else:
            ask(*action[1:])
            worker = action[1]
            for old in received[worker][-1 - copy : -1]:
                changes.since(worker, old, {ONE: 2, 8: 2})
    for worker in (0, 1):
        while ask(worker, 3, True):
            pass
        assert not any(owed[worker].values())


# The command and the client

ROWS = TableSpec("rows", dim=2, rule=Rule("sgd", lr=1.0))
BLOCK = TableSpec("block", "dense", size=5, rule=Rule("sgd", lr=1.0))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies of six numbers a table: three rows of two, two of three."""
    monkeypatch.setattr(commands, "MAX_CHANGED", 6)


def changed_since(talk: Talk, received: int) -> tuple[int, int, list[int], list[list[float]]]:
    reply = talk.ask(Command.PULL_CHANGED, Array(0, np.array([received], np.uint64)), keys_of(ROWS, []))
    assert_ok(reply)
    header, keys, rows = (array.data for array in reply.arrays)
    assert (header.dtype, header.size) == (np.uint64, 2)
    return int(header.reshape(-1)[0]), int(header.reshape(-1)[1]), keys.reshape(-1).tolist(), rows.tolist()


def test_a_reply_says_its_number_and_how_many_rows_are_left(server: Server, tiny: None) -> None:
    mine, other = Talk(server, client=1, worker=0), Talk(server, client=2, worker=1)
    mine.create(ROWS)
    number, rest, keys, _ = changed_since(mine, 0)
    assert (rest, keys) == (0, [])
    amounts = np.arange(14).reshape(7, 2)
    assert_ok(other.push(ROWS, range(7), amounts, flags=DELTA))
    first = mine.pull(ROWS, range(7))
    seen: dict[int, list[float]] = {}
    for expected in (4, 1, 0):
        number, rest, keys, rows = changed_since(mine, number)
        assert rest == expected
        assert len(keys) == len(rows) <= 3
        seen.update(zip(keys, rows, strict=True))
    assert [seen[key] for key in range(7)] == first.tolist()


@pytest.mark.parametrize("numbers", [[], [1, 2]])
def test_the_last_reply_has_one_number(server: Server, numbers: list[int]) -> None:
    talk = Talk(server)
    talk.create(ROWS)
    reply = talk.ask(Command.PULL_CHANGED, Array(0, np.array(numbers, np.uint64)), keys_of(ROWS, []))
    assert refusal(reply)[0] == "WireError"
    assert refusal(talk.ask(Command.PULL_CHANGED))[0] == "WireError"


def test_another_client_of_the_worker_starts_anew(server: Server) -> None:
    """A worker that was started again fills its copy from the tables: what was noted before is no longer news."""
    other = Talk(server, client=9, worker=1)
    other.create(ROWS)
    changed_since(Talk(server, client=1), 0)
    assert_ok(other.push(ROWS, [1], [[1, 1]], flags=DELTA))
    again = Talk(server, client=2)
    number, _, keys, _ = changed_since(again, 0)
    assert keys == []
    assert_ok(other.push(ROWS, [2], [[1, 1]], flags=DELTA))
    assert changed_since(again, number)[2] == [2]


def test_a_late_copy_of_the_first_request_loses_nothing(server: Server) -> None:
    """The network has delivered the first request twice, once late: it must not make the server forget what it has
    noted since. (Its reply goes nowhere: the call was answered.)"""
    mine, other = Talk(server, client=1, worker=0), Talk(server, client=2, worker=1)
    mine.create(ROWS)
    first = mine.message(Command.PULL_CHANGED, Array(0, np.zeros(1, np.uint64)), keys_of(ROWS, []))
    (reply,) = mine.send(first)
    number = int(reply.arrays[0].data.reshape(-1)[0])
    assert_ok(other.push(ROWS, [5], [[1, 1]], flags=DELTA))
    mine.send(first)
    assert changed_since(mine, number)[2] == [5]


def drained(client: Client, changed: Changed, tables: list[str]) -> tuple[Changed, int]:
    """All that there is, joined, and in how many replies."""
    num = 1
    while not changed.is_all:
        changed = changed.joined(client.pull_changed(tables, changed.numbers).result())
        num += 1
    return changed, num


def test_a_client_gets_everything_in_several_replies(tiny: None) -> None:
    with in_process(2) as servers:
        mine, other = servers.client(worker=0), servers.client(worker=1)
        for spec in (ROWS, BLOCK):
            mine.create_table(spec)
            other.attach(spec)
        tables = ["rows", "block"]
        begin = mine.pull_changed(tables, [0, 0]).result()
        assert begin.is_all
        amounts = np.arange(40, dtype=np.float32).reshape(20, 2)
        before = mine.pull("rows", np.arange(20)).result()
        other.push_tables({"rows": (np.arange(20), amounts), "block": np.ones(5, np.float32)}, flags=DELTA).result()
        changed, num = drained(mine, mine.pull_changed(tables, begin.numbers).result(), tables)
        assert num > 3
        keys, rows = changed.rows["rows"]
        assert sorted(keys.tolist()) == list(range(20))
        np.testing.assert_array_equal(rows, (before + amounts)[keys.astype(int)])
        assert not len(changed.rows["block"][0])
        np.testing.assert_array_equal(changed.rows["block"][1].reshape(-1), np.ones(5))
        assert mine.pull_changed(tables, changed.numbers).result().is_all


def test_without_a_limit_that_matters_there_is_one_reply(fleet: Fleet) -> None:
    mine, other = fleet.client(worker=0), fleet.client(worker=1)
    mine.create_table(ROWS)
    other.attach(ROWS)
    begin = mine.pull_changed(["rows"], [0, 0]).result()
    other.push_tables({"rows": (np.arange(5000), np.ones((5000, 2), np.float32))}, flags=DELTA).result()
    changed = mine.pull_changed(["rows"], begin.numbers).result()
    assert changed.is_all
    assert sorted(changed.rows["rows"][0].tolist()) == list(range(5000))


def test_of_two_replies_the_later_stands_last() -> None:
    def rows(*keys: int, value: float) -> tuple[np.ndarray, np.ndarray]:
        return np.array(keys, np.uint64), np.full((len(keys), 2), value, np.float32)

    none = np.empty(0, np.uint64)
    first = Changed([1, 1], {"x": rows(1, 2, value=1), "y": rows(value=0), "d": (none, np.zeros((3, 1)))}, False)
    later = Changed([2, 3], {"x": rows(2, 3, value=2), "y": rows(9, value=2), "d": (none, np.ones((3, 1)))}, True)
    both = first.joined(later)
    assert (both.numbers, both.is_all) == ([2, 3], True)
    assert both.rows["x"][0].tolist() == [1, 2, 2, 3]
    assert both.rows["x"][1][:, 0].tolist() == [1, 1, 2, 2]
    assert both.rows["y"][0].tolist() == [9]
    assert both.rows["d"][1].reshape(-1).tolist() == [1, 1, 1]
    again = both.joined(Changed([3, 4], {"x": rows(value=0), "y": rows(value=0), "d": (none, np.ones((3, 1)))}, True))
    assert again.rows["x"][0].tolist() == [1, 2, 2, 3]


class Scaled(torch.nn.Module):
    """For geo itself: rows, and a dense parameter, all changed by multiples of 1/8."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(2, name="rows", initializer=fleet.nn.Constant(FIRST))
        self.bias = torch.nn.Parameter(torch.zeros(2))

    def forward(self, ids: torch.Tensor, weight: float) -> torch.Tensor:
        return self.rows(ids).sum() * weight + self.bias.sum() * weight


def in_turns(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """Geo training in which it is known who exchanges when."""
    rng = np.random.default_rng(part.index)
    part.model(torch.arange(20), 0.0).backward()  # everybody holds all rows
    part.optimizer.step()
    part.optimizer.zero_grad()
    for _ in range(6):
        ids = torch.from_numpy(rng.permutation(20)[:12])
        part.model(ids, float(rng.integers(-4, 5))).backward()
        part.optimizer.step()
        part.optimizer.zero_grad()
        for worker in range(2):
            if worker == part.index:
                part.flush()
            part.barrier()
    communicator: Any = part.worker.communicator
    rows = communicator._local["rows"].pull(np.arange(20, dtype=np.uint64))
    return rows, part.model.bias.detach().numpy().copy()


@pytest.mark.parametrize("num_servers", [1, 2])
def test_geo_with_replies_of_a_few_rows_is_geo(num_servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[list[Any], torch.Tensor, int]:
        done = jobs.run(in_turns, Scaled, jobs.sgd, mode="geo", num_workers=2, num_servers=num_servers, k_steps=100)
        return done.results, done.rows("rows", 20), done.servers.counts("PULL_CHANGED")[0]

    whole, whole_rows, few = run()
    monkeypatch.setattr(commands, "MAX_CHANGED", 4)
    pieces, pieces_rows, many = run()
    assert many > few + 10
    assert torch.equal(pieces_rows, whole_rows)
    for found, expected in zip(pieces, whole, strict=True):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
    assert len(np.unique(whole[0][0])) > 3


def test_whole_tables_with_replies_of_a_few_rows_agree(tiny: None) -> None:
    def body(part: Part) -> dict[str, np.ndarray]:
        copy = part.worker.whole_tables(1.0)
        part.barrier()
        for _ in range(5):
            wait_until(lambda: is_idle(copy), "the exchange ends", SOON)
            add(copy, "a", np.arange(NUM_A), 0.25 * (1 + part.index))
            add(copy, "b", np.arange(NUM_B), -0.25 * (1 + part.index))
            copy.step_done()
        copy.finish()
        part.barrier()
        copy.flush()
        part.barrier()
        return own(copy)

    done = jobs.run(body, Tables, jobs.sgd, mode="geo", num_workers=2, num_servers=2, k_steps=1)
    for found in done.results:
        assert_same(found, {"a": first_values()["a"] + 3.75, "b": first_values()["b"] - 3.75})


# A bad network


def table_copies(is_shared: bool) -> list[TableCopy]:
    """Of two workers, one each; or of three, of whom 0 and 2 share one."""
    if not is_shared:
        return [TableCopy(SIZES, 2, alone(i, 2)) for i in range(2)]
    brought: list[bytes] = []

    def gather(name: str, data: bytes) -> list[bytes]:
        brought.append(data)
        return brought

    first, third = (common_copy(SIZES, 2, Sharing((0, 2), worker, 2), gather) for worker in (0, 2))
    return [first, TableCopy(SIZES, 2, Sharing((1,), 1, 2)), third]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "num_schedules", "is_shared"),
    [
        (24, 15, True),
        pytest.param(24, 15, False, marks=pytest.mark.long),
        pytest.param(1 << 24, 30, False, marks=pytest.mark.long),
    ],
)
def test_whatever_the_network_does_whole_tables_and_servers_agree(
    limit: int, num_schedules: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies, one exchange at a time, on virtual time: messages are lost, repeated, delayed and overtaken."""
    monkeypatch.setattr(commands, "MAX_CHANGED", limit)
    num_workers = 3 if is_shared else 2
    info = jobs.roles(num_workers, 2)[0]
    job = jobs.make_part(Tables, jobs.sgd, jobs.strategy("geo"), info).job
    wrong = []
    for seed in range(num_schedules):
        rng = np.random.default_rng(seed)
        faults = Faults(rng.uniform(0, 0.15), rng.uniform(0, 0.3), rng.uniform(0.01, 8.0), rng.uniform(0, 0.2))
        network = Network(seed, faults)
        servers = Servers(2, num_workers)
        servers.make_tables(job)

        def connect(worker: int, network: Network = network, servers: Servers = servers) -> Client:
            channels = [network.connect(server) for server in servers.servers]
            client = Client(channels, worker=worker, patience=Patience(600.0, 10))
            for spec in job.plan.specs:
                client.attach(spec)
            return client

        copies = []
        for i, copy in enumerate(table_copies(is_shared)):
            speak = partial(connect, copy.sharing.workers[0])
            copies.append(WholeTables(connect(i), job.plan, speak, copy, k_steps=0, share=1.0, patience=SOON))
        expected = first_values()
        for copy in copies:
            within(copy.start)
        for _ in range(4):
            for copy in copies:
                for name, (num, dim) in SIZES.items():
                    rows = rng.permutation(num)[: num // 2]
                    amounts = eighths(rng, len(rows), dim)
                    add(copy, name, rows, amounts)
                    expected[name][rows] += amounts
                within(copy.flush)
        for copy in copies[:-1]:
            within(copy.flush)
        for copy in copies:
            with contextlib.suppress(AssertionError):
                assert_same(own(copy), expected)
                continue
            wrong.append(seed)
        for copy in copies:
            within(copy.stop)
    assert not wrong, f"a copy does not hold what was sent: seeds {sorted(set(wrong))}"


# SparseEmbedding(num_embeddings=...)


class Sized(torch.nn.Module):
    def __init__(self, num: int | None, **options: Any) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(3, name="rows", num_embeddings=num, **options)

    def forward(self, *ids: Any) -> torch.Tensor:
        return self.rows(*ids)


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_first_values_are_the_same_with_and_without_a_size(num_servers: int, mode: str) -> None:
    found = []
    for num in (None, 50):
        model = Sized(num, seed=3, initializer=fleet.nn.Normal(0.0, 0.3))
        with one_worker(model, mode=mode, num_servers=num_servers) as part:
            found.append(part.model(torch.arange(50).reshape(5, 10)).detach())
            assert part.job.plan.sparse["rows"].spec.kind == ("sparse" if num is None else "array")
    assert found[0].shape == (5, 10, 3)
    assert torch.equal(*found)
    assert found[0].std() > 0.1


@pytest.mark.parametrize("mode", list(jobs.MODES))
def test_lookups_and_training_are_the_same_with_and_without_a_size(mode: str) -> None:
    results = []
    for num in (None, 20):
        with one_worker(Sized(num, padding_idx=0, pooling="mean"), mode=mode, num_servers=2) as part:
            outs = []
            for i in range(4):
                one, bag = torch.tensor([0, 1 + i, 19]), torch.tensor([[1, 2], [3, 0]])
                out = torch.cat([part.model(one), part.model.rows([bag]).squeeze(1)])
                outs.append(out.detach())
                (out * (1 + i)).sum().backward()
                part.optimizer.step()
                part.optimizer.zero_grad()
                part.flush()
            results.append((torch.stack(outs), part.rows("rows", range(20))))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not results[1][0][:, 0].any(), "the padding id reads as zeros"


def test_in_eval_mode_ids_without_a_row_read_as_zeros() -> None:
    with one_worker(Sized(20), num_servers=2) as part:
        part.model.eval()
        assert not part.model(torch.arange(20)).any()
        part.model.train()
        assert part.model(torch.arange(20)).any()


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("mode", list(jobs.MODES))
@pytest.mark.parametrize("is_eval", [False, True])
@pytest.mark.parametrize("bad", [20, 10**12, -1, -(2**63)])
def test_ids_out_of_range_are_refused_and_the_job_goes_on(num_servers: int, mode: str, is_eval: bool, bad: int) -> None:
    with one_worker(Sized(20), mode=mode, num_servers=num_servers) as part:
        part.model(torch.arange(20))
        part.model.train(not is_eval)
        with pytest.raises(TableError, match=naming(0, 19, bad)):
            part.model(torch.tensor([1, bad, 2]))
        part.optimizer.zero_grad()
        part.model.train()
        part.model(torch.tensor([1, 19])).sum().backward()
        part.optimizer.step()
        part.flush()
        expected = first_rows(part, "rows", [1, 19, 2]) - np.float32([[0.5], [0.5], [0.0]])
        np.testing.assert_allclose(part.rows("rows", [1, 19, 2]).numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num", [0, -1, -100])
def test_a_size_below_one_is_refused(num: int) -> None:
    with pytest.raises(ModelError, match=naming("num_embeddings", 1, num)):
        fleet.nn.SparseEmbedding(3, num_embeddings=num)


@pytest.mark.parametrize(("one", "two"), [(20, 30), (20, None), (None, 20)])
def test_embeddings_that_share_a_table_have_one_size(one: int | None, two: int | None) -> None:
    fleet.init()
    pair = torch.nn.ModuleDict(
        {
            "one": fleet.nn.SparseEmbedding(3, name="both", num_embeddings=one),
            "two": fleet.nn.SparseEmbedding(3, name="both", num_embeddings=two),
        }
    )
    model = fleet.distributed_model(pair)
    with pytest.raises(ModelError, match=naming("'both'", "num_embeddings")):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_embeddings_that_share_a_table_of_one_size_read_the_same_rows() -> None:
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = fleet.nn.SparseEmbedding(3, name="both", num_embeddings=20)
            self.two = fleet.nn.SparseEmbedding(3, name="both", num_embeddings=20)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.one(ids), self.two(ids)])

    with one_worker(Pair(), mode="geo", num_servers=2, k_steps=1) as part:
        out = part.model(torch.arange(20))
        assert torch.equal(out[0], out[1])
        copy = part.worker.whole_tables(None)
        assert list(copy.values) == ["both"]
        np.testing.assert_array_equal(copy.values["both"][:, :3], out[0].detach().numpy())


def test_the_size_is_shown() -> None:
    assert "num_embeddings=20" in repr(fleet.nn.SparseEmbedding(3, name="x", num_embeddings=20))
    assert "num_embeddings" not in repr(fleet.nn.SparseEmbedding(3, name="x"))
