"""A coordinator that is asked in a thread: the loop of a server does not wait for one that swallows requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from support.fleets import MAX_TABLE_BYTES
from support.messages import names
from support.played_etcd import PlayedEtcd, played_etcd
from support.scripts.launching import SOON, wait_until

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.ps.coordination import background_coordinator, etcd_gateway
from torchfleet.ps.coordination.background_coordinator import BackgroundCoordinator
from torchfleet.ps.coordination.coordinators import make_coordinator
from torchfleet.ps.coordination.view import View
from torchfleet.ps.net.wire import Command, Message, Role, encode
from torchfleet.ps.server.replicas.between import Identity
from torchfleet.ps.server.replicas.replica import Replica
from torchfleet.ps.server.server import Server

FIRST = View(1, "0.0.a")


class SlowStore:
    """As Coordinator. Answers when it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.num_asked = 0

    def read(self, shard: int) -> View | None:
        self._wait()
        return FIRST

    def replace(self, shard: int, before: View | None, after: View) -> bool:
        self._wait()
        return True

    def renew(self) -> None:
        self._wait()

    def _wait(self) -> None:
        self.num_asked += 1
        assert self.let.wait(SOON)


@pytest.fixture
def etcd() -> Iterator[PlayedEtcd]:
    with played_etcd() as found:
        yield found


def answers(coordinator: BackgroundCoordinator) -> bool:
    try:
        coordinator.read(0)
    except CoordinatorUnreachable:
        return False
    return True


def test_an_answer_that_comes_late_is_given_to_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_coordinator, "_KEPT", SOON)
    store = SlowStore()
    coordinator = BackgroundCoordinator(store, print)
    for _ in range(3):
        with pytest.raises(CoordinatorUnreachable):
            coordinator.replace(0, None, FIRST)
    with pytest.raises(CoordinatorUnreachable):
        coordinator.read(0)
    wait_until(lambda: store.num_asked > 0, SOON, "request")  # its thread may not have run yet
    assert store.num_asked == 1, "one request is under way at a time"
    store.let.set()
    request = coordinator._request
    assert request is not None
    assert request.done.wait(SOON)
    assert coordinator.replace(0, None, FIRST)
    wait_until(lambda: answers(coordinator), SOON, "answer")


def test_an_old_answer_is_not_given() -> None:
    store = SlowStore()
    coordinator = BackgroundCoordinator(store, print)
    with pytest.raises(CoordinatorUnreachable):
        coordinator.read(0)
    store.let.set()
    request = coordinator._request
    assert request is not None
    assert request.done.wait(SOON)
    request._ended -= 10.0
    wait_until(lambda: answers(coordinator), SOON, "answer")
    assert store.num_asked == 2


def test_why_a_coordinator_does_not_answer_is_said_when_it_changes(
    etcd: PlayedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_gateway, "_TIMEOUT", SOON)  # a busy machine is not a reason
    lines: list[str] = []
    coordinator = BackgroundCoordinator(make_coordinator(f"etcd://{etcd.place}/run"), lines.append)
    for fault, known in (("401", 1), ("503", 2)):
        etcd.fault = fault
        before = len(etcd.asked)
        wait_until(lambda before=before: not answers(coordinator) and len(etcd.asked) > before + 4, SOON, "requests")
        assert len(lines) == known
        assert names(lines[-1], etcd.place, fault)
    etcd.fault = ""
    wait_until(lambda: answers(coordinator), SOON, "answer")
    assert len(lines) == 3


def test_forged_terms_do_not_stop_a_primary_whose_etcd_swallows_requests(
    etcd: PlayedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may send any term. The primary looks who is primary, and must not wait for the answer each time."""
    server = Server(MAX_TABLE_BYTES)
    coordinator = BackgroundCoordinator(make_coordinator(f"etcd://{etcd.place}/run"), print)
    with monkeypatch.context() as patch:
        patch.setattr(etcd_gateway, "_TIMEOUT", SOON)  # a request that was given up here would be counted below
        replica = Replica(server, Identity(0, 0, 0, 5), coordinator, lambda to: None)  # type: ignore[arg-type, return-value]
        wait_until(lambda: replica.tick(time.monotonic()) == [] and replica.is_primary, SOON, "primary")
    etcd.fault = "silent"
    forged = encode(Message(Command.PING, Role.FIRST_WORKER, term=1000))
    before = len(etcd.asked)
    started = time.monotonic()
    for _ in range(100):
        assert len(replica.handle("peer", forged, Role.FIRST_WORKER)) == 1
    took = time.monotonic() - started
    assert took < 30.0, "a wait for each would take 40 s"
    assert len(etcd.asked) - before <= 1 + took / 0.4, "one request is under way at a time"
