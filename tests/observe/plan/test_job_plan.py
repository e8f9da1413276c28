"""`fleet plan`: its memory beside that of real tables, its speed beside the simulator's queues, and its page."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from support.messages import naming
from support.paths import ROOT

from torchfleet.base.errors import FleetError
from torchfleet.base.network_links import Link
from torchfleet.launch.simulate.queueing import Round, StepModel, predict
from torchfleet.observe.commands import command
from torchfleet.observe.plan.job_plan import JobSize, Plan, plan_of
from torchfleet.observe.plan.units import read_units
from torchfleet.ps.tables.kinds import make_table

UNITS = read_units()
SMALL = JobSize(1e8, 16, "adagrad", 16, 4, Link(), mode="async", durability="saves")


def plan(**changes: object) -> Plan:
    return plan_of(dataclasses.replace(SMALL, **changes), UNITS)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dim", "rule"), [(8, "adagrad"), (16, "adagrad"), (4, "sgd"), (16, "rowwise_adagrad")])
def test_a_row_takes_the_memory_of_a_row_in_a_table(dim: int, rule: str) -> None:
    table = make_table(plan(dim=dim, rule=rule).size.table, 1 << 30)
    keys = np.random.default_rng(0).permutation(1 << 17).astype(np.uint64)
    for some in np.array_split(keys, 64):
        table.pull(some, True, None)
    assert table.stats()["bytes"] / len(keys) == pytest.approx(plan(dim=dim, rule=rule)["row_bytes"], rel=0.35)


@pytest.mark.parametrize(
    ("workers", "servers", "gigabits"), [(16, 4, 10.0), (64, 1, 10.0), (64, 2, 0.5), (32, 8, 0.05), (200, 16, 25.0)]
)
def test_its_speed_is_that_of_the_simulators_queues(workers: int, servers: int, gigabits: float) -> None:
    link = Link(gigabits * 1e9 / 8)
    found = plan(workers=workers, servers=servers, link=link)
    message = 2 * found.unit("message_us") * 1e-6  # a request and a reply
    keys = found["keys"] / servers
    pull, push = (
        Round(sent / servers, received / servers, keys * found.unit(unit) * 1e-9 + message / 2)
        for unit, sent, received in (
            ("pull_ns_per_key", 8 * found["keys"], found["from_servers"]),
            ("push_ns_per_key", found["to_servers"] - 8 * found["keys"], 0.0),
        )
    )
    own = found["compute_s"] + servers * message
    model = StepModel(pull, push, np.full(workers, own), pulls_ahead=True, pushes_beside=True, queue_size=2)
    simulated = predict(model, link, servers, 30, 10).steps_per_s * found.size.batch
    assert found["samples_per_s"] == pytest.approx(simulated, rel=0.05)


def test_small_rows_are_loaded_by_their_number_and_large_ones_by_their_bytes() -> None:
    small, large = plan(dim=4, rule="sgd"), plan(dim=256, rule="adagrad")
    each = SMALL.rows / SMALL.servers
    assert small["load_s"] == pytest.approx(each * small.unit("load_ns_per_row") * 1e-9)
    assert large["load_s"] == pytest.approx(each * (8 + 2 * 4 * 256) / (large.unit("load_mb_per_s") * 1e6))


def test_more_servers_take_less_memory_each_and_save_sooner() -> None:
    few, many = plan(servers=4), plan(servers=16)
    for name in ("server_bytes", "save_s", "load_s"):
        assert few[name] == pytest.approx(4 * many[name])
    assert few["saved_bytes"] == many["saved_bytes"]


def test_backups_take_twice_the_memory_and_lose_less() -> None:
    kept = {name: plan(durability=name) for name in ("backups", "log", "saves")}
    assert kept["backups"]["server_bytes"] == 2 * kept["log"]["server_bytes"]
    assert kept["backups"]["lost_s"] < kept["log"]["lost_s"] < kept["saves"]["lost_s"]
    assert kept["backups"]["goodput"] > kept["log"]["goodput"] > kept["saves"]["goodput"]


def test_narrow_rows_take_less_memory_and_less_of_the_network() -> None:
    wide, narrow = plan(dim=64, rule="sgd"), plan(dim=64, rule="sgd", dtype="bfloat16")
    assert wide["from_servers"] == 2 * narrow["from_servers"]
    assert narrow["row_bytes"] == wide["row_bytes"] - 128


def test_money_is_that_of_all_machines_of_a_day() -> None:
    found = plan(worker_price=0.5, server_price=2.0)
    assert found["price_day"] == 24 * (16 * 0.5 + 4 * 2.0)
    trained = found["samples_per_s"] * 86_400 * found["goodput"]
    assert found["price_billion_samples"] == pytest.approx(found["price_day"] / trained * 1e9)


def test_every_unit_has_a_source_that_exists() -> None:
    headings = re.findall(r"^#+ (.*)$", (ROOT / "benchmarks" / "log.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for name, unit in UNITS.items():
        assert not unit.log or unit.log in anchors, name
        module = re.match(r"python -m ([\w.]+)", unit.command)
        path = ROOT / (module[1].replace(".", "/") + ".py") if module else ROOT / unit.command
        assert path.exists() or path.with_suffix("").is_dir(), name


def test_what_cannot_be_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FleetError, match=naming("--rows")):
        plan(rows=0)
    with pytest.raises(FleetError, match=naming("--unit", "nothing")):
        read_units({"nothing": 1.0})
    assert command.main(["plan", "--link", "fast"]) == 1
    assert command.main(["plan", "--unit", "save_mb_per_s=0"]) == 1
    capsys.readouterr()


def test_the_command_gives_all_figures_as_json_with_units_of_the_readers_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--rows", "1e8", "--workers", "16", "--servers", "4", "--mode", "async", "--durability", "saves"]
    assert command.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["server_bytes"] == plan()["server_bytes"]
    assert command.main([*words, "--unit", "save_mb_per_s=280", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["save_s"] == pytest.approx(2 * found["save_s"])
    assert command.main(["plan", "--units"]) == 0
    listed = capsys.readouterr().out
    assert [name for name in UNITS if f"{name}: " not in listed] == []


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/internet_scale.md: each block with `$ fleet plan ...` in its first line is that command and its output."""
    page = (ROOT / "docs" / "internet_scale.md").read_text()
    blocks = re.findall(r"^```text\n\$ fleet (plan .*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    for words, expected in blocks:
        assert command.main(words.replace("\\\n", " ").split()) == 0
        assert capsys.readouterr().out == expected
