"""Models workers and servers as queues, without training, for jobs too large to simulate on one machine.

A worker asks all servers at once. A message passes the worker's uplink, the server's downlink, the server, the server's
uplink and the worker's downlink, one after the other. Each of them handles one message at a time. Exchanges are
computed in the order in which they begin.
"""

from __future__ import annotations

import heapq
from bisect import bisect, insort
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchfleet.base.network_links import Link
from torchfleet.launch.simulate.conditions import lognormal_deviation

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Round:
    """A request of one worker to all servers: bytes to and from each server, and the service time of each."""

    sent: float
    received: float
    service: float


@dataclass(frozen=True)
class StepModel:
    """A step: pull, compute, push, in one of the modes of a job."""

    pull: Round
    push: Round
    compute: Times  # seconds, by worker, on average
    steps_per_pull: int = 1
    steps_per_push: int = 1
    is_joint: bool = False  # synchronous: the servers apply one step of all workers together
    pulls_ahead: bool = False  # the rows of the next batch are pulled before this batch is computed
    pushes_beside: bool = False  # training continues during a push
    queue_size: int = 1  # with pushes_beside: pushes that may be queued
    reduce_seconds: float = 0.0  # seconds of the all-reduce at the end of a step
    jitter: float = 0.0  # standard deviation of the computing time of a step, over its mean
    seed: int = 0

    def computed(self, num_steps: int) -> Times:
        """Return the seconds that each worker computes for each step, by step and worker."""
        shape, deviation = (num_steps, self.num_workers), lognormal_deviation(self.jitter)
        if not self.jitter:
            return np.broadcast_to(self.compute, shape)
        return self.compute * np.random.default_rng(self.seed).lognormal(-(deviation**2) / 2, deviation, shape)

    @property
    def num_workers(self) -> int:
        return len(self.compute)


@dataclass
class Queues:
    """The links and servers, each with the time when it is free again. Each handles one message at a time."""

    link: Link
    num_workers: int
    num_servers: int
    applied: list[float] = field(default_factory=list)  # times when server 0 applied a push

    def __post_init__(self) -> None:
        self._out, self._in = np.zeros(self.num_workers), np.zeros(self.num_workers)
        self._server_in, self._server_out = np.zeros(self.num_servers), np.zeros(self.num_servers)
        self._server: Times = np.zeros(self.num_servers)
        self._order = np.arange(self.num_servers, dtype=np.float64)
        self.busy = 0.0  # busy seconds of each server

    def ask(self, worker: int, time: float, what: Round) -> tuple[Times, float]:
        """Return when each server has served this worker, and when the last reply has arrived."""
        served = self.send(worker, time, what)
        return served, self.reply(worker, served, what)

    def send(self, worker: int, time: float, what: Round) -> Times:
        """Return when each server has served this worker's request."""
        seconds = what.sent / self.link.bytes_per_second
        begun = max(time, self._out[worker])
        self._out[worker] = begun + self.num_servers * seconds
        here = np.maximum(begun + self._order * seconds + self.link.latency, self._server_in) + seconds
        self._server_in = here
        self._server = np.maximum(here, self._server) + what.service
        self.busy += what.service
        return self._server

    def reply(self, worker: int, ready: Times, what: Round) -> float:
        """Return when the last reply arrives, given the times when the servers have them ready."""
        seconds = what.received / self.link.bytes_per_second
        begun = np.maximum(ready, self._server_out)
        self._server_out = begun + seconds
        here = np.sort(begun + self.link.latency)
        here[0] = max(here[0], self._in[worker])
        end = float(np.max(here - self._order * seconds) + self.num_servers * seconds)
        self._in[worker] = end
        return end


@dataclass
class Prediction:
    """The forecast of the queue model for a job."""

    steps_per_s: float
    pull_wait: float  # shares of the workers' time
    push_wait: float
    reduce_wait: float
    server_busy: float
    staleness: float  # updates of other workers between a pull and its push


def predict(model: StepModel, link: Link, num_servers: int, num_steps: int, num_warm: int) -> Prediction:
    """Return the rates of steps `num_warm` to `num_steps` of all workers. Queues have not built up in the first
    steps."""
    queues = Queues(link, model.num_workers, num_servers)
    record = _Record(model.num_workers)
    run = _run_joint if model.is_joint else _run_ranks if model.reduce_seconds else _run_apart
    run(model, queues, record, num_steps)
    return record.prediction(queues, num_warm)


