"""Every warning, with a job that must cause it and one that must not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.job_snapshots import heter_worker, rank, server, worker
from support.messages import names
from support.paths import ROOT

from torchfleet.base import cgroups
from torchfleet.base.monitor.freshness import OLD_NETWORK
from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.observe.watch.job_warnings import JobWarnings

Roles = Callable[[float], Sequence[RoleSnapshot]]  # the job after this number of seconds


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "memory_left", lambda: 1 << 50)


def warned(roles: Roles, seconds: int = 20, warnings: JobWarnings | None = None) -> list[str]:
    """What stands there at the end, of looks twice a second. Statuses change with every look, as they do."""
    warnings = warnings or JobWarnings()
    found: list[str] = []
    for look in range(2 * seconds + 1):
        found = warnings.look(JobSnapshot(1000.0 + look / 2, roles(look / 2)))
    return found


def test_a_straggler_is_named_with_how_much_it_makes_of_what_others_make() -> None:
    rates = {0: 1000.0, 1: 1100.0, 2: 400.0, 3: 1050.0}
    (text,) = warned(lambda now: [worker(i, samples_per_s=rate, steps=now + 1) for i, rate in rates.items()])
    assert names(text, "worker 2", 400, "38 %", "1,050")


@pytest.mark.parametrize(
    "roles",
    [
        lambda now: [worker(i, samples_per_s=1000.0 + 200 * i, steps=now + 1) for i in range(4)],  # all of one kind
        lambda now: [worker(0, samples_per_s=10.0, steps=now + 1)],  # no other worker to compare it with
        lambda now: [worker(0, steps=now + 1), worker(1, samples_per_s=0.0, steps=now + 1, left=True)],  # at its end
        lambda now: [worker(0, steps=now + 1), worker(1, "done", samples_per_s=1.0)],
        lambda now: [worker(0, steps=now + 1), worker(1, samples_per_s=0.0, steps=0, queue=int(now) % 2)],  # begins
        lambda now: [worker(0, steps=now + 1), worker(1, samples_per_s=20_000 * (5 < now < 8) or 20_000, steps=now)],
    ],
)
def test_no_straggler_is_seen_where_there_is_none(roles: Roles) -> None:
    assert warned(roles) == []


def test_a_queue_is_full_if_it_stays_so_and_training_waits() -> None:
    def one(queue: Callable[[float], int], waiting: float) -> Roles:
        return lambda now: [worker(0, queue=queue(now), queue_size=4, waiting=waiting, steps=now + 1)]

    (text,) = warned(one(lambda now: 4, 0.5))
    assert names(text, "queue", "worker 0", "4 of 4", "50 %", "--server_num")
    assert warned(one(lambda now: 4, 0.25)) == []  # as in a healthy job
    assert warned(one(lambda now: int(2 * now) % 5, 0.5)) == []


def test_an_old_network_is_seen_by_the_pushes_of_the_last_seconds() -> None:
    def aged(before: int, after: int) -> Roles:
        """After ten seconds, all gradients come from a network of another age."""

        def roles(now: float) -> Sequence[RoleSnapshot]:
            ages = {str(before): 1000 + int(100 * min(now, 10)), str(after): int(100 * max(0, now - 10))}
            return [server(0, staleness_dense=ages), worker(0, steps=now + 1)]

        return roles

    (text,) = warned(aged(1, 9))
    assert names(text, "network", 9)
    assert warned(aged(9, 1), 25) == []
    (text,) = warned(aged(1, 2))
    assert names(text, "network", 2)
    assert warned(aged(0, 1)) == []


def test_requests_that_were_sent_again_are_told_but_not_those_of_the_start() -> None:
    (text,) = warned(lambda now: [worker(0, retries=int(now > 15) * 3, steps=now + 1)])
    assert names(text, "worker 0", 3, 10)
    assert warned(lambda now: [worker(0, retries=3, steps=now + 1)]) == []
    assert warned(lambda now: [worker(0, retries=3 * (now > 15), steps=0, queue=int(now) % 2)]) == []


def test_roles_that_say_nothing_for_long_are_told_together() -> None:
    roles = [server(0), server(1), worker(0), worker(1), worker(2, left=True), worker(3, "done")]
    roles.append(rank(0, samples_per_s=20_000.0))
    found = warned(lambda now: [role if role.key != "server.0" else server(0, requests=now) for role in roles], 70)
    assert all(names(text, who, "1:10") for text, who in zip(found, ("server 1", "workers 0–1", "rank 0"), strict=True))
    assert warned(lambda now: [server(0, requests=now), worker(0, steps=now + 1)], 70) == []
    assert warned(lambda now: [server(0, requests=now), worker(0)], 50) == []  # a pass of evaluation


def test_servers_that_end_with_the_job_are_not_silent() -> None:
    ending = [[worker(0, left=True), worker(1, "done")], [rank(0, "done")]]
    serving = [server(0), server(1), heter_worker(0)]
    assert [warned(lambda now, ended=ended: [*serving, *ended], 70) for ended in ending] == [[], []]
    (text,) = warned(lambda now: [server(0), worker(0, left=True), worker(1, steps=now)], 20)
    assert names(text, "server 0", "0:20")
    assert len(warned(lambda now: serving[:1], 20)) == 1  # a machine of servers alone
    assert len(warned(lambda now: [server(0), worker(0, "starting")], 20)) == 1


def test_a_heter_worker_that_says_nothing_is_told() -> None:
    (text,) = warned(lambda now: [worker(0, steps=now), heter_worker(0), heter_worker(1, busy=now)], 70)
    assert names(text, "heter_worker 0", "1:10")


def test_the_page_of_warnings_has_the_age_of_an_old_network() -> None:
    row = re.search(r"^\| the network is old \|.*$", (ROOT / "docs/watching.md").read_text(), re.MULTILINE)
    assert row is not None
    assert re.findall(r"\b(\d+) updates", row[0]) == [str(OLD_NETWORK)]


def test_little_memory_and_a_full_disk_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roles: Roles = lambda now: [server(0, requests=now)]  # noqa: E731
    assert warned(roles, warnings=JobWarnings(tmp_path)) == []
    monkeypatch.setattr(cgroups, "memory_left", lambda: 100_000_000)
    monkeypatch.setattr(cgroups, "memory_limit", lambda: 4_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    memory, disk = warned(roles, warnings=JobWarnings(tmp_path))
    assert names(memory, "memory", "100 MB", "4.0 GB")
    assert names(disk, tmp_path, "5.0 MB")


def test_a_warning_is_new_once_and_again_only_when_it_has_come_back() -> None:
    warnings, new = JobWarnings(), []
    for look in range(240):  # two minutes: slow, well for a moment, slow, well for long, slow
        now = look / 2
        is_slow = now < 40 or 43 < now < 60 or now > 90
        roles = [worker(0, samples_per_s=1000.0, steps=look + 1), worker(1, steps=look + 1)]
        roles[1].status["samples_per_s"] = 100.0 if is_slow else 1000.0
        warnings.look(JobSnapshot(1000.0 + now, roles))
        new += [now for _ in warnings.new]
    assert len(new) == 2
    assert new[0] < 15
    assert 90 < new[1] < 105
