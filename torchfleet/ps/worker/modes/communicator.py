"""When gradients travel and when values come back: one small class per mode behind one interface.

sync        one update per step with the mean gradient of all workers' samples; everybody waits for it
half_async  this worker's update, waited for; nobody waits for anybody else
async       (asynchronous.py) gradients go into a queue, a thread sends them, training goes on
            (bounded.py) with max_staleness: who is too far ahead waits
geo         (geo.py, whole_tables.py) training on a local copy, differences exchanged now and then
hybrid      (hybrid.py) as async for rows; the network is exchanged among the workers
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchfleet.base.tracing.span_recorder import Mark
from torchfleet.ps.net.wire import DENSE_BACK, GATHERED, SYNC, VERSIONS
from torchfleet.ps.worker.batch.sample_count import SampleCount
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.future import Dense, Future
from torchfleet.ps.worker.client.shard import Floats, Keys
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.lookup.sources import PullAhead, TimedPull


@dataclass(slots=True)
class Gradients:
    """What one step leaves to be pushed."""

    sparse: dict[str, tuple[Keys, Floats]]
    versions: dict[str, list[float]]
    dense: dict[str, Floats]
    rates: dict[str, float]
    num_samples: float | None = None  # what they count for in a mean; None: as much as others
    share: int = 0  # the number of the optimizer whose step it is
    mark: Mark | None = None  # of a step that is traced, where another thread pushes them
    are_finite: bool = False  # they have been looked at; sums of them may be too large again

    def is_nothing(self) -> bool:
        """Whether no sample had a part in it."""
        return not any(len(keys) for keys, _ in self.sparse.values()) and not any(b.any() for b in self.dense.values())


@dataclass(frozen=True)
class Gathering:
    """Updates with the mean of `num` pushes, in which gradients of the network with a staleness above `max_staleness`
    updates have no part. `samples`: what they are weighted by; None: they count alike."""

    num: int
    max_staleness: int
    samples: SampleCount | None = None

    @property
    def settings(self) -> tuple[int, int]:
        return self.num, self.max_staleness


class Communicator(ABC):
    """The worker's side of a mode. `pull` and `step` are called from the training thread."""

    pulls_ahead = False
    in_step = False  # pulls are part of steps that all workers make together
    has_threads = False  # several threads are training now
    steps_together = False  # a step of one worker is a step of several
    steps_here = False  # dense parameters are stepped in this process, not by the servers
    takes_threads = True  # several threads of a worker may train at once
    alone: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # held by a thread that hands over a step

    def __init__(
        self, client: Client, plan: Plan, connect: Callable[[], Client], gathering: Gathering | None = None
    ) -> None:
        self._gathering = gathering
        self._samples = gathering.samples if gathering else None
        self._main_client, self._plan, self._new_client = client, plan, connect
        self._others: list[Client] = []  # of training threads and of those that send
        self._past_retries = 0  # of clients that are closed
        self._main_thread = threading.get_ident()
        self._own = threading.local()
        self._count = threading.Lock()
        self._seconds = {"pull": 0.0, "push": 0.0, "dense": 0.0}
        self.num_steps = 0  # that this worker has made so far, of all its threads
        self._versions: dict[str, list[float]] = {}  # of the dense values in the model, as far as they are known

    @property
    def _client(self) -> Client:
        """A client belongs to one thread; a training thread gets one of its own."""
        if threading.get_ident() == self._main_thread:
            return self._main_client
        if not hasattr(self._own, "client"):
            self._own.client = self._connect()
        client: Client = self._own.client
        return client

    def _connect(self) -> Client:
        """A client for another thread, which closes it. Its requests count among those of this worker."""
        client = self._new_client()
        with self._count:
            self._others.append(client)
        return client

    def leave_thread(self) -> None:
        """A training thread has done its work."""
        if hasattr(self._own, "client"):
            client: Client = self._own.client
            client.close()
            del self._own.client
            with self._count:
                self._others.remove(client)
                self._past_retries += client.num_retries

    def freshen(self) -> None:
        """The model is about to be called by this thread: give it the newest dense values that were asked for."""
        self._own.versions = self._versions

    def rest(self) -> None:
        """This worker is going to wait for others, and hands over nothing meanwhile."""
        if self._gathering and threading.get_ident() == self._main_thread:
            self.settle()

    def settle(self) -> None:
        """Return when everything that `step` has been given so far has been applied."""
        if self._gathering:
            self._client.push_tables({}, flags=GATHERED, settings=self._gathering.settings).result()

    def end_threads(self) -> None:
        """Several threads have trained, and are over."""
        self.has_threads = False

    def drop_gradients(self, share: int) -> None:
        """What was computed for an optimizer since its last step is not going to be handed over."""
        if self._samples is not None:
            self._samples.reset(share)

    def skip_step(self, share: int) -> None:
        """A step is made by the other workers alone: this one has no gradients to add."""
        self.drop_gradients(share)

    def start(self) -> None:  # noqa: B027  (most modes have nothing beside training)
        """Begin whatever runs beside training."""

    def pull(self, keys: Mapping[str, Keys], create: bool) -> PullAhead:
        """Rows of several tables, on their way."""
        start = time.perf_counter()
        pull = self._client.pull_tables(keys, create, self.in_step)
        self._seconds["pull"] += time.perf_counter() - start  # in one process, asking is already the work
        return TimedPull(pull, self._seconds)

    def step(self, gradients: Gradients) -> None:
        """One step's gradients are there."""
        start = time.perf_counter()
        with self._count:
            self.num_steps += gradients.share == 0  # one for all optimizers of a loop
        # Those of the thread's last call of the model; another thread may have written newer values since.
        gradients.versions.update(getattr(self._own, "versions", None) or self._versions)
        self._own.versions = None
        if self._samples is not None and not self.has_threads:  # it counts for all threads together
            gradients.num_samples = self._samples.take(gradients.is_nothing, gradients.share)
        self._push(gradients)
        self._seconds["push"] += time.perf_counter() - start

    def flush(self) -> None:
        """Return when everything given to `step` has reached the tables."""
        self._client.flush()
        if self._gathering:
            self.settle()
            self._write(self._pull_dense(self._client))

    def refresh(self) -> None:
        """Flush, and take the dense parameters as the servers have them now: other workers may have gone on."""
        self.flush()
        self._write(self._pull_dense(self._client))

    def stop(self) -> None:
        """Flush, and end whatever runs beside training."""
        self.flush()

    def own_rows(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        """Rows that this worker trains in the place of the servers', some at a time; none in most modes."""
        return iter(())

    def check_loading(self) -> None:  # noqa: B027  (most modes take what is loaded)
        """Raise ModelError if a state cannot be loaded in this mode."""

    def hand_over(self) -> None:
        """Flush, and keep back nothing that this worker has learned."""
        self.flush()

    def begin_anew(self, tables: Collection[str]) -> None:  # noqa: B027  (most modes keep no values of their own)
        """The servers were given other values: the rows of these tables, and all dense values, which the model has."""

    def release(self) -> None:
        """Leave the model as it was: it may be used in another job."""
        if self._samples is not None:
            self._samples.close()

    def stats(self) -> dict[str, Any]:
        """Times in milliseconds per step that the training thread waited."""
        steps = max(1, self.num_steps)
        waits = {f"{name}_wait_ms": 1000 * seconds / steps for name, seconds in self._seconds.items()}
        return {"steps": self.num_steps, **waits, "retries": self._num_retries, "queue": 0}

    @property
    def _num_retries(self) -> int:
        with self._count:
            clients = [self._main_client, *self._others]
            return self._past_retries + sum(client.num_retries for client in clients)

    @abstractmethod
    def _push(self, gradients: Gradients) -> None: ...

    def _submit(self, client: Client, gradients: Gradients, flags: int, timeout: float | None = None) -> Future[Dense]:
        """A push on its way, to be gathered with others where that is asked for."""
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
        """All dense tables, and how many updates each has seen."""
        names = [group.spec.name for group in self._plan.dense]
        return client.pull_dense_tables(names).result() if names else Dense()

    def _write(self, values: Dense) -> None:
        if self.has_threads and _is_older(values.versions, self._versions):
            return  # another thread's reply came in before this one
        versions = dict(self._versions)  # others may be reading it
        for name in values:
            versions.pop(name, None)  # of values that come without one, as in sync mode, it is not known
        self._versions = versions | values.versions
        for group in self._plan.dense:
            if group.spec.name in values:
                group.write(values[group.spec.name], unnoticed=self.has_threads)


def _is_older(versions: Mapping[str, list[float]], others: Mapping[str, list[float]]) -> bool:
    return sum(map(sum, versions.values())) < sum(map(sum, others.values()))


class HalfAsync(Communicator):
    """The push is applied, and this worker's dense parameters are the server's, before training goes on.

    Where updates are gathered, the reply comes when the push is kept.
    """

    _flags = DENSE_BACK | VERSIONS
    _timeout: float | None = None

    def _push(self, gradients: Gradients) -> None:
        values = self._submit(self._client, gradients, self._flags, self._timeout).result()
        if not values and gradients.dense:  # the reply had to be repeated, and a repeat brings no values
            values = self._pull_dense(self._client)
        self._write(values)

    def end_threads(self) -> None:
        super().end_threads()
        self._write(self._pull_dense(self._client))  # a reply may have come in after a later one


class Sync(HalfAsync):
    """As HalfAsync, but the update is made with the mean of all workers' gradients, once all are there: over their
    samples, or over workers."""

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
        """`samples`: what the workers' gradients are weighted by; None: they count alike."""
        super().__init__(client, plan, connect)
        self._timeout, self._samples = timeout, samples
        self.steps_together = num_workers > 1

    def skip_step(self, share: int) -> None:
        super().skip_step(share)
        self._client.push_tables({}, flags=self._flags, timeout=self._timeout).result()
        self._write(self._pull_dense(self._client))
