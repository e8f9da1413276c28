"""The tables' clock follows corrections of the machine's, and no jump; what one shrink may drop is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from support.fleets import in_process
from support.messages import lines_naming, names, naming

from torchfleet.base.errors import TableError
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.clock import DAY, MAX_STEP, Clock
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

START = 1_800_000_000


class Machine:
    """A machine whose clocks the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.counted = float(START), 1000.0
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "clock_gettime", lambda which: self.counted)

    def run(self, seconds: float) -> None:
        self.wall += seconds
        self.counted += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_it_goes_on_with_the_machine_asleep_or_awake(machine: Machine) -> None:
    clock = Clock()
    assert clock.now == START
    machine.run(3 * DAY)
    assert clock.now == START + 3 * DAY


def test_corrections_are_followed_and_jumps_are_told_once(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    for step in (MAX_STEP, -MAX_STEP, 1.0):
        machine.wall += step
        assert clock.now == int(machine.wall)
    before = clock.now
    assert not capsys.readouterr().err
    for step in (8 * DAY, -20 * DAY):
        machine.wall += step
        machine.run(10)
        before += 10
        assert clock.now == before
    told = capsys.readouterr().err
    assert len(told.splitlines()) == len(lines_naming(told, "+691,200 s")) == 1
    machine.wall = before + 5.0  # set right again
    assert clock.now == before + 5


def test_a_machine_that_sleeps_while_its_clocks_are_read_loses_no_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def counted_before_a_sleep(which: int) -> float:
        count = machine.counted
        monkeypatch.setattr(time, "clock_gettime", lambda which: machine.counted)
        machine.run(3 * DAY)
        return count

    monkeypatch.setattr(time, "clock_gettime", counted_before_a_sleep)
    assert clock.now == START
    assert clock.now == START + 3 * DAY

    def told_before_a_sleep() -> float:
        wall = machine.wall
        monkeypatch.setattr(time, "time", lambda: machine.wall)
        machine.run(3 * DAY)
        return wall

    monkeypatch.setattr(time, "time", told_before_a_sleep)
    assert clock.now == START + 3 * DAY
    assert clock.now == START + 6 * DAY


def test_a_time_that_the_job_gives_stands_above_it(machine: Machine) -> None:
    clock = Clock()
    clock.set(7)
    machine.wall += 9 * DAY
    assert (clock.now, clock.is_set) == (7, True)


SPEC = TableSpec("t", rule=Rule("sgd"), shrink=Shrink(delete_after_unseen_days=7, every_hours=24))


def test_a_clock_that_jumps_drops_no_row(machine: Machine) -> None:
    server = Server(1 << 22)
    server.state.add_table(SPEC)
    table = server.state.table(SPEC.number)
    table.pull(np.arange(1000, dtype=np.uint64), True, None)
    server.tick(0.0)
    machine.wall += 8 * DAY
    for _ in range(3):
        server.tick(0.0)
        while server.work() is not None:
            pass
    assert table.num_rows == 1000


@pytest.mark.parametrize("ask", ["shrink", "set_clock", "schedule"])
def test_a_shrink_that_would_drop_more_than_its_share_drops_none_and_says_so(
    ask: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that starts with a wrong clock, or a job that gives a wrong time."""
    spec = SPEC  # whose own schedule might go first where a shrink is asked for
    if ask == "shrink":
        spec = msgspec.structs.replace(SPEC, shrink=Shrink(delete_after_unseen_days=7))
    with in_process(1) as fleet:
        client, server = fleet.client(), fleet.servers[0]
        client.create_table(spec)
        client.pull("t", np.arange(1000)).result()
        said = ("1,000", "max_share=0.5")
        calls: dict[str, Callable[[], object]] = {
            "shrink": lambda: client.shrink("t", Shrink()),
            "set_clock": lambda: client.set_clock(START + 8 * DAY),
        }
        if ask == "schedule":
            server.tick(0.0)
            machine.run(8 * DAY)
            server.tick(0.0)
            while server.work() is not None:
                pass
            assert names(capsys.readouterr().err, *said)
        else:
            if ask == "shrink":
                machine.run(8 * DAY)
            with pytest.raises(TableError, match=naming(*said)):
                calls[ask]()
        assert client.stats()[0]["tables"]["t"]["rows"] == 1000
        client.pull("t", np.arange(500)).result()
        if ask == "shrink":
            assert client.shrink("t", Shrink()) == {"t": 500}  # half of them: as much as may go
            machine.run(8 * DAY)
            assert client.shrink("t", Shrink(max_share=1.0)) == {"t": 500}


def test_a_declared_share_is_the_tables_own_in_every_shrink(machine: Machine) -> None:
    spec = TableSpec("t", rule=Rule("sgd"), shrink=Shrink(delete_after_unseen_days=7, max_share=0.9))
    with in_process(1) as fleet:
        client = fleet.client()
        client.create_table(spec)
        client.pull("t", np.arange(3000)).result()
        machine.run(5 * DAY)
        client.pull("t", np.arange(300)).result()
        assert client.shrink("t", Shrink(delete_after_unseen_days=1)) == {"t": 2700}
        machine.run(5 * DAY)
        with pytest.raises(TableError, match=r"max_share=0\.9"):
            client.shrink("t", Shrink(delete_after_unseen_days=1))


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan"), "half", True])
def test_a_share_that_cannot_be_is_refused(share: object) -> None:
    with pytest.raises(TableError, match="max_share"):
        Shrink(ttl_days=1, max_share=share)  # type: ignore[arg-type]
