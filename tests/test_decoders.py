"""A short search by coverage of every decoder (`make fuzz` is the long one), and what earlier ones found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fuzz.search import Search, Target
from support.fuzz.targets import all_targets, fast_folder
from support.messages import naming

from torchfleet.base.errors import CheckpointError, FleetError, RoleError, StrategyError, TableError
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.base.strategy import textformat
from torchfleet.ps.tables.settings.table_size import parse_bytes

NUM = 400
TAKEN = 0.5  # of the branches of functions that a decoder enters, at least


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    with fast_folder() as folder:
        yield {target.name: target for target in all_targets(Path(folder))}


@pytest.mark.slow
@pytest.mark.xdist_group("decoders")
def test_no_decoder_raises_what_it_does_not_declare(targets: dict[str, Target]) -> None:
    found = {name: Search(target).go_on(NUM) for name, target in targets.items()}
    assert {name: one.faults for name, one in found.items() if one.faults} == {}
    assert min(one.executions for one in found.values()) > NUM
    assert sum(one.taken for one in found.values()) > TAKEN * sum(one.branches for one in found.values())


def test_the_search_finds_a_fault_behind_branches() -> None:
    """A reader that fails for good texts with a message inside another only."""

    def run(data: bytes) -> None:
        fields = textformat.parse(data.decode("latin-1"))
        assert not any(isinstance(value, dict) for values in fields.values() for value in values)

    search = Search(Target("broken", run, [b"amp: true"], [textformat], [b"{", b"}", b" [", b"]"]))
    assert [what.partition(" at ")[0] for what in search.go_on(5000).faults] == ["AssertionError"]


@pytest.mark.xdist_group("decoders")
@pytest.mark.parametrize("name", ["manifest", "collective manifest"])
@pytest.mark.parametrize("body", [b'{"save": "\xff"}', b'{"extra":' + b"[" * 100_000], ids=["no text", "nested"])
def test_a_manifest_that_is_no_json_is_named(targets: dict[str, Target], name: str, body: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        targets[name].run(body)


@pytest.mark.parametrize("variable", ["FLEET_NUM_WORKERS", "FLEET_WORKER_INDEX"])
def test_a_number_of_thousands_of_digits_is_refused(variable: str) -> None:
    given = {
        "FLEET_ROLE": "WORKER",
        "FLEET_SERVER_ENDPOINTS": "a:1",
        "FLEET_NUM_WORKERS": "1",
        "FLEET_WORKER_INDEX": "0",
    }
    with pytest.raises(RoleError, match=variable):
        PaddleCloudRoleMaker(environment={**given, variable: "9" * 5000}).read()


@pytest.mark.xdist_group("decoders")
def test_a_few_lines_of_yaml_that_stand_for_a_billion_values_are_refused(targets: dict[str, Target]) -> None:
    lines = [b"- &a0 [x, x, x, x, x, x, x, x, x, x]", *(b"- &a%d [%s]" % (i + 1, b"*a%d, " % i * 10) for i in range(9))]
    with pytest.raises(StrategyError, match=naming("10,000")):
        targets["strategy YAML"].run(b"rpc_timeout:\n" + b"\n".join(lines))


@pytest.mark.xdist_group("decoders")
@pytest.mark.parametrize("number", ["09", "9" * 5000])
def test_what_is_no_number_in_a_prototxt_is_shown_with_its_line(targets: dict[str, Target], number: str) -> None:
    with pytest.raises(StrategyError, match=naming("line 2")):
        targets["prototxt"].run(b"amp: true\nauto: " + number.encode())


def test_a_size_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(TableError, match="--max_table_bytes"):
        parse_bytes("9" * 400, "--max_table_bytes")


def test_what_is_declared_is_an_error_of_ours(targets: dict[str, Target]) -> None:
    assert {error for target in targets.values() for error in target.allowed} == {FleetError}
