"""What messages mean: who may send which, what each does, and that one that is refused has changed nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from support.cases import each_of
from support.fleets import OWN_RATE, Talk, assert_ok, keys_of, push_arrays, refusal, values_of
from support.messages import INTERNAL_ERROR, names

from torchfleet.ps.net import wire
from torchfleet.ps.net.wire import (
    DELTA,
    MAX_ARRAYS,
    NO_CREATE,
    OK,
    VERSIONS,
    Array,
    Command,
    Role,
    decode_reply,
    pack,
    unpack,
)
from torchfleet.ps.server import commands as module
from torchfleet.ps.server.commands import COMMANDS
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state.claims import MAX_TABLES
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec

SGD = Rule("sgd", lr=1.0)
ROWS = TableSpec("rows", dim=2, rule=SGD, initializer=Initializer("constant", 0.5))
OTHER = TableSpec("other", dim=1, rule=SGD)
ARRAY = TableSpec("array", "array", size=10, dim=1, rule=SGD)
DENSE = TableSpec("dense", "dense", size=4, rule=SGD)
TABLES = [ROWS, OTHER, ARRAY, DENSE]
NAN = float("nan")


@pytest.fixture
def talk(server: Server) -> Talk:
    return with_tables(server)


def with_tables(server: Server) -> Talk:
    talk = Talk(server)
    for spec in TABLES:
        talk.create(spec)
    return talk


def contents(server: Server) -> dict[str, list]:
    """Everything that the tables hold."""
    keys = np.arange(10, dtype=np.uint64)
    return {
        table.spec.name: [
            table.stats()["rows"],
            table.step,
            (table.get(0, table.size) if table.spec.kind == "dense" else table.pull(keys, create=False)).tolist(),
        ]
        for table in server.state.tables.values()
    }


def some_arrays(command: Command) -> list[Array]:
    """A request of this kind that a server accepts from a role that may send it."""
    one = {
        Command.CREATE_TABLE: [pack(ROWS)],
        Command.PULL: [keys_of(ROWS, [1])],
        Command.PUSH: push_arrays(ROWS, [1], [[1, 1]]),
        Command.SET: [keys_of(ROWS, [1]), values_of(ROWS, [[1, 1]])],
        Command.ERASE: [keys_of(ROWS, [1])],
        Command.BARRIER: [pack({"name": "b", "num_workers": 1, "timeout": 1.0})],
        Command.JOIN: [pack({"host": "h", "pid": 1, "num_workers": 1, "timeout": 1.0, "sync_timeout": 1.0})],
    }
    return one.get(command, [])


class TestRoles:
    FIRST = (Command.CREATE_TABLE, Command.SET, Command.ERASE)
    REPLICAS = frozenset({Command.FOLLOW, Command.APPEND, Command.CONFIRM, Command.LOST})  # of server/replicas

    @each_of("command", [c for c in Command if c <= Command.STOP], ids=lambda command: command.name)
    @each_of("role", Role, ids=lambda role: role.name)
    @each_of("is_proved", [False, True], ids=["by its word", "by its key"])
    def test_a_command_is_for_its_roles(self, command: Command, role: Role, is_proved: bool) -> None:
        talk = with_tables(Server(max_table_bytes=1 << 22))
        least = (
            Role.LAUNCHER if command is Command.STOP else Role.FIRST_WORKER if command in self.FIRST else Role.WORKER
        )
        claimed = Role.LAUNCHER if is_proved else role
        assert_ok(talk.ask(Command.JOIN, *some_arrays(Command.JOIN)))
        message = talk.message(command, *some_arrays(command), once=COMMANDS[command].once, role=claimed)
        (answer,) = talk.server.handle(talk, wire.encode(message), role if is_proved else None)
        reply = decode_reply(answer[1])
        if least <= role <= Role.LAUNCHER:
            assert_ok(reply)
        else:
            kind, text = refusal(reply)
            assert kind == "PermissionRefused"
            assert names(text, command.name, role.name.lower())
        assert talk.server.is_stopping == (command is Command.STOP and role is Role.LAUNCHER)

    def test_a_key_may_also_prove_less_than_the_message_claims(self, talk: Talk) -> None:
        message = talk.message(Command.STOP, role=Role.LAUNCHER)
        (answer,) = talk.server.handle(talk, wire.encode(message), Role.WORKER)
        assert refusal(decode_reply(answer[1]))[0] == "PermissionRefused"
        assert not talk.server.is_stopping

    @pytest.mark.parametrize("role", [0, 5, 255])
    def test_an_unknown_role_may_do_nothing(self, talk: Talk, role: int) -> None:
        for command in COMMANDS:
            kind, text = refusal(talk.ask(command, role=role))
            assert kind == "PermissionRefused"
            assert names(text, command.name, *(known.name.lower() for known in COMMANDS[command].roles), role)

    def test_every_command_has_an_entry(self) -> None:
        of_heter_workers = {Command.FORWARD, Command.BACKWARD}
        assert set(COMMANDS) | self.REPLICAS == set(Command) - of_heter_workers
        assert not set(COMMANDS) & self.REPLICAS

    def test_a_server_without_replicas_refuses_what_replicas_say(self, talk: Talk) -> None:
        for command in self.REPLICAS:
            assert refusal(talk.ask(command, role=Role.SERVER))[0] == "WireError"


class TestUnknown:
    @pytest.mark.parametrize("command", [0, 99, 200, 255])
    def test_an_unknown_command_is_answered_with_the_known_ones(self, talk: Talk, command: int) -> None:
        kind, text = refusal(talk.ask(command))
        assert kind == "WireError"
        assert names(text, command)
        assert all(known.name in text for known in Command)

    @pytest.mark.parametrize(
        ("command", "arrays"),
        [
            (Command.PULL, [keys_of(TableSpec("nobody"), [1])]),
            (Command.PUSH, push_arrays(TableSpec("nobody"), [1], [[1]])),
            (Command.SET, [keys_of(TableSpec("nobody"), [1]), values_of(TableSpec("nobody"), [[1]])]),
            (Command.ERASE, [keys_of(TableSpec("nobody"), [1])]),
        ],
        ids=lambda value: value.name if isinstance(value, Command) else "",
    )
    def test_an_unknown_table_is_answered_with_the_known_ones(
        self, talk: Talk, command: Command, arrays: list[Array]
    ) -> None:
        kind, text = refusal(talk.ask(command, *arrays, once=COMMANDS[command].once))
        assert kind == "TableError"
        assert names(text, "'array'", "'dense'", "'other'", "'rows'")

    def test_a_server_without_tables_says_so(self, server: Server) -> None:
        assert refusal(Talk(server).ask(Command.PULL, keys_of(ROWS, [1])))[0] == "TableError"

    def test_a_reply_carries_the_numbers_of_its_request(self, talk: Talk) -> None:
        for command in (Command.PING, Command.PULL, 99):
            reply = talk.ask(command, call=2**64 - 1, worker=2**32 - 1)
            assert (reply.command, reply.call, reply.worker) == (command, 2**64 - 1, 2**32 - 1)

    def test_broken_bytes_are_answered_to_their_call(self, talk: Talk) -> None:
        header, *_ = wire.encode(talk.message(Command.PULL, keys_of(ROWS, [1]), call=77))
        for frames in ([header], [header, b"123"], [header, bytes(8), b""]):
            ((peer, answer),) = talk.server.handle("peer", frames, None)
            assert peer == "peer"
            assert decode_reply(answer).call == 77
            assert refusal(decode_reply(answer))[0] == "WireError"

    def test_all_replies_of_a_server_carry_one_number_of_its_process(self, talk: Talk) -> None:
        numbers = {talk.ask(command).incarnation for command in (Command.PING, Command.STATS, 99)}
        assert len(numbers) == 1
        assert numbers != {Talk(Server()).ask(Command.PING).incarnation}


class TestTables:
    def test_making_a_table_again_keeps_its_rows(self, talk: Talk) -> None:
        assert_ok(talk.push(ROWS, [1], [[1, 1]]))
        talk.create(ROWS)
        assert talk.pull(ROWS, [1]).tolist() == [[-0.5, -0.5]]

    def test_making_it_again_otherwise_is_refused(self, talk: Talk) -> None:
        for changes, there, asked in (
            ({"dim": 3}, "dim=2", "dim=3"),
            ({"seed": 7, "rule": Rule("adam", lr=0.25)}, "rule.name='sgd', rule.lr=1.0, seed=0", "rule.name='adam'"),
        ):
            other = msgspec.structs.replace(ROWS, **changes)
            kind, text = refusal(talk.ask(Command.CREATE_TABLE, pack(other)))
            assert kind == "TableError"
            assert names(text, "'rows'", there, asked)

    def test_a_table_that_does_not_fit_is_refused(self, talk: Talk) -> None:
        before = contents(talk.server)
        for spec in (TableSpec("big", "dense", size=1 << 40), TableSpec("big", "array", size=1 << 40)):
            assert refusal(talk.ask(Command.CREATE_TABLE, pack(spec)))[0] == "TableError"
        assert contents(talk.server) == before

    @pytest.mark.parametrize("num_arrays", [0, 2])
    def test_a_description_is_one_array(self, talk: Talk, num_arrays: int) -> None:
        arrays = [pack(TableSpec("x"))] * num_arrays
        kind, text = refusal(talk.ask(Command.CREATE_TABLE, *arrays))
        assert kind == "WireError"
        assert names(text, num_arrays)

    def test_the_number_of_tables_is_bounded(self) -> None:
        talk = Talk(Server(max_table_bytes=1 << 12))
        for i in range(MAX_TABLES):
            talk.create(TableSpec(f"t{i}", "dense", size=1))
        kind, text = refusal(talk.ask(Command.CREATE_TABLE, pack(TableSpec("one more", "dense", size=1))))
        assert (kind, names(text, MAX_TABLES)) == ("TableError", True)
        talk.create(TableSpec("t0", "dense", size=1))
        body = unpack(talk.ask(Command.STATS).arrays[0], dict)
        assert len(body["tables"]) == MAX_TABLES

    def test_stats_tell_what_is_there(self, talk: Talk) -> None:
        talk.pull(ROWS, [1, 2, 3, 1])
        talk.ask(99)
        assert_ok(talk.push(DENSE, [], [1, 1, 1, 1]))
        body = unpack(talk.ask(Command.STATS).arrays[0], dict)
        assert {name: table["rows"] for name, table in body["tables"].items()} == {
            "rows": 3, "other": 0, "array": 0, "dense": 4,
        }  # fmt: skip
        assert {name: table["kind"] for name, table in body["tables"].items()} == {
            "rows": "sparse", "other": "sparse", "array": "array", "dense": "dense",
        }  # fmt: skip
        assert body["tables"]["dense"]["step"] == 1
        assert (body["requests"], body["errors"], body["clients"]) == (len(TABLES) + 4, 1, 1)

    @pytest.mark.parametrize("version", [0.0, 1e308, -1e308, -1.0, NAN, float("inf"), float("-inf")], ids=str)
    def test_no_number_in_a_push_ends_the_statistics(self, talk: Talk, version: float) -> None:
        rates = np.array([[NAN, version]])
        arrays = [Array(0, rates), keys_of(ROWS, [1]), values_of(ROWS, [[1, 1]])]
        talk.ask(Command.PUSH, *arrays, once=True)
        assert unpack(talk.ask(Command.STATS).arrays[0], dict)["tables"]["rows"]["rows"] <= 1


class TestPull:
    def test_missing_keys_are_created_unless_the_flag_says_no(self, talk: Talk) -> None:
        assert talk.pull(ROWS, [5, 6], flags=NO_CREATE).tolist() == [[0, 0], [0, 0]]
        assert contents(talk.server)["rows"][0] == 0
        assert talk.pull(ROWS, [5, 6, 5]).tolist() == [[0.5, 0.5]] * 3
        assert contents(talk.server)["rows"][0] == 2

    def test_sections_are_answered_in_their_order(self, talk: Talk) -> None:
        reply = talk.ask(Command.PULL, keys_of(DENSE, [1, 3]), keys_of(ROWS, [1]), keys_of(OTHER, [1, 2]))
        assert [(array.number, array.data.shape) for array in reply.arrays] == [
            (DENSE.number, (2, 1)),
            (ROWS.number, (1, 2)),
            (OTHER.number, (2, 1)),
        ]

    def test_a_pull_of_nothing_is_answered_with_nothing(self, talk: Talk) -> None:
        assert talk.ask(Command.PULL).arrays == []
        assert talk.pull(ROWS, []).shape == (0, 2)

    @pytest.mark.parametrize(
        ("bounds", "kind"),
        [
            ([0, 5], "TableError"),
            ([3, 2], "TableError"),
            ([0, 2**64 - 1], "TableError"),
            ([2**64 - 1, 2**64 - 1], "TableError"),
            ([2**63, 2**63], "TableError"),
            ([], "WireError"),
            ([0], "WireError"),
            ([0, 1, 2], "WireError"),
        ],
        ids=str,
    )
    def test_a_range_outside_a_dense_table_is_refused(self, talk: Talk, bounds: list[int], kind: str) -> None:
        assert refusal(talk.ask(Command.PULL, keys_of(DENSE, bounds)))[0] == kind

    @pytest.mark.parametrize("bounds", [[0, 4], [1, 3], [0, 0], [4, 4]], ids=str)
    def test_a_range_of_a_dense_table_is_its_elements(self, talk: Talk, bounds: list[int]) -> None:
        assert_ok(talk.ask(Command.SET, keys_of(DENSE, [0]), values_of(DENSE, [1, 2, 3, 4]), once=True))
        assert talk.pull(DENSE, bounds).reshape(-1).tolist() == [1, 2, 3, 4][bounds[0] : bounds[1]]

    def test_keys_beyond_an_array_are_refused_and_create_nothing_elsewhere(self, talk: Talk) -> None:
        kind, text = refusal(talk.ask(Command.PULL, keys_of(ROWS, [1]), keys_of(ARRAY, [3, 10])))
        assert kind == "TableError"
        assert names(text, "'array'", 0, 9, "num_embeddings", 10)
        assert contents(talk.server)["rows"][0] == 0

    @pytest.mark.parametrize(
        "keys",
        [np.zeros((2, 1), np.float32), np.zeros((2, 1), np.uint8), np.zeros((2, 2), np.uint64), np.zeros((2, 0), "u8")],
        ids=["float32", "bytes", "two columns", "no column"],
    )
    @pytest.mark.parametrize("command", [Command.PULL, Command.ERASE])
    def test_keys_are_one_column_of_uint64(self, talk: Talk, command: Command, keys: np.ndarray) -> None:
        reply = talk.ask(command, Array(ROWS.number, keys), once=COMMANDS[command].once)
        assert refusal(reply)[0] == "WireError"

    def test_a_reply_larger_than_a_frame_is_refused(self, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_FRAME", 12)
        assert names(refusal(talk.ask(Command.PULL, keys_of(DENSE, [0, 4])))[1], 16, 12)
        assert names(refusal(talk.ask(Command.PULL, keys_of(ROWS, [1, 2])))[1], 16, 12)
        assert len(talk.pull(DENSE, [0, 3])) == 3

    def test_sections_that_do_not_fit_together_create_nothing(self) -> None:
        talk = Talk(Server(max_table_bytes=160))  # ten rows of a key and two numbers
        talk.create(ROWS)
        reply = talk.ask(Command.PULL, keys_of(ROWS, range(8)), keys_of(ROWS, range(8, 16)))
        if reply.status != OK:
            assert contents(talk.server)["rows"][0] == 0

    @pytest.mark.parametrize("command", [Command.PULL, Command.PULL_CHANGED])
    def test_a_request_with_as_many_arrays_as_a_message_can_have_is_answered(
        self, talk: Talk, command: Command
    ) -> None:
        """The reply has more arrays than the request; that must not end the server."""
        received = [Array(0, np.zeros(1, np.uint64))] if command is Command.PULL_CHANGED else []
        arrays = received + [keys_of(ROWS, [])] * (MAX_ARRAYS - len(received))
        reply = talk.ask(command, *arrays, flags=VERSIONS)
        assert reply.call > 0
        assert_ok(talk.ask(Command.PING))

    def test_changes_for_a_worker_are_not_given_to_another_process(self) -> None:
        """A late copy of its predecessor would begin anew, and the worker never hear of the changes up to then."""
        server = Server(num_workers=2)
        first, second, former = Talk(server, 1), Talk(server, 2, worker=1), Talk(server, 3, Role.WORKER)
        first.create(ROWS)
        body = {"host": "h", "pid": 1, "num_workers": 2, "timeout": 5.0, "sync_timeout": 9.0}
        assert_ok(first.ask(Command.JOIN, pack(body)))
        assert_ok(first.ask(Command.PULL_CHANGED, Array(0, np.zeros(1, np.uint64)), keys_of(ROWS, [])))
        assert_ok(second.push(ROWS, [7], np.ones((1, ROWS.dim)), flags=DELTA))
        late = former.ask(Command.PULL_CHANGED, Array(0, np.zeros(1, np.uint64)), keys_of(ROWS, []))
        assert refusal(late)[0] == "RoleError"
        reply = first.ask(Command.PULL_CHANGED, Array(0, np.ones(1, np.uint64)), keys_of(ROWS, []))
        assert reply.arrays[1].data.reshape(-1).tolist() == [7]

    def test_workers_that_share_a_copy_ask_in_the_name_of_one_of_them(self) -> None:
        server = Server(num_workers=2)
        first, second = Talk(server, 1), Talk(server, 2, Role.WORKER, worker=1)
        first.create(ROWS)
        body = {"host": "h", "pid": 1, "num_workers": 2, "timeout": 5.0, "sync_timeout": 9.0}
        for talk in (first, second):
            assert_ok(talk.ask(Command.JOIN, pack(body)))
        asked = Array(0, np.zeros(1, np.uint64)), keys_of(ROWS, [])
        assert_ok(second.ask(Command.PULL_CHANGED, *asked, worker=0))

    def test_a_reply_that_cannot_be_encoded_is_answered_with_an_error(
        self, talk: Talk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every way to a large reply is to be checked; if one is not, it must not end the server."""
        big = TableSpec("big", "dense", size=1000)
        talk.create(big)
        monkeypatch.setattr(wire, "MAX_FRAME", 1000)  # larger than an error, smaller than the table
        reply = talk.ask(Command.PULL_CHANGED, Array(0, np.zeros(1, np.uint64)), keys_of(big, []))
        assert "1,000" in refusal(reply)[1]


