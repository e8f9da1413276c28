"""Parts from a Kafka topic: exactly the offsets of their ranges, each in one worker's file, none lost at a restart.

Most of it against the cluster that the client library brings along for tests; what that cannot show (gaps between
offsets, messages that the brokers have dropped, silence) against a stand-in for the library.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from support import jobs
from support.extras import imported, needs
from support.messages import lines_naming, naming
from support.scripts.online_parts import Tiny, step

import torchfleet as fleet
from torchfleet.apps import online
from torchfleet.apps.online import KafkaSource, Part
from torchfleet.apps.online import kafka as kafka_module
from torchfleet.apps.online.ranges import OffsetRange, cut, share
from torchfleet.base.errors import DataError, MissingPackage

NUM_PARTITIONS = 4  # of every topic of the cluster for tests
HOUR = 1_794_726_000  # 2026-11-15, 07:00


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    library = imported("confluent_kafka")
    cluster = library.Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = cluster.list_topics(timeout=10).brokers.values()
    yield f"{broker.host}:{broker.port}"
    del cluster


class Topic:
    """A topic of its own for each test; messages are numbered, and dealt to partitions in turn."""

    _names = itertools.count()

    def __init__(self, servers: str) -> None:
        import confluent_kafka

        self.name, self.servers = f"clicks-{next(self._names)}", servers
        self._producer = confluent_kafka.Producer({"bootstrap.servers": servers, "linger.ms": 0, "log_level": 0})
        self.num = 0

    def write(self, num: int, partition: int | None = None, time: float | None = None) -> None:
        for _ in range(num):
            place = self.num % NUM_PARTITIONS if partition is None else partition
            seconds = HOUR + self.num if time is None else time
            self._producer.produce(self.name, b"1 %d" % self.num, partition=place, timestamp=int(seconds * 1000))
            self.num += 1
        assert self._producer.flush(10) == 0

    def source(self, num: int, **options: Any) -> KafkaSource:
        options = {"max_wait": 1000.0, "timeout": 10.0, "config": {"log_level": 0, "fetch.wait.max.ms": 10}, **options}
        return KafkaSource(self.name, self.servers, num, **options)


@pytest.fixture
def topic(servers: str) -> Topic:
    return Topic(servers)


def kept(position: Any) -> Any:
    """As it comes back from a saved model."""
    return msgspec.json.decode(msgspec.json.encode(position))


def numbers(source: KafkaSource, part: Part, num_workers: int = 1) -> list[list[int]]:
    """The messages of each worker."""
    found = []
    for worker in range(num_workers):
        files = source.files_of(part, worker, num_workers)
        lines = [line for path in files for line in Path(path).read_bytes().splitlines(keepends=True)]
        assert all(line.startswith(b"1 ") and line.endswith(b"\n") for line in lines)
        found.append([int(line[2:]) for line in lines])
    return found


def everything(source: KafkaSource, num_workers: int = 1) -> list[list[int]]:
    """The messages of each part that is complete, part by part."""
    found, position = [], None
    while (part := source.next(position)) is not None:
        found.append(sorted(itertools.chain(*numbers(source, part, num_workers))))
        source.done(part)
        position = kept(part.position)
    return found


def test_every_message_is_in_one_part_and_parts_have_the_size_asked_for(topic: Topic) -> None:
    topic.write(103)
    parts = everything(topic.source(25))
    assert [len(part) for part in parts] == [25] * 4
    topic.write(22)
    parts = everything(topic.source(25))
    assert [len(part) for part in parts] == [25] * 5
    assert sorted(itertools.chain(*parts)) == list(range(125))
    assert parts[0] == list(range(25))  # all partitions in proportion, so in the order of time


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_every_message_is_one_workers(topic: Topic, num_workers: int) -> None:
    topic.write(50)
    source = topic.source(50)
    part = source.next(None)
    assert part is not None
    found = numbers(source, part, num_workers)
    assert sorted(itertools.chain(*found)) == list(range(50))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_one_partition_is_split_among_workers(topic: Topic) -> None:
    topic.write(10, partition=2)
    source = topic.source(10)
    part = source.next(None)
    assert part is not None
    assert numbers(source, part, 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_a_worker_without_messages_has_no_file(topic: Topic) -> None:
    topic.write(1)
    source = topic.source(1)
    part = source.next(None)
    assert part is not None
    assert [len(source.files_of(part, worker, 3)) for worker in range(3)] == [0, 0, 1]


def test_a_part_is_of_the_hour_of_its_first_message(topic: Topic) -> None:
    topic.write(1, partition=1, time=HOUR + 3600.5)
    topic.write(1, partition=0, time=HOUR + 7300)
    topic.write(1, partition=1, time=HOUR)  # behind the first of its partition: not looked at
    part = topic.source(3).next(None)
    assert part is not None
    assert (part.name, part.day, part.hour, part.time) == ("20261115/08-000001", "20261115", 8, HOUR + 3600.5)
    assert part.files == []


def test_the_clock_never_goes_back_and_names_differ(topic: Topic) -> None:
    topic.write(4, time=HOUR + 7200)
    topic.write(4, time=HOUR)
    source = topic.source(4)
    first = source.next(None)
    assert first is not None
    second = source.next(kept(first.position))
    assert second is not None
    assert first.time == second.time == HOUR + 7200
    assert [first.name, second.name] == ["20261115/09-000001", "20261115/09-000002"]


def test_a_restart_goes_on_behind_the_last_complete_part(topic: Topic) -> None:
    topic.write(30)
    first = topic.source(10).next(None)
    assert first is not None
    unfinished = topic.source(10).next(kept(first.position))  # its training never came to an end
    assert unfinished is not None
    again = topic.source(15)
    part = again.next(kept(first.position))
    assert part is not None
    assert numbers(again, part)[0][0] not in numbers(again, first)[0]
    rest = sorted(numbers(again, first)[0] + numbers(again, part)[0])
    assert len(rest) == len(set(rest)) == 25


def test_too_few_messages_are_a_part_after_max_wait(topic: Topic) -> None:
    topic.write(3)
    assert topic.source(10).next(None) is None
    source = topic.source(10, max_wait=0.0)
    part = source.next(None)
    assert part is not None
    assert sorted(numbers(source, part)[0]) == [0, 1, 2]
    assert source.next(part.position) is None  # nothing at all is no part
    assert not source.is_over(part.position)


def test_the_wait_begins_with_the_first_message(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    source = topic.source(10, max_wait=60.0)
    topic.write(4)
    part = topic.source(4).next(None)
    assert part is not None
    monkeypatch.setattr(kafka_module.time, "monotonic", lambda: clock[0])
    real = source._reader.partitions

    def waited(position: Any, seconds: float) -> bool:
        clock[0] += seconds
        num = sum(high - (position or {"offsets": {}})["offsets"].get(str(p), low) for p, low, high in real())
        return source._has_waited(position, num)

    assert not waited(part.position, 500)
    assert not waited(None, 500)
    assert not waited(None, 59)
    assert waited(None, 1)
    assert not waited(part.position, 500)  # nothing there: the clock stands still
    topic.write(1)
    assert not waited(part.position, 500)
    assert waited(part.position, 60)


def test_start_at_the_latest(topic: Topic) -> None:
    topic.write(20)
    source = topic.source(4, start="latest")
    assert source.next(None) is None
    topic.write(8)
    found = everything(source)
    assert sorted(itertools.chain(*found)) == list(range(20, 28))


def test_done_removes_the_files(topic: Topic, tmp_path: Path) -> None:
    topic.write(8)
    source = topic.source(4, folder=str(tmp_path))
    part = source.next(None)
    assert part is not None
    files = [path for worker in range(2) for path in source.files_of(part, worker, 2)]
    assert all(path.startswith(str(tmp_path)) and os.path.exists(path) for path in files)
    source.done(part)
    assert not any(os.path.exists(path) for path in files)
    second = source.next(part.position)
    assert second is not None
    (path,) = source.files_of(second, 0, 1)
    source.close()
    assert not os.path.exists(path)
    assert list(tmp_path.iterdir()) == []
    assert source.next(part.position) is not None  # it can be used again


def test_values_with_an_end_of_line_get_no_second_one(topic: Topic) -> None:
    for value in (b"1 0\n", b"1 1", b"1 2\n1 3", None):
        topic._producer.produce(topic.name, value, partition=0)
    assert topic._producer.flush(10) == 0
    source = topic.source(4)
    part = source.next(None)
    assert part is not None
    assert numbers(source, part) == [[0, 1, 2, 3]]


@pytest.mark.filterwarnings("ignore")
def test_a_topic_that_is_not_there_and_one_that_was_made_anew_are_named(topic: Topic) -> None:
    topic.write(4)
    with pytest.raises(DataError, match=naming("partition 1", 500, 1)):
        topic.source(1).next({"offsets": {"1": 500}})
    missing = KafkaSource("nowhere", topic.servers, timeout=5.0, config={"log_level": 0})
    with pytest.raises(DataError, match=naming("nowhere", "127.0.0.1")):
        missing.next(None)


def test_brokers_that_do_not_answer_are_named() -> None:
    needs("confluent_kafka")
    source = KafkaSource("clicks", "127.0.0.1:1", timeout=0.5, config={"log_level": 0})
    with pytest.raises(DataError, match=naming("clicks", "127.0.0.1:1")):
        source.next(None)


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingPackage, match=naming("pip install 'torchfleet[kafka]'")):
        KafkaSource("clicks", "127.0.0.1:9092")


@pytest.mark.parametrize("options", [{"messages_per_part": 0}, {"messages_per_part": 1.5}, {"start": "yesterday"}])
def test_mistakes_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=naming(next(iter(options)))):
        KafkaSource("clicks", "127.0.0.1:9092", **options)


def test_offsets_are_saved_with_the_model(topic: Topic, tmp_path: Path) -> None:
    """Trained in two runs, of which the first one fails in its third part: every message is in the model once."""
    topic.write(100)
    trained: list[list[int]] = []

    def train(part: Part, files: list[str]) -> None:
        dataset = fleet.QueueDataset()
        dataset.init(batch_size=7, use_var=[fleet.Slot("number", dim=1)])
        dataset.set_filelist(files)
        trained.append(sorted(number for batch in dataset for number in batch["number"].view(-1).tolist()))
        if len(trained) == 3:
            raise RuntimeError("the third part fails")

    folder = str(tmp_path / "model")
    for num_passes, fails in ((4, True), (2, False)):
        with jobs.clean_facade(), pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
            fleet.init()
            model = fleet.distributed_model(Tiny())
            optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            fleet.init_worker(online.model_to_load(folder))
            step(model, optimizer, 0)
            online.train_passes(topic.source(25, folder=str(tmp_path)), folder, train, max_passes=num_passes)
            fleet.stop_worker()
    assert trained[2] == trained[3]  # the one that was not saved
    assert sorted(itertools.chain(*trained[:3], trained[4])) == list(range(100))
    assert [result.part for result in online.history(folder)] == [f"20261115/07-{i:06}" for i in range(1, 5)]
    assert [path.name for path in tmp_path.iterdir() if path.name != "model" and any(path.iterdir())] == []


# What the cluster for tests cannot show


class StandIn:
    """As much of the library as is used: one topic, whose logs are dicts from offsets to values, and end somewhere."""

    TIMESTAMP_NOT_AVAILABLE = 0

    class KafkaException(Exception):
        pass

    class KafkaError:
        _PARTITION_EOF = -191

    class TopicPartition:
        def __init__(self, topic: str, partition: int, offset: int = 0) -> None:
            self.topic, self.partition, self.offset = topic, partition, offset

    def __init__(self, logs: dict[int, dict[int, bytes]], ends: dict[int, tuple[int, int]]) -> None:
        self.logs, self.ends, self.assigned = logs, ends, {}
        self.is_silent = False

    def Consumer(self, config: dict[str, Any]) -> StandIn:
        assert config["enable.auto.commit"] is False
        return self

    def list_topics(self, topic: str, timeout: float) -> Any:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=self.logs)})

    def get_watermark_offsets(self, place: Any, timeout: float) -> tuple[int, int]:
        return self.ends[place.partition]

    def assign(self, places: list[Any]) -> None:
        self.assigned = {place.partition: place.offset for place in places}

    def incremental_unassign(self, places: list[Any]) -> None:
        for place in places:
            del self.assigned[place.partition]

    def unassign(self) -> None:
        self.assigned = {}

    def consume(self, num: int, timeout: float) -> list[Any]:
        """Everything that is left of all logs, and their ends."""
        if self.is_silent:
            return []
        found = []
        for partition, start in self.assigned.items():
            log = {offset: value for offset, value in self.logs[partition].items() if offset >= start}
            found += [self._message(partition, offset, value, None) for offset, value in sorted(log.items())]
            found.append(self._message(partition, self.ends[partition][1], b"", self._end()))
            self.assigned[partition] = self.ends[partition][1]
        return found

    def _end(self) -> Any:
        return SimpleNamespace(code=lambda: self.KafkaError._PARTITION_EOF, str=lambda: "end")

    def _message(self, partition: int, offset: int, value: bytes, error: Any) -> Any:
        fields = {"partition": partition, "offset": offset, "value": value, "error": error, "timestamp": (1, HOUR)}
        return SimpleNamespace(**{name: (lambda given=given: given) for name, given in fields.items()})


def stand_in(monkeypatch: pytest.MonkeyPatch, logs: Any, ends: Any, num: int) -> tuple[StandIn, KafkaSource]:
    library = StandIn(logs, ends)
    monkeypatch.setattr(kafka_module, "required", lambda *names: library)
    return library, KafkaSource("clicks", "somewhere", num, timeout=0.05)


def test_offsets_without_a_message_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps at the beginning, within, and at the end of ranges; a partition with nothing but gaps."""
    logs = {0: {n: b"1 %d" % n for n in (3, 4, 7, 12)}, 1: {}, 2: {n: b"1 %d" % (100 + n) for n in range(10)}}
    _, source = stand_in(monkeypatch, logs, {0: (0, 15), 1: (0, 10), 2: (0, 10)}, 7)
    found, position = [], None
    for number in range(5):
        part = source.next(position)
        assert part is not None
        found += list(itertools.chain(*numbers(source, part, 1 + number % 3)))
        position = kept(part.position)
    assert position["offsets"] == {"0": 15, "1": 10, "2": 10}
    assert sorted(found) == sorted(int(value[2:]) for log in logs.values() for value in log.values())


