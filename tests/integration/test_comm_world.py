"""fleet.util among servers, and among all processes of a job: real processes, started by fleetrun."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support import jobs
from support.fleets import Talk, refusal
from support.messages import names, naming
from support.paths import SCRIPTS

import torchfleet as fleet
from torchfleet import util
from torchfleet.ps.net.keys import keygen
from torchfleet.ps.net.wire import Array, Command, pack
from torchfleet.ps.server.server import Server

pytestmark = pytest.mark.xdist_group("comm_world")  # its fixture is made once

SCRIPT = str(SCRIPTS / "all_meeting.py")
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two servers and two workers found, with keys."""
    folder = tmp_path_factory.mktemp("meeting")
    keygen(folder / "keys")
    launcher = ["-m", "torchfleet.launch", "--log_dir", str(folder / "log"), "--key_dir", str(folder / "keys")]
    jobs.command([*launcher, "--server_num", "2", "--worker_num", "2", SCRIPT, str(folder)], 200)
    return {path.name: json.loads(path.read_text()) for path in folder.iterdir() if path.is_file()}


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    with jobs.clean_facade():
        yield


def test_servers_reduce_and_wait_among_themselves(found: Found) -> None:
    for index in range(2):
        assert found[f"server-{index}"]["sum"] == 21.0
        assert found[f"server-{index}"]["largest"] == [1, 0]


def test_all_processes_gather_workers_first(found: Found) -> None:
    expected = [{"worker": 0}, {"worker": 1}, {"server": 0}, {"server": 1}]
    assert [process["all"] for process in found.values()] == [expected] * 4


def test_the_workers_own_meetings_and_training_go_on_as_usual(found: Found) -> None:
    for index in range(2):
        assert found[f"worker-{index}"]["workers"] == [{"worker": 0}, {"worker": 1}]
        assert found[f"worker-{index}"]["workers again"] == 3
    assert found["worker-0"]["weight"] == found["worker-1"]["weight"]


def test_a_call_at_the_wrong_place_says_where_it_belongs(found: Found) -> None:
    for index in range(2):
        server, worker = found[f"server-{index}"], found[f"worker-{index}"]
        assert names(server["too early"], "fleet.init_server()", "fleet.run_server()")
        assert names(server["as a worker"], "comm_world='worker'", "server")
        assert "fleet.init_worker()" in worker["too early"]
        assert names(worker["as a server"], "comm_world='server'", "worker")
        assert names(worker["unknown"], "comm_world", "'worker'", "'server'", "'all'", "'everybody'")


@pytest.mark.parametrize("comm_world", ["worker", "server", "all"])
def test_one_process_meets_itself(comm_world: str) -> None:
    fleet.init()
    assert util.all_gather(3, comm_world) == [3]
    assert util.all_reduce(3, comm_world=comm_world) == 3


@pytest.mark.parametrize("comm_world", ["worker", "server", "all"])
def test_a_collective_job_has_no_servers(comm_world: str) -> None:
    fleet.init(is_collective=True)
    if comm_world == "server":
        with pytest.raises(fleet.FleetError, match=naming("comm_world='server'", "collective")):
            util.all_gather(3, comm_world)
    else:
        assert util.all_gather(3, comm_world) == [3]
    fleet.stop_worker()


def gather(server: Server, number: int, first: int, num: int) -> Any:
    talk = Talk(server, client=100 + number, worker=number)
    body = {"name": "meeting", "round": 1, "num_workers": num, "timeout": 1.0, "first": first}
    return talk.send(talk.message(Command.GATHER, pack(body), Array(0, pack(number).data)))


def test_a_worker_that_left_does_not_stand_for_a_server() -> None:
    server = Server(num_workers=2)
    Talk(server, worker=1).ask(Command.LEAVE)
    assert gather(server, 2, 2, 2) == []
    replies = gather(server, 3, 2, 2)
    assert [[array.number for array in reply.arrays] for reply in replies] == [[2, 3], [2, 3]]


def test_who_is_missing_among_servers_is_named_by_its_number() -> None:
    server = Server(num_workers=2)
    assert gather(server, 3, 2, 2) == []
    (reply,) = gather(server, 1, 2, 2)
    assert names(refusal(reply)[1], 2, 3)
    (expired,) = server.state.meetings.gatherings.expired(float("inf"))
    assert names(str(expired[1]), "worker 2", 2, 3)
