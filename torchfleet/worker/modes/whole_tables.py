"""Geo training on whole tables: each table is a plain array in this process, which training changes in place.

The formulas are those of geo.py. Training counts the changes of every row. A thread beside training sends the
differences of rows that have changed often with every exchange, those of all rows now and then, and adds what the
others have sent. Rows that all workers change all the time are those that drift apart, and they are few: sending these
alone makes it cheap to exchange often. Nothing waits for anything: of two changes of a number at the same moment, by
training and by what the others have sent, one may be lost, as among training threads themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchfleet.background import BackgroundThreads
from torchfleet.errors import FleetError, ModelError
from torchfleet.kernels.differences import fold_in, take_differences
from torchfleet.kernels.vector_instructions import padded
from torchfleet.net.wire import DELTA
from torchfleet.tables.rows.memory import Memory
from torchfleet.worker.client.client import Client
from torchfleet.worker.client.shard import Floats
from torchfleet.worker.lookup.plan import Plan
from torchfleet.worker.modes.communicator import Communicator, Gradients

_ROWS_AT_ONCE = 1 << 13  # in one message: small enough that a server's other clients need not wait long
_REST = np.float32(1e-3)  # what `share` leaves over counts as a change only if it is more
_HOT = 16  # a row that has been changed so often goes with every exchange, others with every 16th

Counts = npt.NDArray[np.uint32]


class WholeTables(Communicator):
    """`values[table]`: (rows, at least dim) float32, zeros beyond dim. `changes[table]`: add 1 behind every change."""

    takes_threads = False

    def __init__(self, client: Client, plan: Plan, connect: Callable[[], Client], k_steps: int, share: float) -> None:
        super().__init__(client, plan, connect)
        self._sizes = _declared_sizes(plan)
        self._k_steps, self._share = k_steps, share
        self.values: dict[str, Floats] = {}
        self.changes: dict[str, Counts] = {}
        self._base: dict[str, Floats] = {}
        for name, (num_rows, dim) in self._sizes.items():
            self.values[name] = _array(num_rows, dim if dim == 1 else padded(dim))
            self._base[name], self.changes[name] = _array(num_rows, dim), np.zeros(num_rows, np.uint32)
        self._changed = threading.Condition()
        self._num_wanted, self._num_done = 1, 0  # exchanges; the first fills the arrays
        self._wants_every_row = self._wants_whole = self._is_over = False
        self._last_step = 0  # with which an exchange began
        self._num_exchanges = self._num_rows_sent = 0
        self._thread = BackgroundThreads([self._carry], "the exchange with the servers failed", on_end=self._wake)

    def start(self) -> None:
        """Fill the arrays from the servers; from then on they note what others change for this worker."""
        self._thread.start()
        self._wait_for(1)

    def step_done(self) -> None:
        """Called after every step, from any thread: starts an exchange when it is time, and never waits."""
        with self._changed:
            self._check()
            self._num_steps += 1
            is_idle = self._num_wanted == self._num_done
            if is_idle and 0 < self._k_steps <= self._num_steps - self._last_step:
                self._last_step = self._num_steps
                self._want()

    def flush(self) -> None:
        """Return when all rows' differences are with the servers (`share` of each), and others' changes are here."""
        self._exchange(whole=False)

    settle = refresh = flush

    def finish(self) -> None:
        """Flush, with differences sent whole: the servers have all that this worker has learned."""
        self._exchange(whole=True)

    def stop(self) -> None:
        try:
            self.finish()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            self._thread.join(timeout=10)

    def stats(self) -> dict[str, Any]:
        sent = {"exchanges": self._num_exchanges, "rows_sent": self._num_rows_sent}
        return {**super().stats(), "queue": 0 if self._thread.error else self._num_wanted - self._num_done, **sent}

    def _exchange(self, whole: bool) -> None:
        with self._changed:
            wanted = self._want()
            self._wants_every_row = True
            self._wants_whole |= whole
        self._wait_for(wanted)

    def _check(self) -> None:
        self._thread.check()
        if self._is_over:
            raise FleetError("these whole tables have come to their end: the worker was stopped, nothing is exchanged")

    def _want(self) -> int:
        self._check()
        self._num_wanted += 1
        self._changed.notify_all()
        return self._num_wanted

    def _wait_for(self, number: int) -> None:
        with self._changed:
            while self._num_done < number and self._thread.error is None:
                self._changed.wait()
            self._thread.check()

    def _wake(self) -> None:
        """The thread beside training has ended: whoever waits for an exchange looks why."""
        with self._changed:
            self._changed.notify_all()

    def _push(self, gradients: Gradients) -> None:
        raise ModelError(
            "this job trains on the arrays of fleet.whole_tables(): optimizer.step() would change the same rows a "
            "second time"
        )

    def _carry(self) -> None:
        """The thread beside training."""
        with self._connect() as client:
            received = self._take_in(client, [0] * client.num_servers)
            self._fill(client)
            self._finish(1)
            while (wanted := self._next()) is not None:
                self._send(client, *self._how())
                received = self._take_in(client, received)
                self._num_exchanges += 1
                self._finish(wanted)

    def _next(self) -> int | None:
        """The number of the exchange to begin with, once there is one; None at the end."""
        with self._changed:
            while self._num_wanted == self._num_done and not self._is_over:
                self._changed.wait()
            return None if self._num_wanted == self._num_done else self._num_wanted  # who waits is served first

    def _how(self) -> tuple[bool, int, np.float32]:
        """(whether all differences go, how often else a row must have been changed, what part of one is sent)."""
        with self._changed:
            every_row = self._wants_every_row or self._num_exchanges % _HOT == 0
            whole = self._wants_whole
            self._wants_every_row = self._wants_whole = False
            return whole, 1 if every_row else _HOT, np.float32(1.0 if whole else self._share)

    def _finish(self, number: int) -> None:
        with self._changed:
            self._num_done = number
            self._changed.notify_all()

    def _fill(self, client: Client) -> None:
        for name, (num_rows, dim) in self._sizes.items():
            for start in range(0, num_rows, _ROWS_AT_ONCE):
                stop = min(num_rows, start + _ROWS_AT_ONCE)
                rows = client.pull(name, np.arange(start, stop, dtype=np.uint64)).result()
                self.values[name][start:stop, :dim] = self._base[name][start:stop] = rows

    def _send(self, client: Client, whole: bool, least: int, share: np.float32) -> None:
        for name, (_, dim) in self._sizes.items():
            counts = self.changes[name].copy()  # others count on meanwhile
            is_due = counts >= least
            if whole:  # what earlier exchanges have left over may not be counted
                is_due |= (self.values[name][:, :dim] != self._base[name]).any(axis=1)
            rows = np.flatnonzero(is_due)
            self.changes[name][rows] = 0  # before the values are read: what changes later is counted again
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                some = rows[start : start + _ROWS_AT_ONCE]
                deltas = np.empty((len(some), dim), np.float32)
                take_differences(self.values[name], self._base[name], some, share, _REST, self.changes[name], deltas)
                client.push_tables({name: (some.astype(np.uint64), deltas)}, flags=DELTA)
            self._num_rows_sent += len(rows)
        client.flush()

    def _take_in(self, client: Client, received: list[int]) -> list[int]:
        is_all = False
        while not is_all:
            changed = client.pull_changed(list(self._sizes), received).result()
            received, is_all = changed.numbers, changed.is_all
            for name, (keys, values) in changed.rows.items():
                if name in self._base:
                    fold_in(self.values[name], self._base[name], keys.astype(np.int64), values)
        return received


def _array(num_rows: int, width: int) -> Floats:
    """Zeros, on huge pages: half of the time to fetch a row is that to find its page."""
    array: Floats = Memory(4 * num_rows * width).array(np.float32)[: num_rows * width].reshape(num_rows, width)
    return array


def _declared_sizes(plan: Plan) -> dict[str, tuple[int, int]]:
    if plan.dense:
        raise ModelError(
            "fleet.whole_tables() is for models of tables only; this one has dense parameters: "
            f"{plan.dense[0].names[0]}"
        )
    for name, group in plan.sparse.items():
        if group.spec.kind != "array":
            raise ModelError(
                f"fleet.whole_tables() holds whole tables, and '{name}' has no size: give "
                "SparseEmbedding(num_embeddings=...)"
            )
        if group.spec.rule.has_bounds:
            raise ModelError(
                f"table '{name}' has weight_bounds, which act on updates by the servers; on whole tables the updates "
                "are yours. Leave weight_bounds out, and bound the arrays where you change them."
            )
    return {name: (group.spec.size, group.spec.dim) for name, group in plan.sparse.items()}
