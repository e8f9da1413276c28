"""Every coordinator under one battery; etcd is a real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cases import each_of
from support.messages import naming
from support.own_etcd import started_etcd

from torchfleet.base.errors import CoordinatorUnreachable, RoleError, SecurityError
from torchfleet.ps.coordination import etcd_gateway
from torchfleet.ps.coordination.coordinators import make_coordinator
from torchfleet.ps.coordination.view import Coordinator, View

pytestmark = pytest.mark.xdist_group("coordinators")
FIRST = View(1, "0-a", "")


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    with started_etcd() as place:
        yield place


@pytest.fixture(params=["file", "etcd"])
def connect(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Coordinator]:
    """Makes clients of one coordinator, as several processes have them. Its disk may be slow."""
    monkeypatch.setattr(etcd_gateway, "_TIMEOUT", 30.0)
    if request.param == "file":
        return lambda: make_coordinator(f"file://{tmp_path}")
    place, name = request.getfixturevalue("etcd"), f"{tmp_path.name}-{time.time_ns()}"
    return lambda: make_coordinator(f"etcd://127.0.0.1:9,{place}/{name}")  # of two members, one is down


def test_a_view_changes_for_whoever_still_sees_the_one_of_before(connect: Callable[[], Coordinator]) -> None:
    one, other = connect(), connect()
    assert one.read(0) is None
    assert one.replace(0, None, FIRST)
    assert not other.replace(0, None, View(1, "1-b"))
    assert other.replace(0, FIRST, FIRST.joined_by("1-b"))
    joined = View(2, "0-a", "1-b")
    assert one.read(0) == joined
    assert not one.replace(0, FIRST, FIRST.joined_by("1-c"))
    assert one.read(1) is None, "shards have views of their own"
    assert other.replace(0, joined, joined.taken_over())
    assert not one.replace(0, joined, joined.alone())
    assert one.read(0) == View(3, "1-b", "")
    one.renew()
    assert one.replace(0, View(3, "1-b"), View(3, "1-b").over())


def test_of_many_that_want_different_things_one_gets_its_way(connect: Callable[[], Coordinator]) -> None:
    connect().replace(0, None, FIRST)
    view, num_rounds = FIRST, 10
    for _ in range(num_rounds):
        winners = _race(connect, view)
        view = connect().read(0) or FIRST
        assert winners == [view.backup]
    assert view.term == 1 + num_rounds


def _race(connect: Callable[[], Coordinator], view: View) -> list[str]:
    """Several at the same time want to be the backup; returns those that were told that they are."""
    winners: list[str] = []

    def run(name: str) -> None:
        if connect().replace(0, view, view.joined_by(name)):
            winners.append(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("1-b", "1-c", "1-d", "1-e")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return winners


def test_a_coordinator_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorUnreachable, match=naming("127.0.0.1:9")):
        make_coordinator("etcd://127.0.0.1:9/run").read(0)
    folder = tmp_path / "terms"
    folder.mkdir(mode=0o700)
    made = make_coordinator(f"file://{folder}")
    folder.rmdir()
    with pytest.raises(CoordinatorUnreachable, match=naming(folder)):
        made.replace(0, None, FIRST)


@each_of("url", ["", "etcd", "zookeeper://a:1/x", "etcd://a:1", "etcd://a/x", "etcd://a:1/x y"])
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(RoleError, match="etcd://host:port/NAME"):
        make_coordinator(url)


def test_a_folder_that_others_can_write_to_decides_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SecurityError, match=naming(tmp_path)):
        make_coordinator(f"file://{tmp_path}")
