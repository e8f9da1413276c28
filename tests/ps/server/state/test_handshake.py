"""What workers of a job are compared by when they join, and how one is told that it was told something else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.cases import each_of
from support.fleets import Talk, assert_ok, refusal
from support.jobs import Net, Servers, Worker, make_part, roles, sgd, strategy
from support.messages import lines_naming, names, naming

from torchfleet import __version__
from torchfleet.api.job.joining import claims_of
from torchfleet.base.errors import RoleError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.net.wire import Command, Reply, pack
from torchfleet.ps.server import commands
from torchfleet.ps.server.log.durable_server import forget_workers
from torchfleet.ps.server.log.state_copy import export_state, import_state
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.settings.storage import TierStorage

BODY = {"host": "here", "pid": 7, "num_workers": 2, "timeout": 5.0, "sync_timeout": 50.0}
ROWS = TableSpec("rows", dim=4, rule=Rule("adam", lr=0.1), entry=AdmissionEntry(show="s", click="c"))
DAYS = TableSpec("days", "array", dim=2, size=10)
BLOCK = TableSpec("block", "dense", size=6, rule=Rule("sgd", momentum=0.5))
STRATEGY = DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 8})

# Every field of a table, with another value than those above have.
OTHER_RULE: dict[str, Any] = {
    **{"name": "adagrad", "lr": 0.2, "eps": 1e-4, "beta1": 0.8, "beta2": 0.99, "lr_decay": 0.5, "weight_decay": 0.5},
    **{"initial_accumulator": 0.5, "momentum": 0.25, "nesterov": True, "decoupled_decay": True},
    **{"low": -1.0, "high": 1.0},
}
OTHER_SPEC: dict[str, Any] = {
    **{"kind": "array", "dim": 5, "size": 11, "seed": 3},
    **{"initializer": Initializer("uniform", -1.0, 1.0), "entry": AdmissionEntry(show="s", click="c", count=3)},
    "shrink": Shrink(max_rows=5),
    "storage": TierStorage(64 << 20, "/rows"),
    "format": RowFormat("bfloat16"),
}


def claims(**fields: Any) -> dict[str, Any]:
    return {**claims_of([ROWS, DAYS, BLOCK], STRATEGY, 1)[0], **fields}


def join(server: Server, worker: int, said: dict[str, Any] | None = None, **fields: Any) -> Reply:
    talk = Talk(server, client=10 + worker, worker=worker)
    return talk.ask(Command.JOIN, pack({**BODY, **fields}), pack(claims() if said is None else said))


def told(server: Server, said: dict[str, Any], **fields: Any) -> str:
    """Why worker 1 may not join behind worker 0."""
    kind, text = refusal(join(server, 1, said, **fields))
    assert kind == "RoleError"
    return text


@pytest.fixture
def server() -> Server:
    """One that was told nothing, with worker 0 of two."""
    made = Server(1 << 20)
    assert_ok(join(made, 0))
    return made


def test_one_that_was_told_the_same_joins(server: Server) -> None:
    assert_ok(join(server, 1))
    assert_ok(join(server, 1, again=True))


@pytest.mark.parametrize("field", STRATEGY.shared_fields())
def test_another_strategy_is_refused_by_its_field_and_both_values(server: Server, field: str) -> None:
    before = STRATEGY.shared_fields()[field]
    other = {bool: lambda: not before, int: lambda: before + 1, str: lambda: "workers"}[type(before)]()
    text = told(server, claims(strategy={**STRATEGY.shared_fields(), field: other}))
    shown = [f"'{value}'" if isinstance(value, str) else str(value) for value in (other, before)]
    assert names(text, "worker 1", f"strategy.{field}", shown[0], "worker 0", shown[1])


def test_a_field_that_only_one_side_has_is_named(server: Server) -> None:
    fields = STRATEGY.shared_fields()
    more, less = {**fields, "new": 1.5}, {name: value for name, value in fields.items() if name != "a_sync"}
    assert names(told(server, claims(strategy=more)), "strategy.new", "1.5", "worker 0")
    assert names(told(server, claims(strategy=less)), "strategy.a_sync", "worker 0", True)


def test_hybrid_mode_compares_the_strategies_of_the_network(server: Server) -> None:
    """Its workers are a collective job: one that computes in another precision would hang the others."""
    hybrid = {"a_sync": True, "a_sync_configs": {"hybrid": True}}
    plain, amp = DistributedStrategy(**hybrid), DistributedStrategy(amp=True, **hybrid)
    fresh = Server(1 << 20)
    assert_ok(join(fresh, 0, claims_of([], plain, 1)[0]))
    assert names(told(fresh, claims_of([], amp, 1)[0]), "strategy.amp", True, "worker 0", False)


@pytest.mark.parametrize(
    ("fields", "body", "text"),
    [
        ({"release": "0.0.9"}, {}, f"worker 1 has torchfleet 0.0.9, and this server {__version__}: install"),
        ({"num_servers": 2}, {}, "worker 1 has num_servers = 2, worker 0 joined with 1: give all processes the same"),
        ({}, {"num_workers": 3}, "worker 1 has num_workers = 3, worker 0 joined with 2: give all processes the same"),
        ({"tables": [ROWS, DAYS]}, {}, "table 'block': worker 1 has none, worker 0 joined with it"),
        ({"tables": [ROWS, DAYS, BLOCK, TableSpec("new")]}, {}, "table 'new': worker 1 has it, worker 0 joined with n"),
    ],
)
def test_other_numbers_and_tables_are_refused(
    server: Server, fields: dict[str, Any], body: dict[str, Any], text: str
) -> None:
    assert text in told(server, claims(**fields), **body)


def test_two_lists_of_servers_in_another_order_are_refused() -> None:
    fresh = Server(1 << 20)
    first, second = claims_of([], STRATEGY, 2)
    assert_ok(join(fresh, 0, first))
    assert names(told(fresh, second), "worker 1", 1, "worker 0", 0)


def other_specs() -> list[tuple[str, TableSpec, TableSpec]]:
    found = []
    for field, value in OTHER_SPEC.items():
        before = DAYS if field == "size" else TableSpec("rows") if field == "kind" else ROWS
        changed = {field: value, **({"size": 9} if field == "kind" else {})}
        found.append((field, before, msgspec.structs.replace(before, **changed)))
    for field, value in OTHER_RULE.items():
        before = BLOCK if field in ("momentum", "nesterov") else ROWS
        rule = msgspec.structs.replace(before.rule, **{field: value})
        found.append((f"rule.{field}", before, msgspec.structs.replace(before, rule=rule)))
    return found


def test_every_field_of_a_table_is_among_the_cases() -> None:
    """`shard` and `num_shards` are the server's place, which is compared before."""
    assert set(OTHER_RULE) | {"options"} == set(Rule.__struct_fields__)  # options: of rules from outside the package
    assert set(OTHER_SPEC) | {"name", "rule", "shard", "num_shards"} == set(TableSpec.__struct_fields__)


