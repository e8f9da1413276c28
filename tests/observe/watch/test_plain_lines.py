"""What is printed where there is no terminal: little, and nothing twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.job_snapshots import job, rank, server, worker
from support.messages import names

from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.observe.watch import display as display_module
from torchfleet.observe.watch.display import Display
from torchfleet.observe.watch.job_totals import totals_of
from torchfleet.observe.watch.plain_lines import end_lines, job_line


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_module, "usable_cores", lambda: 4)


def told(capsys: pytest.CaptureFixture[str], *phases: tuple[float, Sequence[RoleSnapshot]]) -> list[str]:
    """The lines of a job that has these roles until these seconds, of a launcher that looks ten times a second."""
    display, look = Display(), 0
    for until, roles in phases:
        while look / 10 < until:
            display.look(JobSnapshot(1000.0 + look / 10, roles))
            look += 1
    display.close()
    return capsys.readouterr().out.splitlines()


def test_starting_is_said_once_then_a_line_about_the_job_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    starting = [server(0, rows={}, tables={}), worker(0, "starting"), worker(1, "starting")]
    trained = [server(0), worker(0), worker(1)]
    more = [server(0, requests=7), worker(0, samples_per_s=30_000.0), worker(1)]
    held = "12,345 rows, servers busy 97 %, workers wait 61 %"
    begins, runs, *lines = told(capsys, (12.0, starting), (24.0, trained), (33.0, more))
    assert names(begins, "[fleetrun]", "1 server", "2 workers")
    assert names(runs, "[fleetrun]", "12.0 s")
    assert lines == [
        f"[fleetrun] 15 s  epoch 1/3 37 %, ETA 1:20 | 41,472 samples/s (mean 38,000) | loss 0.4568 | {held}",
        # and nothing for as long as nothing changes
        f"[fleetrun] 25 s  epoch 1/3 37 %, ETA 1:20 | 50,736 samples/s (mean 38,000) | loss 0.4568 | {held}",
    ]


def test_a_warning_is_a_line_of_its_own_once(capsys: pytest.CaptureFixture[str]) -> None:
    def roles(look: int) -> Sequence[RoleSnapshot]:
        return [worker(0, steps=look + 1), worker(1, steps=look + 1, samples_per_s=10.0)]

    lines = told(capsys, *((look / 2, roles(look)) for look in range(1, 81)))
    assert sum(names(line, "[fleetrun] warning", "worker 1", "10.0 samples/s") for line in lines) == 1


def test_ranks_have_neither_rows_nor_servers() -> None:
    assert job_line(JobSnapshot(1.0, [rank(0), rank(1)])) == "320 samples/s (mean 300) | loss 0.2500"


def test_progress_is_that_of_the_last_worker() -> None:
    ahead = {"epoch": 1, "epochs": 2, "done": 10, "total": 100, "unit": "batches", "eta_s": 9.0}
    behind = {"epoch": 0, "epochs": 2, "done": 50, "total": 100, "unit": "batches", "eta_s": 75.0}
    line = job_line(JobSnapshot(1.0, [worker(0, progress=ahead), worker(1, progress=behind)]))
    assert line.startswith("epoch 1/2 50 %, ETA 1:15 |")
    slower = {**behind, "done": 29, "total": 50, "eta_s": 80.0}  # a share of its own samples
    line = job_line(JobSnapshot(1.0, [worker(0, progress={**behind, "done": 67}), worker(1, progress=slower)]))
    assert line.startswith("epoch 1/2 58 %, ETA 1:20 |")
    line = job_line(JobSnapshot(1.0, [worker(0, progress=behind, left=True), worker(1, progress=ahead)]))
    assert line.startswith("epoch 2/2 10 %, ETA 0:09 |")
    unknown = {"epoch": 4, "done": 1234, "unit": "samples"}
    assert job_line(JobSnapshot(1.0, [worker(0, progress=unknown)])).startswith("epoch 5: 1,234 samples |")


def test_nothing_is_told_of_a_job_that_has_done_nothing() -> None:
    assert job_line(JobSnapshot(1.0, [server(0, rows={}, tables={}), worker(0, "starting")])) == ""


def test_the_end_says_what_was_learned_and_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    finished = [server(0, "done"), worker(0, "done", metrics={"auc": 0.75}), worker(1, "done", metrics={"auc": 0.25})]
    assert end_lines(JobSnapshot(1.0, finished), 62.4) == [
        "1.23 M samples in 32.3 s of training, 38,000 samples/s, auc 0.5000; the job took 62 s",
        "12,345 rows in 1 table, 1.2 MB; servers used 460 MB of memory",
    ]
    display = Display()
    display.look(job(1, 2))
    display.end(JobSnapshot(1042.0, finished))
    lines = capsys.readouterr().out.splitlines()
    assert names(lines[-1], "[fleetrun]", "servers")
    assert names(lines[-3], "[fleetrun]", "1.23 M samples", "42 s")


def test_the_end_says_that_the_memory_has_the_compiler() -> None:
    for compiled in ({}, {"compiled": True}):
        servers = [server(0, "done"), server(1, "done", **compiled)]
        line = end_lines(JobSnapshot(1.0, servers), 62.4)[-1]
        assert names(line, "920 MB")
        assert ("compiler" in line) == bool(compiled)


def test_samples_divided_by_seconds_are_the_rate_also_if_workers_took_turns() -> None:
    quick, slow = worker(0, "done", samples=5_000, samples_per_s_mean=1_000.0), worker(1, "done", samples=4_000)
    slow.status["samples_per_s_mean"] = 100.0
    totals = totals_of(JobSnapshot(1.0, [quick, slow]))
    assert (totals.samples, totals.training_s, totals.mean_rate) == (9_000, 40.0, 225.0)
    assert names(
        end_lines(JobSnapshot(1.0, [quick, slow]), 66.0)[0], "9,000 samples", "40.0 s", "225 samples/s", "66 s"
    )


def test_a_single_step_has_no_rate() -> None:
    first = worker(0, "done", samples=64)
    del first.status["samples_per_s_mean"]
    (line,) = end_lines(JobSnapshot(1.0, [first]), 9.0)
    assert names(line, "64 samples", "9 s")
    assert "samples/s" not in line


def test_once_no_worker_trains_only_the_mean_is_told() -> None:
    line = job_line(JobSnapshot(1.0, [server(0), worker(0, "done"), worker(1, left=True)]))
    assert names(line, "mean 38,000 samples/s")
    assert "0 samples/s (" not in line


def test_lines_of_processes_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    display.note("[worker 0] [bold]not markup[/bold]", False)
    display.close()
    assert capsys.readouterr().out == "[worker 0] [bold]not markup[/bold]\n"
