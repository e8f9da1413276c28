"""What worker 0 tells a server without a script, and what such a server loads."""

from __future__ import annotations

import msgspec
import pytest
from support.fleets import Talk, assert_ok, refusal
from support.messages import names, naming

from torchfleet.base.errors import CheckpointError
from torchfleet.ps.net.wire import Command, Reply, Role, pack
from torchfleet.ps.server.job.given_tables import NO_TABLES, GivenTables, ModelChoice, TablesInbox
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import TableSpec

WORDS, ITEMS = TableSpec("words", dim=2), TableSpec("items", dim=3)


def given(dirname: str | None = None, var_names: list[str] | None = None) -> GivenTables:
    return GivenTables([WORDS], {}, dirname, var_names)


def test_a_server_loads_what_its_launcher_names_and_nothing_that_comes_by_message() -> None:
    assert ModelChoice().of(given("other")) is None
    assert ModelChoice("model", ["a"]).of(given("other")) == ("model", ["a"])
    assert ModelChoice("model").of(given()) == ("model", None)


def test_worker_0_names_the_model_where_the_launcher_lets_it() -> None:
    choice = ModelChoice(by_worker=True, stores=["hdfs://host/models/", "s3://bucket"])
    assert choice.of(given()) is None
    assert choice.of(given("here/model", ["a"])) == ("here/model", ["a"])
    assert choice.of(given("hdfs://host/models/today")) == ("hdfs://host/models/today", None)
    for place in ("hdfs://host/modelsx", "hdfs://other/models/today", "s3://bucket/../x", "http://inside", "zip::here"):
        with pytest.raises(CheckpointError, match=naming(place, "--servers_run_script")):
            choice.of(given(place))


class Waiting:
    """A server that waits for its tables, and one who talks to it."""

    def __init__(self) -> None:
        self.server, self.inbox = Server(1 << 26, num_workers=1), TablesInbox()
        self.server.take_tables = self.inbox.take
        self.server.loading = NO_TABLES

    def tell(self, body: object, role: Role = Role.FIRST_WORKER) -> Reply:
        return Talk(self.server, role=role).ask(Command.TABLES, pack(body))


def test_the_first_tables_are_taken_and_a_repeat_changes_nothing() -> None:
    waiting = Waiting()
    assert waiting.inbox.wait(0.0) is None
    assert_ok(waiting.tell(GivenTables([WORDS, ITEMS])))
    assert_ok(waiting.tell(GivenTables([ITEMS])))
    found = waiting.inbox.wait(0.0)
    assert found is not None
    assert found.tables == [WORDS, ITEMS]


def test_tables_come_from_worker_0_alone() -> None:
    waiting = Waiting()
    assert refusal(waiting.tell(GivenTables([WORDS]), Role.WORKER))[0] == "PermissionRefused"
    assert waiting.inbox.wait(0.0) is None


def test_a_rule_that_the_server_does_not_know_leads_to_the_script() -> None:
    body = msgspec.to_builtins(GivenTables([WORDS]))
    body["tables"][0]["rule"] = {"name": "of_the_script"}
    kind, text = refusal(Waiting().tell(body))
    assert kind == "TableError"
    assert names(text, "of_the_script", "--servers_run_script")


def test_a_server_that_serves_refuses_other_tables() -> None:
    waiting = Waiting()
    waiting.server.loading = ""
    waiting.server.state.add_table(WORDS)
    assert_ok(waiting.tell(GivenTables([WORDS])))
    for other in (ITEMS, TableSpec("words", dim=4)):
        assert refusal(waiting.tell(GivenTables([other])))[0] == "TableError"
    assert list(waiting.server.state.tables) == [WORDS.number]