Sections = Callable[[], list[Array]]

BAD_PUSHES: dict[str, tuple[Sections, str]] = {
    "no array": (lambda: [], "WireError"),
    "no rate": (lambda: push_arrays(ROWS, [1], [[1, 1]])[1:], "WireError"),
    "rates in float32": (
        lambda: [Array(0, np.ones(1, np.float32)), *push_arrays(ROWS, [1], [[1, 1]])[1:]],
        "WireError",
    ),
    "a rate too many": (lambda: [Array(0, np.ones(2)), *push_arrays(ROWS, [1], [[1, 1]])[1:]], "WireError"),
    "a rate too few": (lambda: [Array(0, np.ones(0)), *push_arrays(ROWS, [1], [[1, 1]])[1:]], "WireError"),
    "rates of no width": (lambda: [Array(0, np.ones((1, 0))), *push_arrays(ROWS, [1], [[1, 1]])[1:]], "WireError"),
    "a negative rate": (lambda: [Array(0, -np.ones(1)), *push_arrays(ROWS, [1], [[1, 1]])[1:]], "TableError"),
    "an infinite rate": (lambda: [Array(0, np.full(1, np.inf)), *push_arrays(ROWS, [1], [[1, 1]])[1:]], "TableError"),
    "keys without values": (lambda: push_arrays(ROWS, [1], [[1, 1]])[:2], "WireError"),
    "values of another table": (lambda: [Array(0, OWN_RATE), keys_of(ROWS, [1]), values_of(OTHER, [[1]])], "WireError"),
    "keys as float64": (
        lambda: [Array(0, OWN_RATE), Array(ROWS.number, np.ones(1)), values_of(ROWS, [[1, 1]])],
        "WireError",
    ),
    "values as float64": (
        lambda: [Array(0, OWN_RATE), keys_of(ROWS, [1]), Array(ROWS.number, np.ones((1, 2)))],
        "WireError",
    ),
    "rows too wide": (lambda: push_arrays(ROWS, [1], [[1, 1, 1]]), "TableError"),
    "rows too narrow": (lambda: push_arrays(ROWS, [1], [[1]]), "TableError"),
    "a row too many": (lambda: push_arrays(ROWS, [1], [[1, 1], [1, 1]]), "TableError"),
    "a row too few": (lambda: push_arrays(ROWS, [1, 2], [[1, 1]]), "TableError"),
    "NaN": (lambda: push_arrays(ROWS, [1, 2], [[1, 1], [1, NAN]]), "TableError"),
    "infinity": (lambda: push_arrays(ROWS, [1, 2], [[1, 1], [float("-inf"), 1]]), "TableError"),
    "an id beyond the array": (lambda: push_arrays(ARRAY, [10], [[1]]), "TableError"),
    "a dense block too short": (lambda: push_arrays(DENSE, [], [1, 1, 1]), "TableError"),
    "a dense block too long": (lambda: push_arrays(DENSE, [], [1, 1, 1, 1, 1]), "TableError"),
    "NaN in a dense block": (lambda: push_arrays(DENSE, [], [1, 1, NAN, 1]), "TableError"),
    "keys for a dense block": (lambda: push_arrays(DENSE, [3, 2, 1, 0], [1, 1, 1, 1]), "TableError"),
}

