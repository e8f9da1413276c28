"""What every protocol of `fleet serve` shares: a request is batched, computed, and answered or refused."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy.typing as npt

from torchfleet.apps.serve.batching import Batcher, QueueFull, Receiver, TookTooLong
from torchfleet.apps.serve.endpoints.inference_protocol import InferenceProtocol, InferRequest
from torchfleet.apps.serve.predictor import Predictor, WrongRequest
from torchfleet.apps.serve.queue_bounds import QueueBounds
from torchfleet.apps.serve.samples import Samples
from torchfleet.apps.serve.served_model import ServedModel
from torchfleet.apps.serve.serving_metrics import MAX_TABLES, ServingMetrics
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.errors import DataError, ServerUnreachable

_LOOK = 0.1  # seconds between two looks for another version
LARGE = 1 << 18  # bytes of a request that another thread decodes
_LATER = ((b"retry-after", b"1"),)

T = TypeVar("T")


class Refusal(Exception):
    """An answer with an error in place of predictions. `status` and `headers`: of HTTP."""

    def __init__(self, status: int, text: str, headers: tuple[tuple[bytes, bytes], ...] = (), close: bool = False):
        super().__init__(text)
        self.status, self.text = status, text
        self.headers = (*headers, (b"connection", b"close")) if close else headers


class Inference:
    """One model in one event loop. Requests of all protocols share its batches."""

    def __init__(self, model: ServedModel, settings: ServeSettings, metrics: ServingMetrics) -> None:
        self.model, self._metrics, self._timeout = model, metrics, settings.timeout_s
        self.is_ending = False  # this process was told to end, and answers what still comes
        metrics.tables = sorted(model.version.tables)[:MAX_TABLES]
        self._max_body = settings.max_body
        max_seconds = min(settings.max_queue_s, settings.timeout_s)
        self._bounds = QueueBounds(settings.max_batch, settings.max_queue, max_seconds)
        self._decoding = ThreadPoolExecutor(1, "decode")  # its thread begins with the first large request
        self._batcher = Batcher(
            self._predicted,
            settings.batch_wait_ms / 1000,
            settings.max_batch,
            self._bounds,
            settings.timeout_s,
            metrics,
            in_thread=model.is_remote,
        )

    @property
    def is_ready(self) -> bool:
        """Whether requests should be sent to this process."""
        return not self.is_ending and self.model.is_ready

    async def watch(self) -> None:
        """Keep the version that is served in the metrics, and look for the servers of rows, until it is cancelled."""
        while True:
            version = self.model.version
            self._metrics.version(version.number, version.created)
            self.model.look()
            await asyncio.sleep(_LOOK)

    @property
    def protocol(self) -> InferenceProtocol:
        """Of the current version."""
        return self.model.predictor.protocol

    @property
    def max_body(self) -> int:
        """Bytes that a request may have: as the settings say, or what the model's features can need."""
        return min(self._max_body, self.protocol.max_bytes)

    def is_full(self, num_bytes: int) -> bool:
        """Whether a request of this size would be refused now: it need not be read, nor decoded."""
        return not self._batcher.has_room(self._bounds.samples_of(num_bytes))

    def decode(self, body: bytes, json_size: int | None) -> InferRequest:
        """As InferenceProtocol.decode. The model whose features decode it answers it. Raises QueueFull."""
        if self.is_full(len(body)):
            raise QueueFull
        predictor = self.model.predictor
        return self.noted(predictor.protocol.decode(body, json_size), predictor, len(body))

    async def decoded(self, body: bytes, json_size: int | None) -> InferRequest:
        """As decode. Other requests are answered while a large one is decoded."""
        if len(body) <= LARGE:
            return self.decode(body, json_size)
        if self.is_full(len(body)):
            raise QueueFull
        predictor = self.model.predictor
        known = predictor.protocol.known(body, json_size)
        if known is not None:
            return self.noted(known, predictor, len(body))
        request, found = await self.aside(
            functools.partial(predictor.protocol.parsed_large, body, json_size), len(body)
        )
        if json_size is None:
            predictor.protocol.learn(body, request, found)
        return self.noted(request, predictor, len(body))

    async def aside(self, work: Callable[[], T], num_bytes: int) -> T:
        """What `work` returns, computed in the thread that decodes large requests, one at a time."""
        num = self._bounds.samples_of(num_bytes)
        self._batcher.num_coming += num
        try:
            return await asyncio.get_running_loop().run_in_executor(self._decoding, work)
        finally:
            self._batcher.num_coming -= num

    def noted(self, request: InferRequest, predictor: Predictor, num_bytes: int) -> InferRequest:
        """The request, which the predictor that decoded it will answer. Its size says how many samples others have."""
        request.samples.decoded_by = predictor
        self._bounds.note_size(num_bytes, request.samples.num)
        return request

    def close(self) -> None:
        self._decoding.shutdown(wait=False, cancel_futures=True)
        self._batcher.close()

    def check_version(self, asked: str) -> None:
        """Raises Refusal unless `asked` is the version that is served now, or ""."""
        _check_same(asked, str(self.model.version.number))

    async def compute(self, request: InferRequest, version: str) -> tuple[str, Mapping[str, npt.NDArray[Any]]]:
        """(the version that was used, the results). `version`: what the client asked for; "": any. Raises Refusal."""
        used, results = await self._computed(request.samples)
        number = str(used.number)
        _check_same(version, number)
        return number, results

    async def _computed(self, samples: Samples) -> Any:
        try:
            waiting = self._batcher.submit(samples)
            if self.model.is_remote:
                return await asyncio.wait_for(waiting, self._timeout)
            return await waiting
        except Exception as error:
            raise self.refusal_of(error) or error from None

    def submit_for(self, request: InferRequest, receiver: Receiver) -> None:
        """Give the receiver (the version that was used, the results), or an exception: see refusal_of."""
        try:
            self._batcher.submit_for(request.samples, receiver)
        except QueueFull as error:
            receiver.receive(error)

    def refusal_of(self, error: Exception) -> Refusal | None:
        """The refusal to send to the client; None for a bug here or in the network."""
        if isinstance(error, (WrongRequest, DataError)):
            return Refusal(400, str(error))
        if isinstance(error, QueueFull):
            return Refusal(503, "the queue is full: try again later", _LATER)
        if isinstance(error, ServerUnreachable):
            return Refusal(503, "a server of rows does not answer: try again later", _LATER)
        if isinstance(error, (TookTooLong, asyncio.TimeoutError)):
            return Refusal(503, f"no result within {self._timeout:g} seconds", _LATER)
        return error if isinstance(error, Refusal) else None

    def _predicted(self, requests: Sequence[Samples]) -> list[Any]:
        """As Predictor.predict, by what decoded the requests; also puts the figures of its lookups into the metrics."""
        predictor = self.model.predictor_of(requests)
        results: list[Any] = predictor.predict(requests)
        if unknown := predictor.take_unknown_ids():
            self._metrics.unknown_ids(unknown)
        if self.model.is_remote:
            self._metrics.shards(self.model.shard_counts)
        return results


def _check_same(asked: str, number: str) -> None:
    if asked not in ("", number):
        raise Refusal(404, f"version {asked:.40} is not served; version {number} is")
