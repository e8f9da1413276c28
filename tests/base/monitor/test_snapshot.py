"""What a launcher makes of reports that have become old."""

from __future__ import annotations

from support.job_snapshots import server, worker

from torchfleet.base.monitor.snapshot import JobSnapshot, RatesOfNow, RoleSnapshot
from torchfleet.observe.watch.job_totals import totals_of


def after(seconds: float, *roles: RoleSnapshot) -> JobSnapshot:
    """The last of looks at roles that report nothing new."""
    rates, now = RatesOfNow(), 0.0
    while now < seconds:
        found = rates.of(JobSnapshot(1000.0 + now, roles))
        now += 0.5
    return found


def test_a_worker_at_a_standstill_has_no_speed_and_no_time_left() -> None:
    totals = totals_of(after(30, worker(0), worker(1)))
    assert (totals.rate, totals.waiting, totals.samples) == (0.0, None, 2 * 614_400)
    assert totals.progress is not None
    assert (totals.progress.share, totals.progress.eta_s) == (0.37, None)
    assert totals.mean_rate > 0


def test_reports_of_now_and_of_slow_steps_stay_as_they_are() -> None:
    moment = after(5, worker(0), worker(1))
    assert totals_of(moment).rate == 2 * 20_736
    roles = [worker(0, steps_per_s=0.05, samples_per_s=3.0), server(0)]
    assert after(50, *roles).roles == roles
    assert totals_of(after(70, *roles)).rate == 0  # three of its steps


def test_those_who_are_done_have_counts_and_no_rates() -> None:
    ended = after(1, worker(0, left=True), worker(1, "done"), worker(2, "failed"), server(0, "done")).roles
    for role in ended:
        assert not {"samples_per_s", "steps_per_s", "requests_per_s", "busy", "waiting", "queue"} & role.status.keys()
        assert "eta_s" not in role.status.get("progress", {})
    assert [role.status.get("samples") for role in ended] == [614_400] * 3 + [None]
    assert (ended[0].status["samples_per_s_mean"], ended[3].status["requests"]) == (19_000.0, 900)


def test_a_worker_that_goes_on_has_its_speed_again() -> None:
    rates = RatesOfNow()
    for second in range(30):
        found = rates.of(JobSnapshot(1000.0 + second, [worker(0, steps=100 if second < 20 else 100 + second)]))
        assert bool(totals_of(found).rate) == (second < 10 or second >= 20)
