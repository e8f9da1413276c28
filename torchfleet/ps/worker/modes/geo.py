"""The geo mode: each worker trains its own copy with SGD, and every k steps differences are exchanged beside training.

x is the local value, b the base: what this worker believes the server has. Every k steps, for the rows touched since:
    d = (x - b) / workers;   b ← b + d;   the server adds d
(what the division leaves over travels with the next exchanges, and all of it before a barrier and at the end)
and for rows (and the dense block) that others changed, s being the server's value:
    x ← x + (s - b);   b ← s
The server's value is its first value plus all differences ever sent. Training is on x, prediction on b.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError
from torchfleet.base.tracing.span_recorder import Mark, mark, part_of
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.net.wire import DELTA
from torchfleet.ps.tables.rows.memory import max_table_bytes
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Changed, Pulled, Ready
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.lookup.sources import PullAhead
from torchfleet.ps.worker.modes.communicator import Communicator, Gradients
from torchfleet.ps.worker.torch_states import BlockState, block_state, states_of

_MOST_FORESEEN = 16  # pulls whose rows are kept; later ones are asked for again when they are trained
_NEGLIGIBLE = 1e-6  # a remainder that is no longer sent; float32 values near 1 are 1e-7 apart

Deltas = dict[str, tuple[Keys, Floats] | Floats]


class Geo(Communicator):
    """One training thread at a time accesses tables and base; a background thread exchanges differences and replies."""

    steps_here = True
    keeps_rest = True

    def __init__(
        self,
        client: Client,
        plan: Plan,
        connect: Callable[[], Client],
        k_steps: int,
        num_workers: Callable[[], int],
        step_dense: Callable[[], Any],
        states: MutableMapping[Any, Any],
        is_first: bool,
    ) -> None:
        """`states`: those of the optimizer that steps the network here, by parameter. `is_first`: this is worker 0,
        whose velocities are saved and loaded.
        """
        super().__init__(client, plan, connect)
        self.alone = self._alone = threading.RLock()
        self._k_steps, self._num_workers = k_steps, num_workers
        self._step_dense, self._states, self._is_first = step_dense, states, is_first
        self._specs = {name: group.spec.in_memory() for name, group in plan.sparse.items()}
        self._local: dict[str, SparseTable] = {}
        self._base: dict[str, SparseTable] = {}
        self._dense_base: dict[str, Floats] = {}
        self._aside: dict[str, Floats] = {}  # this worker's dense values, while the model has the servers'
        self._is_shown = False  # the model has the servers' values
        self._touched: dict[str, list[Keys]] = {}
        # by table: rows that were foreseen and are not in the local copy, which takes those that are trained
        self._foreseen: dict[str, deque[tuple[Keys, Floats]]] = {}
        self._begin_with_none(self._specs)
        self._out: queue.Queue[Deltas | None] = queue.Queue(1)
        self._back: queue.Queue[Changed | None] = queue.Queue()  # None: the thread has ended
        self._under_way = False
        self._sent_step = 0  # the step after which differences were sent last
        self._mark: Mark | None = None  # of the step that started the current exchange, if it is traced
        self._num_exchanges = self._last_step = 0  # the step that started an exchange
        self._thread = BackgroundThreads(
            [self._carry], "the exchange with the servers failed", on_end=lambda: self._back.put(None)
        )

    def _begin_with_none(self, tables: Collection[str]) -> None:
        """Start without local rows of these tables. The model must have the servers' dense values."""
        for name in tables:
            self._drop_rows(name)
        self._dense_base = {group.spec.name: group.values() for group in self._plan.dense}
        self._is_shown = False

    def _drop_rows(self, table: str) -> None:
        limit = max_table_bytes()
        self._local[table], self._base[table] = (SparseTable(self._specs[table], limit) for _ in range(2))
        self._touched[table] = []
        self._foreseen[table] = deque(maxlen=_MOST_FORESEEN)

    def begin_with_states(self, steps: Mapping[str, int]) -> None:
        with self._alone:
            for name in steps:
                self._drop_rows(name)

    def own_states(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        with self._alone:
            for keys, values, _ in list(self._local[table].chunks()):
                yield keys, values[:, self._specs[table].dim :]

    def put_states(self) -> None:
        with self._alone:
            for name, spec in self._specs.items():
                for keys, states in self.own_states(name) if spec.num_words > spec.dim else ():
                    self._client.assign_states(name, keys, states, max(1, self.num_steps))
            for group in self._plan.dense:
                if group.spec.num_states:
                    found = [self._states.get(parameter, {}) for parameter in group.parameters]
                    state = block_state(group, found, max(1, self.num_steps))
                    self._client.set_block_state(group.spec.name, *state)

    def take_states(self) -> None:
        for group in self._plan.dense:
            if group.spec.num_states:
                block, step = self._client.pull_block(group.spec.name)
                if step and block[1:].any():
                    made = states_of(group, BlockState(block[1:], step))
                    self._states.update(zip(group.parameters, made, strict=True))

    def begin_anew(self, tables: Collection[str]) -> None:
        with self._alone:
            self._begin_with_none(tables)

    def start(self) -> None:
        self._thread.start()
        # the first reply: from now on the servers record other workers' changes for this worker
        self._take_in(self._wait())

    def pull(self, keys: Mapping[str, Keys], create: bool, foreseen: bool = False) -> PullAhead:
        """Rows of the local copy, or of the base for a prediction while the model has the servers' values. Rows that
        the local copy lacks are pulled from the servers first; it takes those that are looked up for training.
        """
        with self._alone:
            return Ready(self._pull_here(keys, create, foreseen))

    def _pull_here(self, keys: Mapping[str, Keys], create: bool, foreseen: bool) -> Pulled:
        missing = {name: absent for name, wanted in keys.items() if len(absent := self._local[name].absent(wanted))}
        if missing:
            fetched = super().pull(missing, create, foreseen).result().rows
            if foreseen:
                for name, values in fetched.items():
                    self._foreseen[name].append((missing[name], values))
            if foreseen or not create:
                return self._mixed(keys, missing, fetched, create)
            self._hold(missing, fetched)
        rows = {name: self._held(create)[name].pull(wanted) for name, wanted in keys.items()}
        return Pulled(rows, {name: [] for name in keys})

    def _hold(self, keys: Mapping[str, Keys], rows: Mapping[str, Floats]) -> None:
        """Take rows of the servers into the local copy."""
        for name, values in rows.items():
            self._local[name].assign(keys[name], self._with_states(name, keys[name], values))
            self._base[name].assign(keys[name], values)

    def _hold_trained(self, sparse: Mapping[str, tuple[Keys, Floats]]) -> None:
        """Take the rows of these gradients into the local copy: those that were foreseen, and those of ids that this
        worker has looked up in eval mode only.
        """
        missing = {}
        for name, (trained, _) in sparse.items():
            absent = self._local[name].absent(trained)
            for keys, values in reversed(self._foreseen[name] if len(absent) else ()):  # the newest values
                is_trained = np.isin(keys, absent)
                self._hold({name: keys[is_trained]}, {name: values[is_trained]})
                absent = self._local[name].absent(absent)
            if len(absent):
                missing[name] = absent
        if missing:
            self._hold(missing, super().pull(missing, create=True).result().rows)
        for foreseen in self._foreseen.values():
            foreseen.clear()

    def without_row(self, keys: Mapping[str, Keys]) -> Mapping[str, Keys]:
        with self._alone:
            return super().without_row({name: self._local[name].absent(own) for name, own in keys.items()})

    def _with_states(self, name: str, keys: Keys, values: Floats) -> Floats:
        """New rows with the velocities that the servers have of them, on worker 0."""
        dim = self._specs[name].dim
        if not self._is_first or self._specs[name].num_words == dim or not len(keys):
            return values
        return np.concatenate([values, self._client.pull_rows(name, keys).result()[0][:, dim:]], axis=1)

    def _mixed(
        self, keys: Mapping[str, Keys], missing: Mapping[str, Keys], fetched: Mapping[str, Floats], create: bool
    ) -> Pulled:
        """Local rows, and the servers' rows for ids that this worker never trained on, which the local copy does not
        take.
        """
        rows = {}
        for name, wanted in keys.items():
            rows[name] = self._held(create)[name].pull(wanted, create=False)
            if name in missing:
                order = np.argsort(missing[name])
                at = np.searchsorted(missing[name], wanted, sorter=order)
                at = order[np.minimum(at, len(order) - 1)]
                strangers = missing[name][at] == wanted
                rows[name][strangers] = fetched[name][at[strangers]]
        return Pulled(rows, {name: [] for name in keys})

    def _held(self, create: bool) -> dict[str, SparseTable]:
        return self._base if self._is_shown and not create else self._local

    def _push(self, gradients: Gradients) -> None:
        with self._alone:
            self._show_own()  # if the model was not called as a whole
            self._train_here(gradients)

    def _train_here(self, gradients: Gradients) -> None:
        self._hold_trained(gradients.sparse)
        for name, (keys, grads) in gradients.sparse.items():
            self._local[name].push(keys, grads, gradients.rates[name])
            self._touched[name].append(keys)
        self._step_dense()
        if not self._back.empty():
            self._take_in(self._wait())
        if self.num_steps - self._last_step >= self._k_steps and not self._under_way:
            self._last_step = self.num_steps
            self._send()

    def enter(self, is_training: bool, has_gradients: bool) -> None:
        if is_training and has_gradients and threading.get_ident() == self._main_thread:
            self._show_own()
        super().enter(is_training, has_gradients)

    def hand_over(self) -> None:
        """Send all differences whole, and take in the other workers' changes up to now."""
        with self._alone:
            self._exchange(share=1.0)

    def settle(self) -> None:
        """Exchange differences now, divided by the number of workers."""
        with self._alone:
            is_shown = self._is_shown
            self._exchange()
            if is_shown:
                self._show_servers()

    def flush(self) -> None:
        """Let the model have the servers' values until it is called for training again. Divided differences are sent
        before, but only if steps were made since the last ones: a save right after a prediction has the same values.
        """
        with self._alone:
            self._exchange(is_sent=self.num_steps != self._sent_step)
            self._show_servers()

    def _exchange(self, share: float | None = None, is_sent: bool = True) -> None:
        self._show_own()
        if self._under_way:
            self._take_in(self._wait())
        if is_sent:
            self._send(share)
        else:
            self._hand_out({})
        self._take_in(self._wait())

    def _show_servers(self) -> None:
        for group in self._plan.dense:
            self._aside[group.spec.name] = group.values().copy()
            group.write(self._dense_base[group.spec.name], unnoticed=self._is_beside)
        self._is_shown = True

    def _show_own(self) -> None:
        with self._alone:
            if self._is_shown:
                self._is_shown = False
                for group in self._plan.dense:  # keeps what the script has changed by hand meanwhile
                    name = group.spec.name
                    changed = group.values() - self._dense_base[name]
                    group.write(self._aside[name] + changed, unnoticed=self._is_beside)

    def stop(self) -> None:
        try:
            self.hand_over()
        finally:
            self._out.put(None)
            self._thread.join(timeout=10)

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "queue": int(self._under_way), "exchanges": self._num_exchanges}

    def _send(self, share: float | None = None) -> None:
        deltas: Deltas = {}
        share = np.float32(share or 1.0 / max(1, self._num_workers()))
        for group in self._plan.dense:
            base = self._dense_base[group.spec.name]
            deltas[group.spec.name] = delta = (group.values() - base) * share
            base += delta
        for name, touched in self._touched.items():
            keys = unique(np.concatenate(touched or [np.empty(0, np.uint64)]))[0]
            base = self._base[name].pull(keys)
            rows = (self._local[name].pull(keys) - base) * share
            self._base[name].assign(keys, base + rows)
            deltas[name] = (keys, rows)
            rest = np.abs(self._local[name].pull(keys) - self._base[name].pull(keys)).max(axis=1, initial=0.0)
            # the remainder of the division goes with the next exchanges
            self._touched[name] = [keys[rest > _NEGLIGIBLE]]
        self._sent_step = self.num_steps
        self._num_exchanges += 1
        self._hand_out(deltas)

    def _hand_out(self, deltas: Deltas) -> None:
        """Give the differences to the background thread, which sends them and pulls the other workers' changes."""
        self._under_way = True
        self._mark = mark()
        self._out.put(deltas)

    def _wait(self) -> Changed:
        """The reply to the exchange in flight. Raises the thread's error if it failed."""
        answer = self._back.get()
        if answer is None:
            self._back.put(None)  # for the next caller
            self._thread.check()
            raise FleetError("the thread that exchanges with the servers has ended")
        return answer

    def _take_in(self, answer: Changed) -> None:
        self._under_way = False
        for group in self._plan.dense:
            values = answer.rows[group.spec.name][1].reshape(-1)
            group.write(group.values() + (values - self._dense_base[group.spec.name]), unnoticed=self._is_beside)
            self._dense_base[group.spec.name] = values.copy()
        for name in self._plan.sparse:
            self._fold_in(name, *answer.rows[name])

    def _fold_in(self, name: str, keys: Keys, values: Floats) -> None:
        local, base = self._local[name], self._base[name]
        if not len(keys):
            return
        strangers = np.isin(keys, local.absent(keys))  # rows that this worker does not hold
        keys, values = keys[~strangers], values[~strangers]
        local.assign(keys, local.pull(keys) + (values - base.pull(keys)))
        base.assign(keys, values)

    def _carry(self) -> None:
        """The main function of the background thread."""
        names = [group.spec.name for group in self._plan.dense] + list(self._plan.sparse)
        with self._connect() as client:
            changed = client.pull_changed(names, [0] * client.num_servers).result()
            while True:
                self._back.put(changed)
                deltas = self._out.get()
                if deltas is None:
                    return
                with part_of([self._mark], "exchange"):
                    if deltas:
                        client.push_tables(deltas, flags=DELTA).result()
                    changed = client.pull_changed(names, changed.numbers).result()
                    while not changed.is_all:
                        changed = changed.joined(client.pull_changed(names, changed.numbers).result())
