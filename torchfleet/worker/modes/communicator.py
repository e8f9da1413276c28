"""When gradients travel and when values come back: one small class per mode behind one interface.

sync        one update per step with the mean gradient of all workers' samples; everybody waits for it
half_async  this worker's update, waited for; nobody waits for anybody else
async       (asynchronous.py) gradients go into a queue, a thread sends them, training goes on
geo         (geo.py, whole_tables.py) training on a local copy, differences exchanged now and then
hybrid      (hybrid.py) as async for rows; the network is exchanged among the workers
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchfleet.net.wire import DENSE_BACK, SYNC
from torchfleet.worker.client.client import Client
from torchfleet.worker.client.future import Dense
from torchfleet.worker.client.shard import Floats, Keys
from torchfleet.worker.lookup.plan import Plan
from torchfleet.worker.lookup.sample_count import SampleCount
from torchfleet.worker.lookup.sources import PullAhead


@dataclass(slots=True)
class Gradients:
    """What one step leaves to be pushed."""

    sparse: dict[str, tuple[Keys, Floats]]
    versions: dict[str, list[float]]
    dense: dict[str, Floats]
    rates: dict[str, float]

    def sections(self) -> Mapping[str, tuple[Keys, Floats] | Floats]:
        return {**self.dense, **self.sparse}

    def is_nothing(self) -> bool:
        """Whether no sample had a part in it."""
        return not any(len(keys) for keys, _ in self.sparse.values()) and not any(b.any() for b in self.dense.values())


class Communicator(ABC):
    """The worker's side of a mode. `pull` and `step` are called from the training thread."""

    pulls_ahead = False
    in_step = False  # pulls are part of steps that all workers make together
    has_threads = False  # several threads are training now
    steps_here = False  # dense parameters are stepped in this process, not by the servers
    takes_threads = True  # several threads of a worker may train at once
    alone: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # held by a thread that hands over a step

    def __init__(self, client: Client, plan: Plan, connect: Callable[[], Client]) -> None:
        self._main_client, self._plan, self._connect = client, plan, connect
        self._main_thread = threading.get_ident()
        self._own = threading.local()
        self._count = threading.Lock()
        self._seconds = {"pull": 0.0, "push": 0.0}
        self._num_steps = 0

    @property
    def _client(self) -> Client:
        """A client belongs to one thread; a training thread gets one of its own."""
        if threading.get_ident() == self._main_thread:
            return self._main_client
        if not hasattr(self._own, "client"):
            self._own.client = self._connect()
        client: Client = self._own.client
        return client

    @property
    def num_steps(self) -> int:
        """Steps that this worker has made so far, of all its threads."""
        return self._num_steps

    def leave_thread(self) -> None:
        """A training thread has done its work."""
        if hasattr(self._own, "client"):
            self._own.client.close()
            del self._own.client

    def settle(self) -> None:  # noqa: B027  (most modes wait for every push as it is made)
        """Return when everything that `step` has been given so far has been applied."""

    def end_threads(self) -> None:
        """Several threads have trained, and are over."""
        self.has_threads = False

    def drop_gradients(self) -> None:  # noqa: B027  (most modes know nothing of gradients that are not handed over)
        """What was computed since the last step is not going to be handed over."""

    def start(self) -> None:  # noqa: B027  (most modes have nothing beside training)
        """Begin whatever runs beside training."""

    def pull(self, keys: Mapping[str, Keys], create: bool) -> PullAhead:
        """Rows of several tables, on their way."""
        start = time.perf_counter()
        pull = TimedPull(self._client.pull_tables(keys, create, self.in_step), self._note_pull)
        self._note_pull(time.perf_counter() - start)  # in one process, asking is already the work
        return pull

    def step(self, gradients: Gradients) -> None:
        """One step's gradients are there."""
        start = time.perf_counter()
        with self._count:
            self._num_steps += 1
        self._push(gradients)
        self._seconds["push"] += time.perf_counter() - start

    def flush(self) -> None:
        """Return when everything given to `step` has reached the tables."""
        self._client.flush()

    def refresh(self) -> None:
        """Flush, and take the dense parameters as the servers have them now: other workers may have gone on."""
        self.flush()
        self._write(self._pull_dense(self._client))

    def stop(self) -> None:
        """Flush, and end whatever runs beside training."""
        self.flush()

    def stats(self) -> dict[str, Any]:
        """Times in milliseconds per step that the training thread waited."""
        steps = max(1, self._num_steps)
        waits = {f"{name}_wait_ms": 1000 * seconds / steps for name, seconds in self._seconds.items()}
        return {"steps": self._num_steps, **waits, "retries": self._main_client.num_retries, "queue": 0}

    @abstractmethod
    def _push(self, gradients: Gradients) -> None: ...

    def _pull_dense(self, client: Client) -> Dense:
        """All dense tables; asked for together, then awaited."""
        under_way = {group.spec.name: client.pull_dense(group.spec.name) for group in self._plan.dense}
        return {name: values.result() for name, values in under_way.items()}

    def _write(self, values: Dense) -> None:
        for group in self._plan.dense:
            if group.spec.name in values:
                group.write(values[group.spec.name], unnoticed=self.has_threads)

    def _note_pull(self, seconds: float) -> None:
        self._seconds["pull"] += seconds


class TimedPull:
    """A pull whose waiting time is noted."""

    def __init__(self, pull: PullAhead, note: Callable[[float], None]) -> None:
        self._pull, self._note = pull, note

    def result(self) -> Any:
        start = time.perf_counter()
        pulled = self._pull.result()
        self._note(time.perf_counter() - start)
        return pulled


class HalfAsync(Communicator):
    """The push is applied, and this worker's dense parameters are the server's, before training goes on."""

    _flags = DENSE_BACK
    _timeout: float | None = None

    def _push(self, gradients: Gradients) -> None:
        values = self._client.push_tables(
            gradients.sections(),
            gradients.rates,
            gradients.versions,
            self._flags,
            self._timeout,
            self._num_samples(gradients),
        ).result()
        if not values:  # the reply had to be repeated, and a repeat brings no values
            values = self._pull_dense(self._client)
        self._write(values)

    def _num_samples(self, gradients: Gradients) -> float | None:
        """What these gradients count for beside those of other workers; None: alike."""
        return None

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
        samples: SampleCount | None = None,
    ) -> None:
        """`samples`: what the workers' gradients are weighted by; None: they count alike."""
        super().__init__(client, plan, connect)
        self._timeout, self._samples = timeout, samples

    def drop_gradients(self) -> None:
        if self._samples is not None:
            self._samples.reset()

    def _num_samples(self, gradients: Gradients) -> float | None:
        return None if self._samples is None else self._samples.take(gradients.is_nothing)
