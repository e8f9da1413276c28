"""When gradients are sent and when values come back: one small class per mode behind one interface.

sync        one update per step with the mean gradient of all workers' samples; all workers wait for it
half_async  each worker waits for its own update, and for no other worker
async       (asynchronous.py) gradients go into a queue, a thread sends them, training goes on
            (bounded.py) with max_staleness: a worker too far ahead waits
geo         (geo.py, whole_tables.py) training on a local copy, differences are exchanged periodically
hybrid      (hybrid.py) as async for rows; the workers synchronize the dense network by torch.distributed
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchfleet.base.tracing.span_recorder import Mark
from torchfleet.ps.net.wire import DELTA, DENSE_BACK, GATHERED, SYNC, VERSIONS, WRITTEN
from torchfleet.ps.tables.rows.row_statistics import is_counted
from torchfleet.ps.worker.batch.sample_count import SampleCount
from torchfleet.ps.worker.cache.cached_update import CachedUpdate
from torchfleet.ps.worker.cache.row_cache import RowCache
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Dense, Future
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.dense_group import Written
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.lookup.sources import PullAhead, TimedPull


@dataclass(slots=True)
class Gradients:
    """The gradients of one step, to be pushed."""

    sparse: dict[str, tuple[Keys, Floats]]
    versions: dict[str, list[float]]
    dense: dict[str, Floats]
    rates: dict[str, float]
    num_samples: float | None = None  # weight in a mean; None: the same as others
    share: int = 0  # the index of the optimizer that made the step
    mark: Mark | None = None  # of a traced step, if another thread pushes the gradients
    are_finite: bool = False  # they were checked; sums of them may overflow again
    cached: list[CachedUpdate] = field(default_factory=list)  # of tables that are trained in this worker's cache

    def is_nothing(self) -> bool:
        """Whether no sample contributed to it."""
        return (
            not any(update.pending for update in self.cached)
            and not any(len(keys) for keys, _ in self.sparse.values())
            and not any(b.any() for b in self.dense.values())
        )


@dataclass(frozen=True)
class Gathering:
    """Update with the mean of `num` pushes, ignoring dense gradients with a staleness above `max_staleness` updates.
    `samples`: the weights of the pushes; None: equal weights.
    """

    num: int
    max_staleness: int
    samples: SampleCount | None = None

    @property
    def settings(self) -> tuple[int, int]:
        return self.num, self.max_staleness


class Communicator(ABC):
    """The worker's side of a mode. The training thread calls `pull` and `step`."""

    pulls_ahead = False
    in_step = False  # pulls belong to steps that all workers make together
    has_threads = False  # several threads are training now
    steps_together = False  # several workers make each step together
    steps_here = False  # dense parameters are stepped in this process, not by the servers
    keeps_rest = False  # a flush sends a part of what this worker has learned, and `stop` the rest
    takes_threads = True  # several threads of a worker may train at once
    alone: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # held by a thread that hands over a step

    def __init__(
        self, client: Client, plan: Plan, connect: Callable[[], Client], gathering: Gathering | None = None
    ) -> None:
        self._gathering = gathering
        self._samples = gathering.samples if gathering else None
        self._main_client, self._plan, self._new_client = client, plan, connect
        self.num_workers: Callable[[], int] = lambda: 1  # of the job, now
        self._is_pushing = False  # what the script has written was sent, and no code of the script runs
        self._written_at = -2  # the step after which the script was last seen to write into parameters
        self._writing = threading.RLock()  # held while parameters are written, or looked at for what a script wrote
        self._others: list[Client] = []  # clients of training threads and sender threads
        self._past_retries = 0  # retries of closed clients
        self._main_thread = threading.get_ident()
        self._own = threading.local()
        self._count = threading.Lock()
        self._seconds = {"pull": 0.0, "push": 0.0, "dense": 0.0}
        self.num_steps = 0  # steps of this worker so far, over all its threads
        self._versions: dict[str, list[float]] = {}  # of the dense values in the model, where known
        self._last_call: tuple[bool, bool] | None = None  # training mode and gradients, at the model's last call
        self._is_computing = False  # the model was called with gradients, and no step was made since
        self.caches: list[RowCache] = []  # of tables whose rows this worker trains itself

    @property
    def _client(self) -> Client:
        """The calling thread's client: each training thread gets its own."""
        if threading.get_ident() == self._main_thread:
            return self._main_client
        if not hasattr(self._own, "client"):
            self._own.client = self._connect()
        client: Client = self._own.client
        return client

    def _connect(self) -> Client:
        """A client for another thread, which must close it. Its requests count as this worker's."""
        client = self._new_client()
        with self._count:
            self._others.append(client)
        return client

    def leave_thread(self) -> None:
        """Release the resources of a training thread that has finished."""
        if hasattr(self._own, "client"):
            client: Client = self._own.client
            client.close()
            del self._own.client
            with self._count:
                self._others.remove(client)
                self._past_retries += client.num_retries

    def enter(self, is_training: bool, has_gradients: bool) -> None:
        """Called before this thread calls the model, in training or eval mode, with or without gradients.

        The first call of a prediction flushes: it predicts with the servers' network, and so do those that follow. Not
        between a call with gradients and its step, which belong together, and not in threads beside training.
        """
        if threading.get_ident() == self._main_thread and not self.has_threads:
            call, last = (is_training, has_gradients), self._last_call
            self._last_call = call
            if call != last and not all(call) and not self._is_computing:
                self.flush()
        self.freshen()
        self._is_computing |= has_gradients

    def freshen(self) -> None:
        """Write the newest dense values that were requested."""
        self._own.versions = self._versions

    def rest(self) -> None:
        """Called before this worker waits for others: it pushes nothing meanwhile."""
        if self._gathering and threading.get_ident() == self._main_thread:
            self.settle()

    def settle(self) -> None:
        """Wait until everything given to `step` so far has been applied."""
        self.write_back()
        if self._gathering:
            self._client.push_tables({}, flags=GATHERED, settings=self._gathering.settings).result()

    def end_threads(self) -> None:
        """Called after several threads have trained and ended."""
        self.has_threads = False

    def drop_gradients(self, share: int) -> None:
        """Discard the gradients of an optimizer since its last step."""
        if self._samples is not None:
            self._samples.reset(share)

    def skip_step(self, share: int) -> None:
        """Let the other workers make a step alone: this worker has no gradients to add."""
        self._is_computing = False
        self.drop_gradients(share)

    def begin_after(self, num_steps: int) -> None:
        """Count on from the steps that this worker made before, by another communicator."""
        self.num_steps = num_steps

    def start(self) -> None:  # noqa: B027  (most modes have nothing beside training)
        """Start the background threads, if any."""

    def pull(self, keys: Mapping[str, Keys], create: bool, foreseen: bool = False) -> PullAhead:
        """As Source.pull."""
        start = time.perf_counter()
        pull = self._client.pull_tables(keys, create, self.in_step, foreseen)
        self._seconds["pull"] += time.perf_counter() - start  # in a single process, the request itself does the work
        return TimedPull(pull, self._seconds)

    def create_rows(self, keys: Mapping[str, Keys]) -> None:
        """As Source.create_rows. The pull has created the rows of tables that count pulls."""
        plain = {name: own for name, own in keys.items() if not is_counted(self._plan.sparse[name].spec)}
        if plain:
            self.pull(plain, create=True).result()

    def without_row(self, keys: Mapping[str, Keys]) -> Mapping[str, Keys]:
        """As Source.without_row."""
        rows = self._client.pull_tables(keys, create=False, foreseen=True).result().rows
        return {name: own[rows[name].any(axis=1)] for name, own in keys.items()}

    def step(self, gradients: Gradients) -> None:
        """Hand over the gradients of one step."""
        start = time.perf_counter()
        with self._count:
            self.num_steps += gradients.share == 0  # one per loop iteration, however many optimizers
        # The versions at this thread's last call of the model; another thread may have written newer values since.
        gradients.versions.update(getattr(self._own, "versions", None) or self._versions)
        self._own.versions = None
        if self._samples is not None and not self.has_threads:  # the count is over all threads together
            gradients.num_samples = self._samples.take(gradients.is_nothing, gradients.share)
        self._is_computing = False
        for update in gradients.cached:
            update.apply()
        self.send_written()  # the gradients are those of the values that the script has written
        self._is_pushing = not self.has_threads
        try:
            if gradients.sparse or gradients.dense or not gradients.cached:
                self._push(gradients)
        finally:
            self._is_pushing = False
        if self.num_steps - self._written_at <= 1 and not self.has_threads:
            self._await_values()  # a script that writes into parameters after a step sees what the step has made
        self._seconds["push"] += time.perf_counter() - start

    def flush(self) -> None:
        """Hand over, and write the servers' dense values into the model: other workers may have made steps."""
        self.hand_over()
        self._write(self._pull_dense(self._client))

    def send_written(self) -> None:
        """Give the servers what the script has written into dense parameters."""
        self._send_written()

    def watch_parameters(self) -> None:
        """From now on, notice what the script writes into dense parameters. Forgets what was written before."""
        if not self.steps_here:
            with self._writing:
                for group in self._plan.dense:
                    group.watch()

    def stop(self) -> None:
        """Flush, and stop the background threads."""
        self.flush()

    def write_back(self) -> None:
        """Write the rows of this worker's caches to the servers."""
        for cache in self.caches:
            cache.flush()

    def own_rows(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        """Yield this worker's own rows, which replace the servers' in a state_dict, in chunks; empty in most modes."""
        return iter(())

    def own_states(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        """As `own_rows`, of the optimizer's state of rows."""
        return iter(())

    def take_states(self) -> None:  # noqa: B027
        """At the start: take the optimizer's state that this worker keeps itself from the servers."""

    def put_states(self) -> None:  # noqa: B027  (in most modes the servers have it)
        """Before worker 0 saves: give the servers the optimizer's state that this worker keeps itself."""

    def check_loading(self) -> None:  # noqa: B027  (most modes take what is loaded)
        """Raise ModelError if a state cannot be loaded in this mode."""

    def hand_over(self) -> None:
        """Wait until everything that this worker has learned has reached the tables."""
        self.send_written()
        self._client.flush()
        self.settle()

    def begin_anew(self, tables: Collection[str]) -> None:
        """Start again from values given to the servers: rows of these tables, and all dense values, which the model
        has.
        """
        for cache in self.caches:
            if cache.spec.name in tables:
                cache.empty()

    def begin_with_states(self, steps: Mapping[str, int]) -> None:
        """Go on from optimizer states given to the servers. `steps`: of the tables of rows that have any."""
        for cache in self.caches:
            if cache.spec.name in steps:
                cache.empty(steps[cache.spec.name])

    def release(self) -> None:
        """Leave the model as it was, so that it can be used in another job."""
        if self._samples is not None:
            self._samples.close()

    def stats(self) -> dict[str, Any]:
        """The training thread's waiting times in milliseconds per step."""
        steps = max(1, self.num_steps)
        waits = {f"{name}_wait_ms": 1000 * seconds / steps for name, seconds in self._seconds.items()}
        cached = {"cache": {cache.spec.name: cache.stats() for cache in self.caches}} if self.caches else {}
        return {"steps": self.num_steps, **waits, "retries": self._num_retries, "queue": 0, **cached}

    @property
    def _num_retries(self) -> int:
        with self._count:
            clients = [self._main_client, *self._others]
            return self._past_retries + sum(client.num_retries for client in clients)

    @abstractmethod
    def _push(self, gradients: Gradients) -> None: ...

    def _submit(self, client: Client, gradients: Gradients, flags: int, timeout: float | None = None) -> Future[Dense]:
        """Send a push, gathered with others if the mode asks for it; returns its future."""
        return client.push_tables(
            {**gradients.dense, **gradients.sparse},
            gradients.rates,
            gradients.versions,
            flags | (GATHERED if self._gathering else 0),
            timeout,
            gradients.num_samples,
            self._gathering.settings if self._gathering else (),
            gradients.are_finite,
        )

    def _pull_dense(self, client: Client) -> Dense:
        """All dense tables with their versions."""
        names = [group.spec.name for group in self._plan.dense]
        return client.pull_dense_tables(names).result() if names else Dense()

    def _await_values(self) -> None:  # noqa: B027  (most modes have them when a step ends)
        """Wait until the dense parameters have the values after the last step."""

    def _send_written(self) -> dict[str, Written]:
        """By table, what the script has written since the last call.

        In sync mode all workers have the same values, and what one of them writes takes their place. In other modes
        differences are added, those of each of n workers by 1/n. So what all workers write alike counts once.
        """
        if self.steps_here or self._is_pushing:
            return {}
        with self._writing:
            written = {}
            for group in self._plan.dense:
                if (own := group.take_written()) is not None:
                    written[group.spec.name] = own
            if written:
                self._written_at = self.num_steps
            if written and self.in_step:
                blocks = {name: own.values for name, own in written.items()}
                self._client.push_tables(blocks, flags=WRITTEN, are_finite=True).result()
            elif written:
                blocks = {name: own.differences * self._written_share for name, own in written.items()}
                self._client.push_tables(blocks, flags=WRITTEN | DELTA, are_finite=True).result()
        return written

    @property
    def _written_share(self) -> np.float32:
        share: np.float32 = np.float32(1.0 / max(1, self.num_workers()))
        return share

    def _with_written(self, values: Floats, written: Written) -> Floats:
        """The servers' values, which were pulled before they got what the script has written."""
        if self.in_step:
            return written.over(values)
        return values.reshape(-1) + written.differences * self._written_share

    def _write(self, values: Dense) -> None:
        with self._writing:
            self._write_alone(values)

    def _write_alone(self, values: Dense) -> None:
        written = self._send_written()
        if self.has_threads and _is_older(values.versions, self._versions):
            return  # another thread's later reply came in first
        versions = dict(self._versions)  # a copy: other threads may be reading it
        for name in values:
            versions.pop(name, None)  # values without a version, as in sync mode: unknown
        self._versions = versions | values.versions
        for group in self._plan.dense:
            if group.spec.name in values:
                own = written.get(group.spec.name)
                block = values[group.spec.name]
                group.write(block if own is None else self._with_written(block, own), unnoticed=self._is_beside)

    @property
    def _is_beside(self) -> bool:
        """Whether a write now may fall between a forward pass and its backward pass."""
        return self.has_threads or self._is_computing or threading.get_ident() != self._main_thread


def _is_older(versions: Mapping[str, list[float]], others: Mapping[str, list[float]]) -> bool:
    return sum(map(sum, versions.values())) < sum(map(sum, others.values()))


class HalfAsync(Communicator):
    """Each push is applied, and the servers' dense values are written to the model, before training goes on.

    If updates are gathered, the reply comes when the server has stored the push.
    """

    _flags = DENSE_BACK | VERSIONS
    _timeout: float | None = None

    def _push(self, gradients: Gradients) -> None:
        values = self._submit(self._client, gradients, self._flags, self._timeout).result()
        if not values and gradients.dense:  # the reply to a retry, which brings no values
            values = self._pull_dense(self._client)
        self._write(values)

    def end_threads(self) -> None:
        super().end_threads()
        self._write(self._pull_dense(self._client))  # a reply may have come in after a later one


class Sync(HalfAsync):
    """As HalfAsync, but the update uses the mean of all workers' gradients, over samples or over workers, once all have
    arrived.
    """

    _flags = DENSE_BACK | SYNC
    in_step = True
    takes_threads = False  # a server waits for one push of each worker

    def __init__(
        self,
        client: Client,
        plan: Plan,
        connect: Callable[[], Client],
        timeout: float,
        num_workers: int,
        samples: SampleCount | None = None,
    ) -> None:
        """`samples`: the weights of the workers' gradients; None: equal weights."""
        super().__init__(client, plan, connect)
        self._timeout, self._samples = timeout, samples
        self.steps_together = num_workers > 1

    def skip_step(self, share: int) -> None:
        super().skip_step(share)
        self._client.push_tables({}, flags=self._flags, timeout=self._timeout).result()
        self._write(self._pull_dense(self._client))
