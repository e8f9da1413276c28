"""Reads given ranges of offsets of a Kafka topic, with a consumer that joins no group and commits nothing."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from torchfleet.apps.online.ranges import OffsetRange
from torchfleet.base.errors import DataError

_AT_ONCE = 10_000  # messages
_PAUSE = 0.02  # seconds that one call waits for messages


class KafkaReader:
    """A consumer of one topic that reads the ranges it is given. Connects on first use."""

    def __init__(self, kafka: Any, topic: str, servers: str, timeout: float, config: dict[str, Any]) -> None:
        self._kafka, self._topic, self._servers, self._timeout = kafka, topic, servers, timeout
        fixed = {
            "bootstrap.servers": servers,
            "group.id": "torchfleet",  # required, but the group is not joined
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
        }
        quick = {"fetch.wait.max.ms": 50}  # no long wait at the end of a partition: the messages exist
        self._config = {**quick, **config, **fixed}
        self._made: Any = None

    def partitions(self) -> list[tuple[int, int, int]]:
        """(partition, first offset, offset after the last) of all partitions."""
        try:
            topic = self._consumer.list_topics(self._topic, timeout=self._timeout).topics[self._topic]
            if topic.error is not None:
                raise DataError(f"topic {self._topic} at {self._servers}: {topic.error.str()}")
            found = []
            for partition in sorted(topic.partitions):
                place = self._kafka.TopicPartition(self._topic, partition)
                low, high = self._consumer.get_watermark_offsets(place, timeout=self._timeout)
                found.append((partition, low, high))
            return found
        except self._kafka.KafkaException as error:
            raise self._failure(str(error)) from None

    def first_time(self, ranges: list[OffsetRange]) -> float | None:
        """The earliest time of the first messages of the ranges; None if these messages have no time."""
        times: list[float] = []
        missing = {offsets.partition for offsets in ranges}
        with closing(self._messages(ranges)) as messages:
            for message in messages:
                kind, milliseconds = message.timestamp()
                if message.partition() in missing and kind != self._kafka.TIMESTAMP_NOT_AVAILABLE:
                    times.append(milliseconds / 1000)
                missing.discard(message.partition())
                if not missing:
                    break
        return min(times, default=None)

    def values(self, ranges: list[OffsetRange]) -> Iterator[bytes]:
        """The values of all messages in the ranges; messages without a value are skipped."""
        for message in self._messages(ranges):
            value = message.value()
            if value is not None:
                yield value

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    def _messages(self, ranges: list[OffsetRange]) -> Generator[Any, None, None]:
        """All messages in the ranges. Does not wait for missing offsets (compacted, aborted): a message after a range,
        or the end of its partition, completes the range.
        """
        stops = {offsets.partition: offsets.stop for offsets in ranges}
        self._consumer.assign(
            [self._kafka.TopicPartition(self._topic, offsets.partition, offsets.start) for offsets in ranges]
        )
        try:
            deadline = time.monotonic() + self._timeout
            while stops:
                batch = self._consumer.consume(_AT_ONCE, timeout=_PAUSE)
                for message in batch:
                    partition = message.partition()
                    stop = stops.get(partition)
                    if stop is None:
                        continue
                    if message.error() is None and message.offset() < stop:
                        yield message
                    if self._position(message) >= stop:
                        del stops[partition]
                        self._consumer.incremental_unassign([self._kafka.TopicPartition(self._topic, partition)])
                if batch:
                    deadline = time.monotonic() + self._timeout
                elif time.monotonic() > deadline:
                    raise self._failure(f"nothing came for {self._timeout:g} s of the offsets before {stops}")
        except self._kafka.KafkaException as error:
            raise self._failure(str(error)) from None
        finally:
            self._consumer.unassign()

    def _position(self, message: Any) -> int:
        """The next offset in the message's partition."""
        error = message.error()
        if error is None:
            return int(message.offset()) + 1
        if error.code() == self._kafka.KafkaError._PARTITION_EOF:
            return int(message.offset())
        raise self._failure(f"partition {message.partition()}, offset {message.offset()}: {error.str()}")

    @property
    def _consumer(self) -> Any:
        if self._made is None:
            self._made = self._kafka.Consumer(self._config)
        return self._made

    def _failure(self, text: str) -> DataError:
        return DataError(f"topic {self._topic} at {self._servers}: {text}")
