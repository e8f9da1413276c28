"""An etcd that answers badly, or whose answers are lost, is one that is away; what it has done is found out later."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator

import pytest
from support.messages import naming
from support.played_etcd import FAULTS, PlayedEtcd, played_etcd

from torchfleet.base.errors import CoordinatorUnreachable, RoleError
from torchfleet.ps.coordination import etcd_gateway
from torchfleet.ps.coordination.coordinators import make_coordinator
from torchfleet.ps.coordination.view import Coordinator, View

FIRST = View(1, "0.0.a")
SECOND = FIRST.joined_by("1.0.b")
BRIEFLY = 25.0  # seconds: a request takes at most about one on an idle machine
LONG = 60.0  # a busy machine is not a fault
SLOW = ("silent", "drip")  # faults that end with the time-out


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedEtcd]:
    monkeypatch.setattr(etcd_gateway, "_TIMEOUT", LONG)
    with played_etcd() as found:
        yield found


def connect(*members: PlayedEtcd) -> Coordinator:
    return make_coordinator(f"etcd://{','.join(member.place for member in members)}/run")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_answer_is_none(etcd: PlayedEtcd, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = connect(etcd)
    assert coordinator.replace(0, None, FIRST)
    monkeypatch.setattr(etcd_gateway, "_TIMEOUT", 0.4 if fault in SLOW else LONG)
    with played_etcd() as elsewhere:
        etcd.fault, etcd.elsewhere = fault, elsewhere.place
        started = time.monotonic()
        with pytest.raises(CoordinatorUnreachable, match=naming(etcd.place)):
            coordinator.read(0)
        assert time.monotonic() - started < BRIEFLY
        with pytest.raises(CoordinatorUnreachable):
            coordinator.replace(0, FIRST, SECOND)
        with pytest.raises(CoordinatorUnreachable):
            coordinator.renew()
        assert elsewhere.asked == [], "a redirect is not followed"
    etcd.fault = ""
    monkeypatch.setattr(etcd_gateway, "_TIMEOUT", LONG)
    assert coordinator.read(0) in (FIRST, SECOND)  # a transaction may have been carried out, and answered badly
    assert coordinator.replace(0, FIRST, SECOND)


@pytest.mark.parametrize("fault", ["503", "empty", "types", "redirect"])
def test_the_next_member_is_asked_after_a_bad_answer(etcd: PlayedEtcd, fault: str) -> None:
    with played_etcd() as bad:
        bad.fault = fault
        coordinator = connect(bad, etcd)
        assert coordinator.read(0) is None
        num = len(bad.asked)
        assert coordinator.replace(0, None, FIRST)
        assert len(bad.asked) == num, "the member that answered is asked first"


@pytest.mark.parametrize("value", [b"", b"{}", b'{"term":"1","primary":"0.0.a"}', b"\xff" * 9, b"[" * 100_000])
def test_what_is_not_a_view_names_no_primary(etcd: PlayedEtcd, value: bytes) -> None:
    coordinator = connect(etcd)
    assert coordinator.replace(0, None, FIRST)
    (key,) = etcd.values
    etcd.values[key] = base64.b64encode(value).decode()
    with pytest.raises(CoordinatorUnreachable):
        coordinator.read(0)
    etcd.values[key] = "not base64 ~"
    with pytest.raises(CoordinatorUnreachable):
        coordinator.read(0)


def test_a_record_that_is_gone_is_not_a_shard_without_a_primary(etcd: PlayedEtcd) -> None:
    coordinator = connect(etcd)
    assert coordinator.read(0) is None
    assert coordinator.replace(0, None, FIRST)
    etcd.values.clear()
    with pytest.raises(CoordinatorUnreachable, match=naming("shard 0")):
        coordinator.read(0)
    with pytest.raises(CoordinatorUnreachable):
        coordinator.replace(0, FIRST, SECOND)
    assert etcd.values == {}


def test_a_change_whose_answer_is_lost_was_made(etcd: PlayedEtcd) -> None:
    coordinator = connect(etcd)
    etcd.plan = {"kv/txn": "lost"}
    assert coordinator.replace(0, None, FIRST), "it is read back"
    etcd.plan, etcd.then = {"kv/txn": "lost"}, "503"
    with pytest.raises(CoordinatorUnreachable):
        coordinator.replace(0, FIRST, SECOND)
    etcd.fault = ""
    assert coordinator.read(0) == SECOND
    assert coordinator.replace(0, FIRST, SECOND), "asked again, it is found made"
    assert not coordinator.replace(0, FIRST, FIRST.over())


def test_a_change_that_a_silent_member_has_made_is_not_refused_by_the_next(etcd: PlayedEtcd) -> None:
    with played_etcd() as other:
        other.values = etcd.values  # of one cluster
        coordinator = connect(etcd, other)
        etcd.plan = {"kv/txn": "lost"}
        assert coordinator.replace(0, None, FIRST)


def test_a_change_that_may_come_later_is_not_refused(etcd: PlayedEtcd) -> None:
    coordinator = connect(etcd)
    assert coordinator.replace(0, None, FIRST)
    etcd.plan = {"kv/txn": "late"}
    with pytest.raises(CoordinatorUnreachable):
        coordinator.replace(0, FIRST, SECOND)
    assert coordinator.read(0) == FIRST
    etcd.deliver()
    assert coordinator.read(0) == SECOND


def test_a_lease_that_etcd_has_removed_is_replaced(etcd: PlayedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = connect(etcd)
    assert coordinator.replace(0, None, FIRST)
    num = etcd.asked.count("lease/grant")
    monkeypatch.setattr(PlayedEtcd, "answer", _without_lease(PlayedEtcd.answer))
    with pytest.raises(CoordinatorUnreachable):
        coordinator.replace(0, FIRST, SECOND)
    monkeypatch.undo()
    assert coordinator.replace(0, FIRST, SECOND)
    assert etcd.asked.count("lease/grant") == num + 1


def _without_lease(answer: object) -> object:
    def without(self: PlayedEtcd, what: str, body: dict[str, object]) -> dict[str, object]:
        if what == "kv/txn":
            return {"error": "etcdserver: requested lease not found", "code": 5}
        found = answer(self, what, body)  # type: ignore[operator]
        return {"result": {"header": {}, "ID": body["ID"]}} if what == "lease/keepalive" else found

    return without


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_a_port_that_no_machine_has_is_refused(port: str) -> None:
    with pytest.raises(RoleError, match=naming(port)):
        make_coordinator(f"etcd://127.0.0.1:{port}/run")