BAD_SETS: dict[str, tuple[Sections, str]] = {
    "one array": (lambda: [keys_of(ROWS, [1])], "WireError"),
    "values of another table": (lambda: [keys_of(ROWS, [1]), values_of(OTHER, [[1]])], "WireError"),
    "values as float64": (lambda: [keys_of(ROWS, [1]), Array(ROWS.number, np.ones((1, 2)))], "WireError"),
    "values as bytes": (lambda: [keys_of(ROWS, [1]), Array(ROWS.number, np.ones((1, 2), np.uint8))], "WireError"),
    "rows too wide": (lambda: [keys_of(ROWS, [1]), values_of(ROWS, [[1, 1, 1]])], "TableError"),
    "a row too few": (lambda: [keys_of(ROWS, [1, 2]), values_of(ROWS, [[1, 1]])], "TableError"),
    "NaN": (lambda: [keys_of(ROWS, [1]), values_of(ROWS, [[1, NAN]])], "TableError"),
    "no place to start": (lambda: [keys_of(DENSE, []), values_of(DENSE, [1, 1])], "WireError"),
    "two places to start": (lambda: [keys_of(DENSE, [0, 1]), values_of(DENSE, [1, 1])], "WireError"),
    "a place outside": (lambda: [keys_of(DENSE, [3]), values_of(DENSE, [1, 1])], "TableError"),
    "the last place there is": (lambda: [keys_of(DENSE, [2**64 - 1]), values_of(DENSE, [1])], "TableError"),
    "infinity": (lambda: [keys_of(DENSE, [0]), values_of(DENSE, [float("inf")])], "TableError"),
}


