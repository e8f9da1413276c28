"""KafkaSource: parts of a Kafka topic as ranges of offsets. The offsets are saved with the model."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import msgspec

from torchfleet.apps.online.kafka_reader import KafkaReader
from torchfleet.apps.online.parts import Part, day_and_hour
from torchfleet.apps.online.ranges import OffsetRange, cut, share
from torchfleet.base.errors import DataError
from torchfleet.base.extras import required
from torchfleet.base.prepared_types import prepared


class KafkaPosition(msgspec.Struct, frozen=True):
    """Where the next part begins. Stored with the model."""

    offsets: dict[str, int]  # by partition
    number: int = 0  # parts so far
    time: float = 0.0  # of the last part: time never decreases


class KafkaSource:
    """Parts of `messages_per_part` messages of a topic; one message is one line of text.

    A part is a range of offsets per partition. It is complete when enough messages are there, or `max_wait` seconds
    after its first message was seen. Its hour is the time of the earliest of the first messages of its ranges. Every
    worker reads its own share of the ranges, into a temporary file (below `folder`, if given) that `done` removes. The
    offsets are saved with the model; nothing is committed to the brokers.

    start     where to begin when nothing has been trained yet: "earliest" or "latest"
    timeout   seconds without a response after which a request to the brokers fails
    config    further settings of confluent_kafka.Consumer: security, fetch sizes
    """

    def __init__(
        self,
        topic: str,
        servers: str,
        messages_per_part: int = 1_000_000,
        *,
        max_wait: float = 3600.0,
        start: str = "earliest",
        folder: str | None = None,
        timeout: float = 30.0,
        config: dict[str, Any] | None = None,
    ) -> None:
        if type(messages_per_part) is not int or messages_per_part < 1:
            raise DataError(f"messages_per_part: expected a number of at least 1, found {messages_per_part!r}")
        if start not in ("earliest", "latest"):
            raise DataError(f"KafkaSource(start=...): expected 'earliest' or 'latest', found {start!r}")
        self._topic, self._num, self._max_wait, self._start = topic, messages_per_part, max_wait, start
        self._kafka = required("confluent_kafka", "KafkaSource", "kafka")
        self._reader = KafkaReader(self._kafka, topic, servers, timeout, config or {})
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._first: dict[int, int] = {}  # by partition: the offset to begin with, when nothing has been trained yet
        self._lost: dict[int, int] = {}  # by partition: the offset whose loss has been reported
        self._seen: tuple[Any, float] | None = None  # position, and when the first message after it was seen

    def next(self, position: Any) -> Part | None:
        known = msgspec.convert(position, prepared(KafkaPosition)) if position else None
        available = self._available(known)
        num = sum(map(len, available))
        if num < self._num and not self._has_waited(position, num):
            return None
        ranges = cut(available, self._num)
        stops = {taken.partition: taken.stop for taken in ranges}
        offsets = {str(left.partition): stops.get(left.partition, left.start) for left in available}
        last = known or KafkaPosition({})
        moment = max(last.time, self._reader.first_time(ranges) or last.time or time.time())
        following = KafkaPosition(offsets, last.number + 1, moment)
        day, hour = day_and_hour(moment)
        name = f"{day}/{hour:02}-{following.number:06}"
        return Part(name, moment, day, hour, msgspec.to_builtins(following), detail=msgspec.to_builtins(ranges))

    def is_over(self, position: Any) -> bool:
        return False

    def files_of(self, part: Part, worker: int, num_workers: int) -> list[str]:
        """Read the messages of this worker's share into a file, one per line."""
        own = share(msgspec.convert(part.detail, prepared(list[OffsetRange])), worker, num_workers)
        if not own:
            return []
        path = os.path.join(self._own_folder(), f"{part.name.replace('/', '-')}-{worker}-of-{num_workers}.txt")
        with open(path, "wb") as file:
            for value in self._reader.values(own):
                file.write(value if value.endswith(b"\n") else value + b"\n")
        return [path]

    def done(self, part: Part) -> None:
        for name in os.listdir(self._own_folder()):
            os.remove(os.path.join(self._own_folder(), name))

    def close(self) -> None:
        """Close the connection to the brokers, and remove the temporary files."""
        self._reader.close()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _available(self, known: KafkaPosition | None) -> list[OffsetRange]:
        """By partition: the offsets that the brokers have and that were not trained yet."""
        found = []
        for partition, low, high in self._reader.partitions():
            if known is not None:  # a new partition is read from its beginning
                start = known.offsets.get(str(partition), low)
            else:
                start = self._first.setdefault(partition, low if self._start == "earliest" else high)
            if start > high:
                raise DataError(
                    f"topic {self._topic}, partition {partition}: offset {start:,} comes next, but the partition ends "
                    f"at {high:,}. Is this the topic that the model was trained on, or was it made anew?"
                )
            if start < low and self._lost.get(partition) != start:
                self._lost[partition] = start
                self._report_lost(partition, start, low)
            found.append(OffsetRange(partition, max(start, low), high))
        return found

    def _report_lost(self, partition: int, start: int, low: int) -> None:
        print(
            f"topic {self._topic}, partition {partition}: offsets {start:,} up to {low:,} were deleted before they "
            "were read, and are skipped. Increase the retention of the topic (time or size).",
            file=sys.stderr,
            flush=True,
        )

    def _has_waited(self, position: Any, num: int) -> bool:
        """Whether there are messages after `position`, and they were first seen at least max_wait seconds ago."""
        now = time.monotonic()
        if not num:
            self._seen = None
        elif self._seen is None or self._seen[0] != position:
            self._seen = position, now
        return self._seen is not None and now - self._seen[1] >= self._max_wait

    def _own_folder(self) -> str:
        """A temporary folder for this process."""
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="torchfleet-kafka-", dir=self._folder)
        return self._temporary.name