def test_messages_that_the_brokers_have_dropped_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library, source = stand_in(monkeypatch, {0: {9: b"1 9"}}, {0: (8, 10)}, 5)
    position = {"offsets": {"0": 3}, "number": 4, "time": 0.0}
    for _ in range(3):
        assert source.next(position) is None
    text = capfd.readouterr().err
    assert len(lines_naming(text, "partition 0", 3, 8)) == 1
    library.ends[0] = (8, 13)
    part = source.next(position)
    assert part is not None
    assert part.detail == [[0, 8, 13]]


def test_a_new_partition_is_read_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    library, source = stand_in(monkeypatch, {0: {0: b"1 0"}}, {0: (0, 1)}, 1)
    part = source.next(None)
    assert part is not None
    library.logs[1], library.ends[1] = {0: b"1 1", 1: b"1 2"}, (0, 2)
    source._num = 2
    second = source.next(kept(part.position))
    assert second is not None
    assert numbers(source, second) == [[1, 2]]
    assert second.position["offsets"] == {"0": 1, "1": 2}


def test_silence_is_an_error_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    library, source = stand_in(monkeypatch, {0: {0: b"1 0"}}, {0: (0, 1)}, 1)
    part = source.next(None)
    assert part is not None
    library.is_silent = True
    with pytest.raises(DataError, match=naming("clicks", "somewhere", "0.05")):
        source.files_of(part, 0, 1)


# Ranges


def test_a_cut_is_in_proportion_and_exact() -> None:
    available = [OffsetRange(0, 100, 150), OffsetRange(1, 0, 0), OffsetRange(2, 7, 8), OffsetRange(3, 0, 30)]
    for num in range(1, 90):
        taken = cut(available, num)
        assert sum(map(len, taken)) == min(num, 81)
        for part in taken:
            whole = available[part.partition]
            assert part.start == whole.start
            assert 0 < len(part) <= len(whole)
            assert abs(len(part) - len(whole) * min(1.0, num / 81)) <= 1


def test_shares_are_disjoint_and_together_everything() -> None:
    ranges = [OffsetRange(0, 5, 9), OffsetRange(2, 0, 1), OffsetRange(3, 100, 117)]
    everywhere = [(part.partition, n) for part in ranges for n in range(part.start, part.stop)]
    for num_workers in range(1, 30):
        shares = [share(ranges, worker, num_workers) for worker in range(num_workers)]
        found = [(part.partition, n) for own in shares for part in own for n in range(part.start, part.stop)]
        assert found == everywhere
        sizes = [sum(map(len, own)) for own in shares]
        assert max(sizes) - min(sizes) <= 1