def good_push() -> list[Array]:
    return push_arrays(OTHER, [1], [[1]])


def good_set() -> list[Array]:
    return [keys_of(OTHER, [1]), values_of(OTHER, [[1]])]


class TestChanges:
    def test_gradients_of_equal_keys_are_summed(self, talk: Talk) -> None:
        assert_ok(talk.push(ROWS, [1, 2, 1], [[1, 2], [3, 4], [5, 6]]))
        assert talk.pull(ROWS, [1, 2]).tolist() == [[-5.5, -7.5], [-2.5, -3.5]]

    def test_a_rate_takes_the_place_of_the_tables_own(self, talk: Talk) -> None:
        assert_ok(talk.ask(Command.PUSH, Array(0, np.array([0.5])), *good_push()[1:], once=True))
        assert talk.pull(OTHER, [1]).tolist() == [[-0.5]]

    def test_a_push_of_nothing_is_taken(self, talk: Talk) -> None:
        assert_ok(talk.ask(Command.PUSH, Array(0, np.empty(0)), once=True))
        assert_ok(talk.push(ROWS, [], np.empty((0, 2))))
        assert contents(talk.server)["rows"][0] == 0

    def test_set_overwrites_and_erase_takes_out(self, talk: Talk) -> None:
        assert_ok(talk.ask(Command.SET, keys_of(ROWS, [1, 2]), values_of(ROWS, [[1, 2], [3, 4]]), once=True))
        assert_ok(talk.ask(Command.ERASE, keys_of(ROWS, [1, 99]), once=True))
        assert talk.pull(ROWS, [1, 2]).tolist() == [[0.5, 0.5], [3, 4]]

    def test_a_part_of_a_dense_table_can_be_set(self, talk: Talk) -> None:
        assert_ok(talk.ask(Command.SET, keys_of(DENSE, [1]), values_of(DENSE, [7, 8]), once=True))
        assert talk.pull(DENSE, [0, 4]).reshape(-1).tolist() == [0, 7, 8, 0]

    def test_a_dense_table_has_no_rows_to_erase(self, talk: Talk) -> None:
        kind, text = refusal(talk.ask(Command.ERASE, keys_of(OTHER, [1]), keys_of(DENSE, [1]), once=True))
        assert kind == "TableError"
        assert "'dense'" in text

    @pytest.mark.parametrize(("sections", "kind"), BAD_PUSHES.values(), ids=BAD_PUSHES.keys())
    def test_a_bad_push_is_refused(self, talk: Talk, sections: Sections, kind: str) -> None:
        before = contents(talk.server)
        assert refusal(talk.ask(Command.PUSH, *sections(), once=True))[0] == kind
        assert contents(talk.server) == before

    @pytest.mark.parametrize(
        ("sections", "kind"),
        [case for name, case in BAD_PUSHES.items() if "rate" not in name and name != "no array"],
        ids=[name for name in BAD_PUSHES if "rate" not in name and name != "no array"],
    )
    def test_a_bad_second_section_of_a_push_leaves_the_first_table_alone(
        self, talk: Talk, sections: Sections, kind: str
    ) -> None:
        assert_ok(talk.push(OTHER, [1], [[1]]))
        before = contents(talk.server)
        arrays = [Array(0, np.full(2, NAN)), *good_push()[1:], *sections()[1:]]
        assert refusal(talk.ask(Command.PUSH, *arrays, once=True))[0] == kind
        assert contents(talk.server) == before

    @pytest.mark.parametrize(("sections", "kind"), BAD_SETS.values(), ids=BAD_SETS.keys())
    def test_a_bad_section_of_a_set_leaves_the_others_alone(self, talk: Talk, sections: Sections, kind: str) -> None:
        before = contents(talk.server)
        assert refusal(talk.ask(Command.SET, *sections(), once=True))[0] == kind
        assert refusal(talk.ask(Command.SET, *good_set(), *sections(), once=True))[0] == kind
        assert contents(talk.server) == before

    def test_a_bad_section_of_an_erase_leaves_the_others_alone(self, talk: Talk) -> None:
        talk.pull(ROWS, [1, 2])
        before = contents(talk.server)
        for bad in (keys_of(DENSE, [1]), keys_of(ARRAY, [10]), keys_of(TableSpec("nobody"), [1])):
            assert refusal(talk.ask(Command.ERASE, keys_of(ROWS, [1]), bad, once=True))[0] == "TableError"
        assert contents(talk.server) == before

    @pytest.mark.parametrize("second", ["push", "set"])
    def test_a_table_twice_in_a_message_is_refused(self, talk: Talk, second: str) -> None:
        pair = good_set()
        before = contents(talk.server)
        for arrays in ([*pair, *pair], [*pair, keys_of(ROWS, [1]), values_of(ROWS, [[1, 1]]), *pair]):
            rates = [Array(0, np.full(len(arrays) // 2, NAN))] if second == "push" else []
            command = Command.PUSH if second == "push" else Command.SET
            kind, text = refusal(talk.ask(command, *rates, *arrays, once=True))
            assert kind == "WireError"
            assert "twice" in text
        assert contents(talk.server) == before

    def test_a_full_table_takes_nothing_of_a_push_that_does_not_fit(self) -> None:
        talk = Talk(Server(max_table_bytes=160))  # ten rows of a key and two numbers
        talk.create(ROWS)
        talk.create(DENSE)
        assert_ok(talk.push(ROWS, range(10), np.ones((10, 2))))
        before = contents(talk.server)
        arrays = [*push_arrays(DENSE, [], [1] * 4), *push_arrays(ROWS, [9, 10], np.ones((2, 2)))[1:]]
        arrays[0] = Array(0, np.full(2, NAN))
        kind, text = refusal(talk.ask(Command.PUSH, *arrays, once=True))
        assert kind == "TableError"
        assert "'rows'" in text
        assert contents(talk.server) == before
        assert_ok(talk.push(ROWS, [9], np.ones((1, 2))))


class TestEnd:
    def test_stop_is_answered_first(self, talk: Talk) -> None:
        assert_ok(talk.ask(Command.STOP))
        assert talk.server.is_stopping

    def test_the_server_ends_when_all_workers_have_left(self) -> None:
        server = Server(num_workers=3)
        for worker in (0, 1, 1, 0):
            assert_ok(Talk(server, worker=worker).ask(Command.LEAVE))
            assert not server.is_stopping
        assert_ok(Talk(server, worker=2).ask(Command.LEAVE))
        assert server.is_stopping

    def test_without_a_number_of_workers_it_does_not(self, talk: Talk) -> None:
        for worker in range(100):
            assert_ok(talk.ask(Command.LEAVE, worker=worker))
        assert not talk.server.is_stopping

    def test_a_number_that_no_worker_has_does_not_count(self) -> None:
        """Two workers; a stranger that says it is worker 7 leaves, and one of the two."""
        server = Server(num_workers=2)
        for worker in (7, 0):
            Talk(server, worker=worker).send(Talk(server, worker=worker).message(Command.LEAVE))
        assert not server.is_stopping

    def test_an_internal_error_is_answered_and_the_service_goes_on(
        self, talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("our own mistake")

        monkeypatch.setitem(COMMANDS, Command.PUSH, dataclasses.replace(COMMANDS[Command.PUSH], run=fail))
        kind, text = refusal(talk.push(ROWS, [1], [[1, 1]]))
        assert kind == "FleetError"
        assert names(text, INTERNAL_ERROR, "ZeroDivisionError: our own mistake")
        assert "ZeroDivisionError" in capsys.readouterr().err  # the log of the server has the whole story
        monkeypatch.undo()
        assert_ok(talk.push(ROWS, [1], [[1, 1]]))
        assert talk.pull(ROWS, [1]).tolist() == [[-0.5, -0.5]]
