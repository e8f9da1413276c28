"""What a server remembers of its clients' changes: enough to answer every repeat, and never more than a bound."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from support.fleets import Talk, assert_ok, keys_of, refusal, values_of
from support.messages import names, naming

from torchfleet.base.errors import ServerBusy, TableError, WireError
from torchfleet.ps.net.wire import Command, pack
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state import sessions as module
from torchfleet.ps.server.state.sessions import MAX_AHEAD, Outcome, Sessions
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

SPEC = TableSpec("t", dim=1, rule=Rule("sgd", lr=1.0))


def apply(sessions: Sessions, client: int, sequence: int, floor: int = 1) -> bool:
    """Make a change if it is new; says whether it was."""
    is_new = sessions.begin(client, sequence, floor) is Outcome.RUNNING
    sessions.settle(client, sequence, Outcome.APPLIED)
    return is_new


class TestSessions:
    def test_a_change_is_new_once(self) -> None:
        sessions = Sessions()
        assert [apply(sessions, 1, 1) for _ in range(3)] == [True, False, False]

    def test_changes_may_come_in_any_order(self) -> None:
        sessions = Sessions()
        order = [3, 1, 3, 2, 1, 5, 4, 2, 5]
        assert [n for n in order if apply(sessions, 1, n)] == [3, 1, 2, 5, 4]

    def test_every_client_has_numbers_of_its_own(self) -> None:
        sessions = Sessions()
        assert all(apply(sessions, client, 1) for client in range(1, 50))
        assert len(sessions) == 49

    def test_one_that_waits_for_its_answer_is_still_running(self) -> None:
        sessions = Sessions()
        assert sessions.begin(1, 1, 1) is Outcome.RUNNING
        assert sessions.begin(1, 1, 1) is Outcome.RUNNING
        sessions.settle(1, 1, Outcome.APPLIED)
        assert sessions.begin(1, 1, 1) is Outcome.APPLIED

    def test_an_error_is_remembered_as_the_same_error(self) -> None:
        sessions, error = Sessions(), TableError("no")
        sessions.begin(1, 1, 1)
        sessions.settle(1, 1, error)
        assert sessions.begin(1, 1, 1) is error

    def test_what_is_below_the_floor_is_forgotten_but_not_made_again(self) -> None:
        sessions = Sessions()
        for n in range(1, 1001):
            apply(sessions, 1, n, floor=max(1, n - 3))
        assert len(sessions._sessions[1].outcomes) <= 4
        assert not any(apply(sessions, 1, n) for n in range(1, 1001))

    def test_a_floor_never_comes_down(self) -> None:
        sessions = Sessions()
        apply(sessions, 1, 10, floor=10)
        assert not apply(sessions, 1, 5, floor=1)
        assert sessions._sessions[1].floor == 10

    def test_a_change_too_far_ahead_is_refused(self) -> None:
        sessions = Sessions()
        assert apply(sessions, 1, MAX_AHEAD)
        with pytest.raises(WireError, match=naming(MAX_AHEAD + 1, MAX_AHEAD)):
            sessions.begin(1, MAX_AHEAD + 1, 1)
        with pytest.raises(WireError):
            sessions.begin(1, 2**64 - 1, 1)
        assert apply(sessions, 1, MAX_AHEAD + 1, floor=2)

    def test_a_client_cannot_fill_the_memory(self) -> None:
        sessions = Sessions()
        for n in range(1, 3 * MAX_AHEAD):
            try:
                apply(sessions, 1, n)
            except WireError:
                break
        assert len(sessions._sessions[1].outcomes) <= MAX_AHEAD

    def test_a_newcomer_is_refused_and_nobody_is_forgotten_for_it(self) -> None:
        """After 66,000 client numbers the first client's push is still known."""
        sessions = Sessions()
        for client in range(module.MAX_CLIENTS):
            apply(sessions, client, 1)
        for client in range(1000):
            with pytest.raises(ServerBusy, match=naming("65,536")):
                sessions.begin(module.MAX_CLIENTS + client, 1, 1, now=10.0)
        assert len(sessions) == module.MAX_CLIENTS
        assert not any(apply(sessions, client, 1) for client in (0, 1, module.MAX_CLIENTS - 1))

    def test_the_client_idle_longest_makes_room_after_its_lease(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_CLIENTS", 3)
        sessions = Sessions()
        for client in (1, 2, 3):
            apply(sessions, client, 1)
        assert sessions.begin(1, 1, 1, now=60.0) is Outcome.APPLIED  # so client 2 is idle longest
        with pytest.raises(ServerBusy):
            sessions.begin(4, 1, 1, now=module.LEASE - 1)
        assert sessions.begin(4, 1, 1, now=module.LEASE) is Outcome.RUNNING
        assert len(sessions) == 3
        assert [client for client in (1, 3) if apply(sessions, client, 1)] == []

    def test_one_that_waits_for_its_answer_keeps_its_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_CLIENTS", 1)
        sessions = Sessions()
        sessions.begin(1, 1, 1)
        with pytest.raises(ServerBusy):
            sessions.begin(2, 1, 1, now=10 * module.LEASE)

    def test_clients_of_a_worker_that_has_left_go_first_and_repeat_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_CLIENTS", 3)
        sessions = Sessions()
        for client, worker in ((1, 0), (2, 1), (3, 1)):
            sessions.begin(client, 1, 1, worker=worker, incarnation=70)
            sessions.settle(client, 1, Outcome.APPLIED)
        sessions.leave(1, incarnation=71)  # another process
        with pytest.raises(ServerBusy):
            sessions.begin(4, 1, 1)
        sessions.leave(1, incarnation=70)
        assert sessions.begin(3, 9, 1) is Outcome.APPLIED, "a late copy of a change is applied again"
        assert sessions.begin(4, 1, 1) is Outcome.RUNNING
        assert not apply(sessions, 1, 1)

    def test_refused_changes_keep_their_reason_for_a_while_and_their_refusal_for_ever(self) -> None:
        sessions = Sessions()
        tracemalloc.start()
        try:
            for n in range(1, MAX_AHEAD):
                sessions.begin(1, n, 1)
                sessions.settle(1, n, TableError(f"{n} " + "x" * 2000))
            size, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert size < 1_000_000, f"{size:,} bytes for refused changes of one client"
        assert str(sessions.begin(1, MAX_AHEAD - 1, 1)).startswith(f"{MAX_AHEAD - 1} x")
        assert sessions.begin(1, 1, 1) is module.REFUSED

    def test_outcomes_of_all_clients_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_OUTCOMES", 100)
        monkeypatch.setattr(module, "FAIR_SHARE", 10)
        sessions = Sessions()
        for n in range(1, 100):
            apply(sessions, 1, n)
        apply(sessions, 2, 1)
        with pytest.raises(ServerBusy, match=naming(100, 99)):
            sessions.begin(1, 100, 1)
        assert apply(sessions, 2, 2)
        assert not apply(sessions, 1, 99)
        assert apply(sessions, 1, 100, floor=50)
        assert sessions.num_outcomes == sum(len(session.outcomes) for session in sessions._sessions.values())

    def test_an_answer_for_a_forgotten_client_is_passed_over(self) -> None:
        sessions = Sessions()
        sessions.settle(1, 1, Outcome.APPLIED)
        sessions.begin(1, 5, 5)
        sessions.settle(1, 2, Outcome.APPLIED)
        assert len(sessions) == 1
        assert list(sessions._sessions[1].outcomes) == [5]


class TestServer:
    @pytest.fixture
    def talk(self, server: Server) -> Talk:
        talk = Talk(server)
        talk.create(SPEC)
        return talk

    def test_a_retried_push_is_applied_once_and_answered_every_time(self, talk: Talk) -> None:
        replies = [talk.push(SPEC, [1], [[1]], sequence=1, floor=1) for _ in range(5)]
        assert [reply.call for reply in replies] == sorted({reply.call for reply in replies})
        for reply in replies:
            assert_ok(reply)
        assert talk.pull(SPEC, [1]).tolist() == [[-1]]

    def test_an_error_is_repeated_although_the_request_would_now_be_right(self, talk: Talk, server: Server) -> None:
        other = TableSpec("other", dim=1)
        first = talk.push(other, [1], [[1]], sequence=1, floor=1)
        talk.create(other)
        again = talk.push(other, [1], [[1]], sequence=1, floor=1)
        assert refusal(first) == refusal(again)
        assert refusal(first)[0] == "TableError"
        assert talk.pull(other, [1]).tolist() == [[0]]
        assert_ok(talk.push(other, [1], [[1]], sequence=2, floor=1))

    @pytest.mark.parametrize("command", [Command.PUSH, Command.SET, Command.ERASE, Command.BARRIER])
    def test_a_change_without_a_number_is_refused(self, talk: Talk, command: Command) -> None:
        kind, text = refusal(talk.ask(command, keys_of(SPEC, [1]), values_of(SPEC, [[1]])))
        assert kind == "WireError"
        assert names(text, int(command))

    def test_a_change_too_far_ahead_is_refused_and_can_be_sent_again_later(self, talk: Talk) -> None:
        far = MAX_AHEAD + 1
        assert refusal(talk.push(SPEC, [1], [[1]], sequence=far, floor=1))[0] == "WireError"
        assert_ok(talk.push(SPEC, [1], [[1]], sequence=far, floor=far))
        assert talk.pull(SPEC, [1]).tolist() == [[-1]]

    def test_a_refused_role_uses_up_no_number(self, talk: Talk) -> None:
        arrays = keys_of(SPEC, [1]), values_of(SPEC, [[7]])
        assert refusal(talk.ask(Command.SET, *arrays, sequence=1, floor=1, role=1))[0] == "PermissionRefused"
        assert_ok(talk.ask(Command.SET, *arrays, sequence=1, floor=1))
        assert talk.pull(SPEC, [1]).tolist() == [[7]]

    def test_a_remembered_error_does_not_keep_its_request(self, talk: Talk) -> None:
        """An exception knows the functions that it came through, and they know the arrays."""
        rows = np.full((1_000_000, 1), np.nan, np.float32)
        tracemalloc.start()
        try:
            for _ in range(10):
                assert refusal(talk.push(SPEC, np.arange(len(rows)), rows.copy(), floor=1))[0] == "TableError"
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept < 3_000_000, f"after 10 refused pushes of 12 MB the server keeps {kept:,} bytes"

    @pytest.mark.parametrize(
        "body",
        [{"name": "n" * 1_000_000, "num_workers": 1, "timeout": -1.0}, {"n" * 1_000_000: 1}],
        ids=["a long value", "a long field"],
    )
    def test_remembered_errors_do_not_fill_the_memory(self, talk: Talk, body: dict[str, object]) -> None:
        """The text of an error is kept until the client's floor passes it: 4,096 of them, for every client."""
        tracemalloc.start()
        try:
            for _ in range(30):
                assert refusal(talk.ask(Command.BARRIER, pack(body), once=True, floor=1))[0] == "WireError"
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept < 3_000_000, f"after 30 refused requests of 1 MB the server keeps {kept:,} bytes"


def test_a_client_that_waits_for_an_answer_keeps_its_place_and_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLIENTS", 2)
    known = Sessions()
    known.begin(1, 1, 1, now=0.0)  # the oldest one, which waits
    known.begin(2, 1, 1, now=1.0)
    known.settle(2, 1, Outcome.APPLIED)
    with pytest.raises(ServerBusy):
        known.begin(3, 1, 1, now=module.LEASE)
    assert known.begin(3, 1, 1, now=module.LEASE + 1.0) is Outcome.RUNNING  # in the place of client 2
    assert known.is_running(1, 1)
    with pytest.raises(ServerBusy):
        known.begin(4, 1, 1, now=module.LEASE + 2.0)
