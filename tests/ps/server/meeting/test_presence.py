"""Which workers are there, on a clock that the test turns; and what those who wait are told."""

from __future__ import annotations

import pytest
from support.messages import names, naming

from torchfleet.base.errors import RoleError
from torchfleet.ps.server.meeting.presence import GRACE, QUIET, RESTART_TIMEOUTS, JoinBody, Presence

TIMEOUT, SYNC_TIMEOUT = 10.0, 100.0


def join(presence: Presence, worker: int, now: float, process: int = 1, **fields: object) -> bool:
    body = JoinBody("here", 100 + process, 2, TIMEOUT, SYNC_TIMEOUT, **fields)  # type: ignore[arg-type]
    return presence.join(worker, process, body, now)


def watch(presence: Presence, until: float, start: float = 0.0) -> None:
    """The server's clock runs as it does while it serves."""
    now = start
    while now <= until:
        presence.forgive(presence.pause(now), now)
        now += 0.5


def test_a_silent_worker_is_lost_after_its_timeout_and_back_with_its_next_sign() -> None:
    presence = Presence()
    join(presence, 1, 0.0)
    watch(presence, TIMEOUT)
    assert presence.lost(TIMEOUT - 0.1) == {}
    lost = presence.lost(TIMEOUT)
    assert list(lost) == [1]
    assert names(lost[1], "worker 1 (here, pid 101)", "10 s")
    join(presence, 1, TIMEOUT, again=True)
    assert presence.lost(TIMEOUT) == {}


def test_a_pause_of_the_server_itself_counts_for_nobody() -> None:
    presence = Presence()
    presence.forgive(presence.pause(0.0), 0.0)
    join(presence, 0, 0.0)
    presence.forgive(presence.pause(60.0), 60.0)
    assert presence.lost(60.0) == {}


def test_a_worker_that_says_that_it_ends_is_lost_after_a_grace() -> None:
    presence = Presence()
    join(presence, 1, 0.0)
    join(presence, 1, 1.0, again=True, ended=True)
    assert presence.lost(1.0 + GRACE / 2) == {}
    assert "fleet.stop_worker()" in presence.lost(1.0 + GRACE)[1]


def test_a_worker_that_has_left_is_not_missed_and_a_late_sign_does_not_bring_it_back() -> None:
    presence = Presence()
    join(presence, 1, 0.0)
    presence.leave(1)
    join(presence, 1, 1.0, again=True)
    watch(presence, 50.0)
    assert presence.lost(50.0) == {}


class TestAWorkerThatIsBeingStarted:
    LATE = (RESTART_TIMEOUTS + 4) * TIMEOUT

    def ended(self) -> Presence:
        """The only worker has ended at 1.0."""
        presence = Presence()
        join(presence, 0, 0.0, restart=0, max_restart=1)
        join(presence, 0, 1.0, again=True, ended=True)
        return presence

    def test_servers_stay_and_others_wait_for_as_long_as_its_launcher_said(self) -> None:
        presence = self.ended()
        assert presence.is_deserted(0, 1, self.LATE)
        assert presence.expect(0, 20.0, self.LATE - 15.0)
        assert not presence.expect(0, 20.0, self.LATE - 10.0), "no news"
        assert not presence.is_deserted(0, 1, self.LATE)
        assert presence.given_up(self.LATE) == {}
        assert list(presence.lost(self.LATE)) == [0]
        assert presence.is_deserted(0, 1, self.LATE + 10.0)
        assert list(presence.given_up(self.LATE + 10.0)) == [0]

    def test_it_is_no_longer_waited_for_once_it_has_joined(self) -> None:
        presence = self.ended()
        presence.expect(0, 1e6, 2.0)
        join(presence, 0, 3.0, process=2, restart=1)
        join(presence, 0, 4.0, process=2, restart=1, again=True, ended=True)
        assert presence.is_deserted(0, 1, self.LATE)

    def test_a_copy_of_the_state_has_it_and_a_pause_of_the_server_does_not_count(self) -> None:
        presence, copy = self.ended(), Presence()
        presence.expect(0, 20.0, self.LATE - 15.0)
        copy.restore(presence.export())
        assert not copy.is_deserted(0, 1, self.LATE)
        copy.forgive(30.0, self.LATE + 30.0)
        assert not copy.is_deserted(0, 1, self.LATE + 30.0)
        old = {name: value for name, value in presence.export().items() if name != "starting"}
        copy.restore(old)  # of an earlier release
        assert copy.is_deserted(0, 1, self.LATE)

    def test_it_is_a_sign_of_life_of_the_job_but_begins_none(self) -> None:
        presence = self.ended()
        presence.expect(0, 1.0, self.LATE)
        assert not presence.is_orphaned(TIMEOUT, self.LATE + 1.0)
        fresh = Presence()
        fresh.expect(0, 1.0, 0.0)
        assert not fresh.is_orphaned(TIMEOUT, self.LATE), "no worker has joined yet"


class TestTwoProcessesWithOneNumber:
    def test_the_second_is_refused_and_the_first_stays(self) -> None:
        presence = Presence()
        join(presence, 1, 0.0, 1)
        with pytest.raises(RoleError, match=naming("worker 1", "pid 101")):
            join(presence, 1, 1.0, 2)
        join(presence, 1, 2.0, 1, again=True)

    @pytest.mark.parametrize(
        ("later", "now"),
        [({"restart": 1}, QUIET * TIMEOUT), ({}, TIMEOUT)],
        ids=["started again by its launcher", "the first is silent"],
    )
    def test_one_that_takes_the_place_of_a_dead_one_is_let_in(self, later: dict[str, int], now: float) -> None:
        presence = Presence()
        join(presence, 1, 0.0, 1)
        join(presence, 1, now, 2, **later)
        with pytest.raises(RoleError):
            join(presence, 1, now + 1, 1, again=True)

    def test_one_whose_process_ended_is_replaced_at_once(self) -> None:
        presence = Presence()
        join(presence, 1, 0.0, 1)
        join(presence, 1, 1.0, 1, again=True, ended=True)
        join(presence, 1, 1.1, 2)
        assert presence.lost(1.1 + GRACE) == {}


class TestDeserted:
    def test_a_server_gives_up_workers_that_ended_after_time_for_a_restart(self) -> None:
        presence = Presence()
        join(presence, 0, 0.0)
        join(presence, 0, 0.0, again=True, ended=True)
        assert not presence.is_deserted(1, 2, RESTART_TIMEOUTS * TIMEOUT - 1)
        assert presence.is_deserted(1, 2, RESTART_TIMEOUTS * TIMEOUT)

    def test_a_worker_that_is_only_silent_may_be_so_for_long(self) -> None:
        presence = Presence()
        join(presence, 0, 0.0)
        assert not presence.is_deserted(1, 2, SYNC_TIMEOUT - 1)
        assert presence.is_deserted(1, 2, SYNC_TIMEOUT)

    def test_a_server_waits_for_workers_that_never_came(self) -> None:
        presence = Presence()
        assert not presence.is_deserted(0, 2, 1e6)
        join(presence, 0, 0.0)
        assert not presence.is_deserted(0, 2, 1e6)