@each_of(("field", "before", "after"), other_specs(), ids=[case[0] for case in other_specs()])
@each_of("is_made", [False, True], ids=["as worker 0 said", "as the server has it"])
def test_another_table_is_refused_by_its_field_and_both_values(
    field: str, before: TableSpec, after: TableSpec, is_made: bool
) -> None:
    server = Server(1 << 20)
    if is_made:
        server.state.add_table(before)
    else:
        assert_ok(join(server, 0, claims(tables=[before])))
    text = told(server, claims(tables=[after]))
    other = "this server" if is_made else "worker 0"
    leaf, name = field.removeprefix("rule."), before.name
    mine, theirs = (spec.rule if "." in field else spec for spec in (after, before))
    assert names(text, f"'{name}'", "worker 1")
    assert other in text
    if isinstance(getattr(mine, leaf), (int, float, str)):
        assert f"{field}={getattr(mine, leaf)!r}" in text.partition(other)[0]
        assert f"{field}={getattr(theirs, leaf)!r}" in text.partition(other)[2]
    else:
        assert text.count(f"{field}.") >= 2


class TestServersOfAScript:
    """They know their place, and have all tables of their model."""

    @pytest.fixture
    def server(self) -> Server:
        made = Server(1 << 20, 2)
        made.state.meetings.place = 1, 2
        for spec in (ROWS, DAYS):
            made.state.add_table(spec.for_shard(1, 2))
        return made

    @pytest.mark.parametrize(
        ("server_index", "num_servers", "specs", "text"),
        [
            (1, 3, [ROWS, DAYS], "worker 1 has a list of 3 servers, and this server one of 2"),
            (0, 2, [ROWS, DAYS], "worker 1 takes this server for server 0, and it is server 1"),
            (1, 2, [ROWS], "table 'days': worker 1 has none, this server has it"),
            (1, 2, [ROWS, DAYS, BLOCK], "table 'block': worker 1 has it, this server has none"),
        ],
    )
    def test_they_refuse_what_differs_from_themselves(
        self, server: Server, server_index: int, num_servers: int, specs: list[TableSpec], text: str
    ) -> None:
        assert text in told(server, claims_of(specs, STRATEGY, num_servers)[server_index])

    def test_they_take_in_what_does_not(self, server: Server) -> None:
        assert_ok(join(server, 1, claims_of([ROWS, DAYS], STRATEGY, 2)[1]))


