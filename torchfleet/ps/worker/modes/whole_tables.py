"""Geo training on whole tables: each table is a plain array in this process, which training changes in place.

The formulas are those of geo.py. Training counts the changes of every row. With every exchange a background thread
sends the differences of rows that have changed often; periodically it sends those of all rows. It adds the changes of
the other workers. Between two copies, only the few rows that both change all the time drift apart, so sending these
alone makes frequent exchanges cheap. With more copies, every exchange sends every changed row. Training never waits: if
training and the background thread change a number at the same moment, one change may be lost, as among training threads
themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError, ModelError
from torchfleet.ps.kernels.differences import fold_in, share_by_count, take_differences
from torchfleet.ps.net.wire import DELTA
from torchfleet.ps.tables.settings.row_format import FLOAT32
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.modes.communicator import Communicator, Gradients
from torchfleet.ps.worker.modes.table_copy import Counts, TableCopy
from torchfleet.ps.worker.row_state.table_rows import slices

_ROWS_AT_ONCE = 1 << 13  # rows per message: small enough that a server's other clients do not wait long
_REST = np.float32(1e-3)  # a remainder after `share` counts as a change only above this
_HOT = 16  # changes after which a row goes with every exchange; other rows go with every 16th
_FEW = 2  # copies; with more, a row that waits to become hot has drifted apart on all of them (benchmarks/log.md)


class WholeTables(Communicator):
    """`values[table]`: (rows, at least dim) float32, zeros beyond dim. `changes[table]`: add 1 after every change."""

    takes_threads = False
    keeps_rest = True

    def __init__(
        self,
        client: Client,
        plan: Plan,
        connect: Callable[[], Client],
        copy: TableCopy,
        k_steps: int,
        share: float | None,
        patience: float,
    ) -> None:
        """`connect` gives clients that represent all workers of the copy. `share`: None for a share by count.
        `patience`: seconds that another worker of the copy may take for its exchange.
        """
        super().__init__(client, plan, connect)
        self._sizes = table_sizes(plan)
        self._copy, self._share, self._patience = copy, share, patience
        self.values, self.changes, self._base = copy.values, copy.changes, copy.base
        # The workers of a copy take turns exchanging it: together once every k_steps steps of each worker.
        self._steps_between = k_steps * len(copy.sharing.workers)
        self._last_step = -k_steps * copy.sharing.position  # the step that started the last exchange
        self._hot = _HOT if copy.sharing.num_copies <= _FEW else 1
        self._changed = threading.Condition()
        self._num_wanted, self._num_done = 1, 0  # exchanges; the first fills the arrays
        self._wants_every_row = self._wants_whole = self._is_over = False
        self._num_exchanges = self._num_rows_sent = 0
        self._thread = BackgroundThreads([self._carry], "the exchange with the servers failed", on_end=self._wake)

    def enter(self, is_training: bool, has_gradients: bool) -> None:
        """Lookups read what the servers hold. The script itself decides when it flushes."""
        self.freshen()

    def begin_after(self, num_steps: int) -> None:
        self._last_step += num_steps - self.num_steps
        super().begin_after(num_steps)

    def start(self) -> None:
        """Fill the arrays from the servers, which from then on record other workers' changes for this worker."""
        self._thread.start()
        self._wait_for(1)

    def step_done(self) -> None:
        """Call after every step, from any thread. Starts an exchange when one is due, and never waits."""
        with self._changed:
            self._check()
            self.num_steps += 1
            is_idle = self._num_wanted == self._num_done
            if is_idle and 0 < self._steps_between <= self.num_steps - self._last_step:
                self._last_step = self.num_steps
                self._want()

    def flush(self) -> None:
        """Wait until the differences of all rows are on the servers (`share` of each), and others' changes are here."""
        self._exchange(whole=False)

    settle = flush

    def own_rows(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        return slices(None, self.values[table][:, : self._sizes[table][1]])

    def check_loading(self) -> None:
        raise ModelError(
            "load_state_dict: this worker trains on the arrays of fleet.whole_tables(). Load before it is called, or "
            "write into the arrays."
        )

    def finish(self) -> None:
        """Flush, with differences sent whole: then the servers have everything that this worker has learned."""
        self._exchange(whole=True)

    hand_over = finish

    def stop(self) -> None:
        try:
            self.finish()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            self._thread.join(timeout=10)
            if not self._thread.is_alive():
                self._copy.close()

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
            raise FleetError("fleet.whole_tables(): the worker was stopped, so the tables are no longer exchanged")

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
        """Wake all waiters, which check for the error: the background thread has ended."""
        with self._changed:
            self._changed.notify_all()

    def _push(self, gradients: Gradients) -> None:
        raise ModelError(
            "this job trains on the arrays of fleet.whole_tables(): optimizer.step() would change the same rows a "
            "second time"
        )

    def _carry(self) -> None:
        """The main function of the background thread."""
        with self._connect() as client:
            with self._copy.alone(self._patience):
                if not self._copy.received.any():  # the first worker of the copy
                    received = self._take_in(client)
                    self._fill(client)
                    self._copy.received[:] = received
            self._finish(1)
            while (wanted := self._next()) is not None:
                with self._copy.alone(self._patience):
                    self._send(client, *self._how())
                    self._copy.received[:] = self._take_in(client)
                with self._changed:  # a thread that sees the exchange counted also sees it finished
                    self._num_exchanges += 1
                    self._finish(wanted)

    def _next(self) -> int | None:
        """Wait for the next exchange to make and return its number; None at the end."""
        with self._changed:
            while self._num_wanted == self._num_done and not self._is_over:
                self._changed.wait()
            return None if self._num_wanted == self._num_done else self._num_wanted  # waiting callers are served first

    def _how(self) -> tuple[bool, int]:
        """(whether to send the differences of all rows whole, the number of changes from which a row is sent)."""
        with self._changed:
            every_row = self._wants_every_row or self._num_exchanges % _HOT == 0
            whole = self._wants_whole
            self._wants_every_row = self._wants_whole = False
            return whole, 1 if every_row else self._hot

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

    def _send(self, client: Client, whole: bool, least: int) -> None:
        for name, (_, dim) in self._sizes.items():
            counts = self.changes[name].copy()  # a copy: others go on counting
            is_due = counts >= least
            if whole:  # remainders of earlier exchanges may not be counted
                is_due |= (self.values[name][:, :dim] != self._base[name]).any(axis=1)
            rows = np.flatnonzero(is_due)
            shares = self._shares(counts[rows], 1.0 if whole else self._share)
            self.changes[name][rows] = 0  # before the values are read, so that later changes are counted again
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                some = rows[start : start + _ROWS_AT_ONCE]
                deltas = np.empty((len(some), dim), np.float32)
                part = shares[start : start + _ROWS_AT_ONCE]
                take_differences(self.values[name], self._base[name], some, part, _REST, self.changes[name], deltas)
                client.push_tables({name: (some.astype(np.uint64), deltas)}, flags=DELTA)
            self._num_rows_sent += len(rows)
        client.flush()

    def _shares(self, counts: Counts, share: float | None) -> Floats:
        """The share of its difference to send for each row, given its number of changes."""
        shares = np.full(len(counts), share if share is not None else 1.0, np.float32)
        if share is None:
            share_by_count(counts, self._copy.sharing.num_copies, shares)
        return shares

    def _take_in(self, client: Client) -> list[int]:
        received, is_all = [int(number) for number in self._copy.received], False
        while not is_all:
            changed = client.pull_changed(list(self._sizes), received).result()
            received, is_all = changed.numbers, changed.is_all
            for name, (keys, values) in changed.rows.items():
                if name in self._base:
                    fold_in(self.values[name], self._base[name], keys.astype(np.int64), values)
        return received


def table_sizes(plan: Plan) -> dict[str, tuple[int, int]]:
    """By table: rows and dim, as the model declares them. Raises ModelError if the model has anything
    but such tables.
    """
    if plan.dense:
        raise ModelError(
            "fleet.whole_tables() is for models of tables only; this one has dense parameters: "
            f"{plan.dense[0].names[0]}"
        )
    for name, group in plan.sparse.items():
        if not group.spec.has_size:
            raise ModelError(
                f"fleet.whole_tables() holds whole tables, and '{name}' has no size: give "
                "SparseEmbedding(num_embeddings=...)"
            )
        if group.spec.rule.has_bounds:
            raise ModelError(
                f"table '{name}' has weight_bounds, which act on updates by the servers; on whole tables the updates "
                "are yours. Leave weight_bounds out, and bound the arrays where you change them."
            )
        if group.spec.format != FLOAT32:
            raise ModelError(
                f"table '{name}' has dtype='{group.spec.format.dtype}' or a wire of its own, and whole tables are "
                "exchanged in float32. Leave dtype and wire out."
            )
        if group.spec.rule.weight_decay:
            raise ModelError(
                f"table '{name}' has row_weight_decay, which acts on updates by the servers; on whole tables the "
                "updates are yours. Leave it out, and let the arrays decay where you change them."
            )
    return {name: (group.spec.size, group.spec.dim) for name, group in plan.sparse.items()}