class _Record:
    """Ends of steps, waits, and staleness of rows, by worker."""

    def __init__(self, num_workers: int) -> None:
        self.ends: list[list[float]] = [[] for _ in range(num_workers)]
        self._waits: list[list[tuple[float, float, float]]] = [[] for _ in range(num_workers)]
        self.ages: list[int] = []

    def note(self, worker: int, end: float, pull: float, push: float, reduce: float = 0.0) -> None:
        self.ends[worker].append(float(end))
        self._waits[worker].append((float(pull), float(push), float(reduce)))

    def prediction(self, queues: Queues, num_warm: int) -> Prediction:
        spans = [ends[-1] - ends[num_warm - 1] for ends in self.ends]
        rate = sum((len(ends) - num_warm) / span for ends, span in zip(self.ends, spans, strict=True))
        waits = [wait for waits in self._waits for wait in waits[num_warm:]]
        pull, push, reduce = (sum(column) / sum(spans) for column in zip(*waits, strict=True))
        last = max(ends[-1] for ends in self.ends)
        ages = self.ages[len(self.ages) // 2 :]
        age = sum(ages) / max(1, len(ages))
        return Prediction(rate, pull, push, reduce, min(1.0, queues.busy / last), age)


def _run_joint(model: StepModel, queues: Queues, record: _Record, num_steps: int) -> None:
    """Run synchronous steps: no worker begins its next step before all pushes have arrived."""
    begin = np.zeros(model.num_workers)
    for computed in model.computed(num_steps):
        rows = np.empty(model.num_workers)
        for worker in np.argsort(begin):
            rows[worker] = queues.ask(worker, begin[worker], model.pull)[1]
        ends = rows + computed
        ready = np.zeros(queues.num_servers)
        for worker in np.argsort(ends):
            ready = np.maximum(ready, queues.send(worker, ends[worker], model.push))
        for worker in range(model.num_workers):
            back = queues.reply(worker, ready, model.push)
            record.note(worker, back, rows[worker] - begin[worker], back - ends[worker])
            begin[worker] = back
        record.ages.append(0)


def _run_ranks(model: StepModel, queues: Queues, record: _Record, num_steps: int) -> None:
    """Run workers that are also ranks of torch.distributed: servers update rows in the background, ranks all-reduce the
    other gradients."""
    num = model.num_workers
    served = [queues.ask(worker, 0.0, model.pull) for worker in range(num)]
    seen, begin = [float(times[0]) for times, _ in served], np.array([back for _, back in served])
    sent: list[list[float]] = [[0.0] for _ in range(num)]
    for computed in model.computed(num_steps):
        pulled, rows, order = list(seen), np.empty(num), np.argsort(begin)
        for worker in order:
            times, rows[worker] = queues.ask(worker, begin[worker], model.pull)
            seen[worker] = float(times[0])
        ends = begin + computed
        end = float(np.max(ends)) + model.reduce_seconds
        for worker in order:
            times, back = queues.ask(worker, max(end, sent[worker][-1]), model.push)
            sent[worker].append(back)
            record.ages.append(_age(queues.applied, pulled[worker], float(times[0])))
            room = max(end, sent[worker][max(0, len(sent[worker]) - 1 - model.queue_size)])
            begin[worker] = max(room, rows[worker])
            record.note(worker, begin[worker], begin[worker] - room, room - end, end - ends[worker])


Asking = Generator[tuple[float, bool], tuple[Times, float], None]  # yields (time, whether it is a push)


def _run_apart(model: StepModel, queues: Queues, record: _Record, num_steps: int) -> None:
    """Run steps of workers that do not wait for each other."""
    computed = model.computed(num_steps)
    live = [_worker(model, queues, record, worker, computed[:, worker]) for worker in range(model.num_workers)]
    waiting = [(*next(asking), worker) for worker, asking in enumerate(live)]
    heapq.heapify(waiting)
    while waiting:
        time, is_push, worker = heapq.heappop(waiting)
        found = queues.ask(worker, time, model.push if is_push else model.pull)
        try:
            heapq.heappush(waiting, (*live[worker].send(found), worker))
        except StopIteration:
            continue


def _worker(model: StepModel, queues: Queues, record: _Record, worker: int, computed: Times) -> Asking:
    """Yield the requests of one worker. Each `yield` returns the times when each server has served the request and
    when the last reply arrives."""
    served, rows = yield (
        worker * float(model.compute[worker]) / model.num_workers,
        False,
    )  # workers start at different times
    seen, now, sent = float(served[0]), rows, [0.0]
    for step, compute in enumerate(computed.tolist()):
        begun, pulled = now, seen
        is_pulled = (step + 1) % model.steps_per_pull == 0
        if model.pulls_ahead and is_pulled:
            served, rows = yield begun, False
            seen = float(served[0])
        end_push = end = begun + compute
        if (step + 1) % model.steps_per_push == 0:
            begin_push = max(end, sent[-1]) if model.pushes_beside else end
            served, back = yield begin_push, True
            record.ages.append(_age(queues.applied, pulled, float(served[0])))
            sent.append(back)
            # In the background: training continues when the queue has room, that is, after an earlier push was taken.
            room = sent[max(0, len(sent) - 1 - model.queue_size)]
            end_push = max(end, room) if model.pushes_beside else back
        if not model.pulls_ahead and is_pulled:
            served, rows = yield end_push, False
            seen = float(served[0])
        now = max(end_push, rows)
        record.note(worker, now, now - end_push, end_push - end)


def _age(applied: list[float], pulled: float, pushed: float) -> int:
    """Return the staleness of rows: the number of pushes applied between their pull and this push."""
    age = bisect(applied, pushed) - bisect(applied, pulled)
    insort(applied, pushed)
    return age
