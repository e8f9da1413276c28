"""Requests that come at one time are computed as one batch; bounds hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from torchfleet.apps.serve.batching import Batcher, QueueFull, TookTooLong
from torchfleet.apps.serve.queue_bounds import QueueBounds
from torchfleet.apps.serve.samples import Samples
from torchfleet.apps.serve.serving_metrics import ServingMetrics


class Doubled:
    """Computes twice a request's number of samples, and notes the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, requests: Sequence[Samples]) -> list[Any]:
        self.batches.append([request.num for request in requests])
        return [ValueError("7") if request.num == 7 else 2 * request.num for request in requests]


def batcher(compute: Doubled, wait: float = 0.0, in_thread: bool = False, timeout: float = 3600.0) -> Batcher:
    return Batcher(compute, wait, 8, QueueBounds(8, 18, 3600.0), timeout, ServingMetrics(None, 0, 1), in_thread)


@pytest.mark.parametrize("in_thread", [False, True])
def test_concurrent_requests_are_one_batch(in_thread: bool) -> None:
    compute = Doubled()

    async def run() -> list[Any]:
        made = batcher(compute, in_thread=in_thread)
        return await asyncio.gather(*(made.submit(Samples(num, {})) for num in (1, 2, 3)))

    assert asyncio.run(run()) == [2, 4, 6]
    assert compute.batches == [[1, 2, 3]]


def test_a_full_batch_does_not_wait() -> None:
    compute = Doubled()

    async def run() -> list[Any]:
        made = batcher(compute, wait=3600)
        return await asyncio.wait_for(asyncio.gather(*(made.submit(Samples(4, {})) for _ in range(2))), 30)

    assert asyncio.run(run()) == [8, 8]


def test_what_does_not_fit_is_the_next_batch() -> None:
    compute = Doubled()

    async def run() -> list[Any]:
        made = batcher(compute)
        return await asyncio.gather(*(made.submit(Samples(num, {})) for num in (5, 3, 1, 6)))

    assert asyncio.run(run()) == [10, 6, 2, 12]
    assert compute.batches == [[5, 3], [1, 6]]


def test_a_full_queue_refuses_at_once() -> None:
    compute = Doubled()

    async def run() -> Any:
        made = batcher(compute)
        first = [made.submit(Samples(num, {})) for num in (8, 8, 1, 1)]
        with pytest.raises(QueueFull):
            made.submit(Samples(1, {}))
        await asyncio.gather(*first)
        return await made.submit(Samples(1, {}))

    assert asyncio.run(run()) == 2


def test_an_eighth_of_the_queue_is_for_small_requests() -> None:
    bounds = QueueBounds(1024, 8192, 1.0)
    assert bounds.has_room(0, 1024)
    assert bounds.has_room(7168 - 1024, 1024)
    assert not bounds.has_room(7168 - 1023, 1024)
    assert bounds.has_room(8192 - 16, 16)
    assert not bounds.has_room(8192 - 15, 16)


def test_the_queue_is_bounded_in_seconds_by_the_speed_of_the_last_batches() -> None:
    bounds = QueueBounds(1024, 8192, 1.0)
    assert bounds.has_room(7000, 128)
    for _ in range(100):
        bounds.note_batch(100, 0.2)  # 2 ms for each sample: 500 are a second's work
    assert bounds.has_room(430, 64)
    assert not bounds.has_room(445, 64)
    assert bounds.has_room(490, 1)
    assert not bounds.has_room(510, 1)
    assert bounds.has_room(0, 1024)  # nothing waits
    for _ in range(100):
        bounds.note_batch(100, 0.01)
    assert bounds.has_room(7000, 128)


def test_one_long_pause_hardly_changes_the_bound() -> None:
    bounds = QueueBounds(1024, 8192, 1.0)
    for _ in range(100):
        bounds.note_batch(4, 0.002)
    bounds.note_batch(4, 60.0)
    assert bounds.has_room(100, 32)
    slow = QueueBounds(1024, 8192, 1.0)
    slow.note_batch(1, 60.0)
    assert slow.has_room(20, 4)
    assert not slow.has_room(40, 4)


def test_the_samples_of_a_request_are_known_by_its_size() -> None:
    bounds = QueueBounds(1024, 8192, 1.0)
    assert bounds.samples_of(1 << 20) == 1
    for _ in range(100):
        bounds.note_size(3000, 10)
    assert bounds.samples_of(6000) in (19, 20)
    assert bounds.samples_of(10) == 1
    assert bounds.samples_of(1 << 30) == 1024


def test_an_error_is_that_of_its_request() -> None:
    async def run() -> list[Any]:
        made = batcher(Doubled())
        return await asyncio.gather(made.submit(Samples(1, {})), made.submit(Samples(7, {})), return_exceptions=True)

    good, bad = asyncio.run(run())
    assert good == 2
    assert isinstance(bad, ValueError)


def test_a_request_that_has_waited_too_long_is_not_computed() -> None:
    compute = Doubled()

    async def run() -> Any:
        return await batcher(compute, timeout=-1.0).submit(Samples(1, {}))

    with pytest.raises(TookTooLong):
        asyncio.run(run())
    assert compute.batches == []


def test_requests_that_were_given_up_are_not_computed() -> None:
    compute = Doubled()

    async def run() -> Any:
        made = batcher(compute)
        made.submit(Samples(3, {})).cancel()
        return await made.submit(Samples(2, {}))

    assert asyncio.run(run()) == 4
    assert compute.batches == [[2]]


def test_a_receiver_that_fails_keeps_no_other_waiting() -> None:
    class Failing:
        def is_waiting(self) -> bool:
            return True

        def receive(self, result: Any) -> None:
            raise OSError("no space left")

    async def run() -> Any:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        made = batcher(Doubled())
        made.submit_for(Samples(1, {}), Failing())
        answer = await made.submit(Samples(2, {}))
        return answer, told, await made.submit(Samples(3, {}))

    answer, told, later = asyncio.run(run())
    assert [type(error) for error in told] == [OSError]
    assert (answer, later) == (4, 6)


def test_metrics_of_all_processes_are_summed(tmp_path: Any) -> None:
    path = str(tmp_path / "metrics")
    ServingMetrics.create(path, 2)
    first, second = ServingMetrics(path, 0, 2), ServingMetrics(path, 1, 2)
    for metrics, status in ((first, 200), (first, 400), (second, 200), (second, 503), (second, 500)):
        metrics.request(status, 0.004)
    first.batch(3)
    second.version(7, 1.0)
    text = ServingMetrics(path, 0, 2).exposition().decode()
    assert 'torchfleet_serve_requests_total{outcome="ok"} 2.0' in text
    assert 'torchfleet_serve_requests_total{outcome="busy"} 1.0' in text
    assert 'torchfleet_serve_request_seconds_bucket{le="0.005"} 2.0' in text
    assert "torchfleet_serve_samples_total 3.0" in text
    assert 'torchfleet_serve_model_version{process="1"} 7.0' in text
