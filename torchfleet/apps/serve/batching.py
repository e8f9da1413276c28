"""Concurrent requests as one batch: one lookup and one pass of the network for all that arrive within a short time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from torchfleet.apps.serve.queue_bounds import QueueBounds
from torchfleet.apps.serve.samples import Samples
from torchfleet.apps.serve.serving_metrics import ServingMetrics

Compute = Callable[[Sequence[Samples]], list[Any]]  # a result or an exception for each request


class QueueFull(Exception):
    """Too many samples are waiting, or too many seconds of work."""


class TookTooLong(Exception):
    """A request was not computed in time."""


class Receiver(Protocol):
    """Receives the result of one request."""

    def is_waiting(self) -> bool:
        """False once the client is gone: then the result is not computed."""
        ...

    def receive(self, result: Any) -> None:
        """Called once, in the event loop, with the result or an exception."""
        ...


@dataclass
class Waiting:
    """A request in the queue."""

    samples: Samples
    arrived: float
    receiver: Receiver


class _FutureReceiver:
    """Gives the result to a future."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self._answer = answer

    def is_waiting(self) -> bool:
        return not self._answer.done()

    def receive(self, result: Any) -> None:
        if isinstance(result, Exception):
            self._answer.set_exception(result)
        else:
            self._answer.set_result(result)


class Batcher:
    """Computes in the event loop's own thread: with a second one, each operation of torch would wait for Python's lock.

    With `in_thread` another thread computes while the event loop goes on: for tables on other machines.
    """

    def __init__(
        self,
        compute: Compute,
        wait: float,
        max_batch: int,
        bounds: QueueBounds,
        timeout: float,
        metrics: ServingMetrics,
        in_thread: bool = False,
    ) -> None:
        """`wait`: seconds that the first request of a batch waits for others. `max_batch`: samples. `timeout`: seconds
        after which a request is not computed any more.
        """
        self._compute, self._wait, self._max_batch, self._bounds = compute, wait, max_batch, bounds
        self._timeout, self._metrics = timeout, metrics
        self._queue: deque[Waiting] = deque()
        self._num_waiting = 0
        self.num_coming = 0  # samples of requests that are being decoded, about
        self._ended = 0.0  # when the last batch was computed
        self._timer: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(1, "predict") if in_thread else None
        self._is_busy = False

    def has_room(self, num: int) -> bool:
        """Whether a request of `num` samples may wait now."""
        return self._bounds.has_room(self._num_waiting + self.num_coming, num)

    def submit(self, samples: Samples) -> asyncio.Future[Any]:
        """The future of a result, with its version. Raises QueueFull."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.submit_for(samples, _FutureReceiver(answer))
        return answer

    def submit_for(self, samples: Samples, receiver: Receiver) -> None:
        """Like submit, but for a receiver, since a future and its callbacks take longer. Raises QueueFull."""
        if self._num_waiting and not self._bounds.has_room(self._num_waiting, samples.num):
            raise QueueFull
        loop = asyncio.get_running_loop()
        self._queue.append(Waiting(samples, time.monotonic(), receiver))
        self._num_waiting += samples.num
        self._metrics.queue(self._num_waiting)
        if self._timer is None and not self._is_busy:
            is_full = self._num_waiting >= self._max_batch
            self._timer = loop.call_later(0 if is_full else self._wait, self._begin)
        elif self._num_waiting >= self._max_batch and not self._is_busy and self._timer is not None:
            self._timer.cancel()
            self._timer = loop.call_soon(self._begin)  # type: ignore[assignment]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        """Compute a batch of the requests that wait."""
        self._timer = None
        batch = self._take()
        if not batch:
            return
        requests = [waiting.samples for waiting in batch]
        due = min(time.monotonic(), batch[0].arrived + self._wait)
        began = max(self._ended, due)  # what else the loop does while requests wait counts, too
        if self._thread is None:
            self._end(batch, self._compute(requests), began)
            return
        self._is_busy = True
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, self._compute, requests)
        done.add_done_callback(lambda future: self._end(batch, future.result(), began))

    def _take(self) -> list[Waiting]:
        """The oldest requests, as many as fit into a batch. Requests that have waited too long are not taken."""
        taken: list[Waiting] = []
        num, oldest = 0, time.monotonic() - self._timeout
        while self._queue and (not taken or num + self._queue[0].samples.num <= self._max_batch):
            if taken and self._queue[0].samples.decoded_by is not taken[0].samples.decoded_by:
                break  # another model answers it, in the next batch
            waiting = self._queue.popleft()
            self._num_waiting -= waiting.samples.num
            if not waiting.receiver.is_waiting():
                continue
            if waiting.arrived < oldest:
                _deliver(waiting.receiver, TookTooLong())
            else:
                taken.append(waiting)
                num += waiting.samples.num
        self._metrics.queue(self._num_waiting)
        if taken:
            self._metrics.batch(num)
        return taken

    def _end(self, batch: Sequence[Waiting], results: Sequence[Any], began: float) -> None:
        self._is_busy, self._ended = False, time.monotonic()
        self._bounds.note_batch(sum([waiting.samples.num for waiting in batch]), self._ended - began)
        for waiting, result in zip(batch, results, strict=True):
            if waiting.receiver.is_waiting():
                _deliver(waiting.receiver, result)
        if self._queue and self._timer is None:
            age = time.monotonic() - self._queue[0].arrived
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self._wait - age), self._begin)


def _deliver(receiver: Receiver, result: Any) -> None:
    """A receiver that fails must not prevent the answers to the others."""
    try:
        receiver.receive(result)
    except Exception as error:
        context = {"message": "an answer could not be sent", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