OTHER = DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 4}).shared_fields()


def test_workers_of_the_next_run_agree_anew(server: Server) -> None:
    """Those of the last one are lost or have left; one that may yet be heard of is waited for."""
    heard = server.state.meetings.presence._members[0]
    heard.heard -= 2.0  # two signs of life were missed
    assert refusal(join(server, 1, claims(strategy=OTHER)))[0] == "ServerBusy"
    heard.heard -= 4.0
    assert_ok(join(server, 1, claims(strategy=OTHER)))
    assert names(refusal(join(server, 0))[1], "strategy.a_sync_configs.k_steps", 8, "worker 1", 4)


def test_a_copy_of_a_server_refuses_the_same(server: Server) -> None:
    copy = Server(1 << 20)
    import_state(copy, export_state(server, 1))
    assert lines_naming(told(copy, claims(strategy=OTHER)), "worker 0", 8)
    forget_workers(copy.state)
    assert_ok(join(copy, 1, claims(strategy=OTHER)))


def test_a_copy_made_after_the_last_worker_left_stops_too() -> None:
    """A log may begin with such a copy: a server that is started from it has no one to wait for."""
    server = Server(1 << 20, num_workers=2)
    talks = [Talk(server, client=10 + worker, worker=worker) for worker in range(2)]
    for talk in talks:
        assert_ok(talk.ask(Command.JOIN, pack(BODY), pack(claims())))
    stops = []
    for talk in talks:
        assert_ok(talk.ask(Command.LEAVE))
        copy = Server(1 << 20, num_workers=2)
        import_state(copy, export_state(server, 1))
        stops.append((server.is_stopping, copy.is_stopping))
    assert stops == [(False, False), (True, True)]


@pytest.mark.parametrize("hostile", ["\x1b]0;x\x07" * 20, "a\nb", "\u202eabc", "x" * 1000])
def test_hostile_values_are_shown_escaped_and_short(server: Server, hostile: str) -> None:
    said = [claims(release=hostile[:200]), claims(strategy={**STRATEGY.shared_fields(), "sync_mean": hostile})]
    said.append(claims(strategy={**STRATEGY.shared_fields(), hostile[:200]: 1}))
    said.append(claims(tables=[ROWS, DAYS, BLOCK, TableSpec(hostile[:200])]))
    for text in (told(server, each) for each in said):
        assert text.isprintable()
        assert len(text) < 600


@pytest.mark.parametrize(
    "fields",
    [
        {"server": 1},
        {"server": -1},
        {"num_servers": 0},
        {"release": "x" * 300},
        {"strategy": {f"f{i}": 1 for i in range(300)}},
        {"strategy": {"a": [1]}},
        {"tables": [{"name": "a", "dim": 0}]},
        {"more": 1},
    ],
)
def test_claims_that_make_no_sense_are_no_message(server: Server, fields: dict[str, Any]) -> None:
    kind, _ = refusal(join(server, 1, claims(**fields)))
    assert kind in ("WireError", "TableError")


@pytest.mark.slow
def test_a_worker_whose_script_differs_is_refused_before_it_makes_a_table() -> None:
    servers, (first, second) = Servers(1, 2), roles(2, 1)
    settings = {"launch_barrier": False, "k_steps": 8}
    one = make_part(Net, sgd, strategy("geo", **settings), first)
    servers.make_tables(one.job)
    worker = Worker(one.job, servers)
    try:
        other = make_part(Net, sgd, strategy("geo", **{**settings, "k_steps": 4}), second)
        with pytest.raises(RoleError, match=naming("a_sync_configs.k_steps", 4, "worker 0", 8)):
            Worker(other.job, servers)
    finally:
        worker.stop()


@pytest.mark.slow
def test_a_server_of_another_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, (info,) = Servers(1, 1), roles(1, 1)
    part = make_part(Net, sgd, strategy(), info)
    monkeypatch.setattr(commands, "__version__", "0.0.9")
    with pytest.raises(RoleError, match=naming(__version__, "server 0", "'0.0.9'")):
        Worker(part.job, servers)
