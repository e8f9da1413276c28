"""Seconds without a backup: from the first worker to the last, of the primary with the highest term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from support.job_snapshots import server, worker
from support.messages import names

from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.observe.watch.job_warnings import JobWarnings
from torchfleet.observe.watch.missing_backups import MissingBackups


def primary(has_backup: bool, term: int = 2, replica: int = 0, joined: int = 2) -> RoleSnapshot:
    told = {"backup": False, "has_backup": has_backup, "term": term, "workers_joined": joined}
    return replace(server(**told), replica=replica)


def backup(in_step: bool = True, replica: int = 1) -> RoleSnapshot:
    return replace(server(backup=True, in_step=in_step, term=2, workers_joined=0), replica=replica)


def after(found: MissingBackups, *looks: Sequence[RoleSnapshot]) -> dict[int, float]:
    """What the last of these looks finds, one a second."""
    told: dict[int, float] = {}
    for second, roles in enumerate(looks):
        told = found.look(JobSnapshot(1000.0 + second, roles))
    return told


def test_every_second_without_a_backup_counts() -> None:
    found, workers = MissingBackups(), [worker(0)]
    whole, alone = [primary(True), backup(), *workers], [primary(False), backup(False), *workers]
    assert after(found, whole, whole, alone, alone, alone) == {0: 3.0}
    (line,) = found.report()
    assert names(line, "server 0", "0:03", "1 time")
    assert found.look(JobSnapshot(1005.0, whole)) == {}
    (again,) = found.report()
    assert again == line


def test_a_job_that_was_never_without_one_reports_nothing() -> None:
    found, roles = MissingBackups(), [primary(True), backup(), worker(0)]
    assert after(found, roles, roles, roles) == {}
    assert list(found.report()) == []


def test_what_a_stopped_primary_said_last_does_not_count_once_another_has_taken_over() -> None:
    took_over = primary(False, term=3, replica=1)
    assert after(MissingBackups(), [primary(True), took_over, worker(0)], [primary(True), took_over, worker(0)]) == {
        0: 1
    }


def test_nothing_counts_before_the_first_worker_and_after_the_last() -> None:
    early = [primary(False, joined=0), backup(False), worker(0, "starting")]
    late = [primary(False), worker(0, "done"), worker(1, left=True)]
    assert after(MissingBackups(), early, early) == after(MissingBackups(), late, late) == {}


def test_servers_without_replicas_and_a_backup_whose_primary_is_elsewhere_are_not_named() -> None:
    roles = [server(0, workers_joined=2), replace(backup(), index=1), worker(0)]
    assert after(MissingBackups(), roles, roles) == {}


def test_the_warning_tells_the_seconds_and_ends_with_its_cause() -> None:
    warnings, alone = JobWarnings(), [primary(False), worker(0)]
    for second in range(4):
        texts = warnings.look(JobSnapshot(1000.0 + second, alone))
    assert any(names(text, "server 0", "0:03", "backup") for text in texts)
    assert not any("backup" in text for text in warnings.look(JobSnapshot(1004.0, [primary(True), worker(0)])))
