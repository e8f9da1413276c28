"""When a second replica is asked, and which answer counts."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from torchfleet.apps.serve.shards.hedged_read import Shard, finish
from torchfleet.apps.serve.shards.shard_replica import ShardReplica
from torchfleet.base.errors import ServerUnreachable

KEYS = np.arange(3, dtype=np.uint64)


class PlayedReplica:
    """Answers when the test says so."""

    def __init__(self, name: str, p95: float = 0.0, is_suspect: bool = False) -> None:
        self.endpoint, self.p95, self.is_suspect = name, p95, is_suspect
        self.asked: list[Future[Any]] = []
        self.was_asked = threading.Event()

    def probe(self) -> None:
        pass

    def read(self, table: str, keys: np.ndarray) -> Future[Any]:
        self.asked.append(Future())
        self.was_asked.set()
        return self.asked[-1]


def shard_of(*replicas: PlayedReplica) -> Shard:
    return Shard([cast(ShardReplica, replica) for replica in replicas])


def rows(value: float) -> np.ndarray:
    return np.full((3, 1), value, np.float32)


def test_a_quick_answer_is_the_only_one_asked_for() -> None:
    first, second = PlayedReplica("a", p95=60.0), PlayedReplica("b")
    shard = shard_of(first, second)
    read = shard.read("t", KEYS)
    first.asked[0].set_result(rows(1))
    assert finish([read])[0][0, 0] == 1
    assert not second.asked
    assert (shard.counts.num_reads, shard.counts.num_hedged) == (1, 0)


@pytest.mark.parametrize("winner", [0, 1])
def test_after_the_p95_the_backup_is_asked_and_the_first_answer_counts(winner: int) -> None:
    replicas = PlayedReplica("a", p95=0.01), PlayedReplica("b", p95=60.0)
    shard = shard_of(*replicas)
    read = shard.read("t", KEYS)

    def answer() -> None:
        assert replicas[1].was_asked.wait(60)
        replicas[winner].asked[0].set_result(rows(winner))

    thread = threading.Thread(target=answer)
    thread.start()
    assert finish([read])[0][0, 0] == winner
    thread.join()
    assert (shard.counts.num_hedged, shard.counts.num_won) == (1, winner)


def test_a_failure_goes_to_the_backup_at_once() -> None:
    first, second = PlayedReplica("a", p95=60.0), PlayedReplica("b")
    shard = shard_of(first, second)
    read = shard.read("t", KEYS)
    first.asked[0].set_exception(ServerUnreachable("gone"))
    read.look()
    second.asked[0].set_result(rows(2))
    assert finish([read])[0][0, 0] == 2
    assert (shard.counts.num_failed_over, shard.counts.num_hedged) == (1, 0)


def test_a_suspect_is_asked_last() -> None:
    first, second = PlayedReplica("a", is_suspect=True), PlayedReplica("b", p95=60.0)
    read = shard_of(first, second).read("t", KEYS)
    second.asked[0].set_result(rows(2))
    finish([read])
    assert not first.asked


def test_if_all_fail_the_read_does() -> None:
    first, second = PlayedReplica("a", p95=60.0), PlayedReplica("b", p95=60.0)
    shard = shard_of(first, second)
    read = shard.read("t", KEYS)
    first.asked[0].set_exception(ServerUnreachable("gone"))
    read.look()
    second.asked[0].set_exception(ServerUnreachable("gone, too"))
    with pytest.raises(ServerUnreachable, match="too"):
        finish([read])
    assert shard.counts.num_failed == 1


def test_reads_of_several_shards_wait_together() -> None:
    replicas = [PlayedReplica(str(i), p95=60.0) for i in range(3)]
    reads = [shard_of(replica).read("t", KEYS) for replica in replicas]
    for i in (2, 0, 1):
        replicas[i].asked[0].set_result(rows(i))
    assert [found[0, 0] for found in finish(reads)] == [0, 1, 2]
