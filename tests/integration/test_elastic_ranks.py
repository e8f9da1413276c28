"""Ranks that are killed in fleet.elastic.run: they alone start again, and the end is that of an undisturbed run."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import processes
from support.messages import lines_naming
from support.paths import SCRIPTS
from support.scripts.gates import close_gates, open_gate
from support.scripts.launching import SOON, wait_until

from torchfleet.launch.roles import free_ports

SCRIPT = SCRIPTS / "elastic_train.py"
STEPS, RANKS = 14, 3  # copies are made after 3, 6, 9 and 12 steps

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("collective_elastic")]


class Ended(NamedTuple):
    status: int
    text: str
    finals: list[dict[str, Any]]  # by rank, what it has written at its end


def flags(stage: int) -> list[str]:
    return ["--sharding", "--sharding_configs", f'{{"stage": {stage}}}'] if stage else []


def command(folder: Path, *arguments: object, launch: tuple[str, ...] = ()) -> list[str]:
    start = [sys.executable, "-m", "torchfleet.launch", *launch, "--log_dir", str(folder / "log")]
    return [*start, str(SCRIPT), str(folder), *map(str, arguments)]


def run(folder: Path, *arguments: object, num_ranks: int = RANKS, max_restart: int = 3) -> Ended:
    folder.mkdir(exist_ok=True)
    launch = ("--nproc_per_node", str(num_ranks), "--max_restart", str(max_restart))
    done = processes.run(command(folder, *arguments, launch=launch), timeout=240)
    return Ended(done.returncode, str(done.stdout), finals(folder, num_ranks))


def finals(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    files = [folder / f"final.{rank}" for rank in range(num_ranks)]
    return [torch.load(file) for file in files if file.exists()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(stage: int, num_ranks: int = RANKS) -> Ended:
        ended = run(tmp_path_factory.mktemp("undisturbed"), *flags(stage), num_ranks=num_ranks)
        assert ended.status == 0, ended.text
        assert [final["made"] for final in ended.finals] == [list(range(STEPS))] * num_ranks
        return ended

    return made


def assert_same_end(found: Ended, expected: Ended) -> None:
    """Parameters, buffers, optimizer states and the rate are equal on every rank, bit for bit."""
    assert found.status == 0, found.text
    for one, other in zip(found.finals, expected.finals, strict=True):
        assert one["state"].keys() == other["state"].keys()
        different = [name for name, value in other["state"].items() if not torch.equal(value, one["state"][name])]
        assert not different


@pytest.mark.parametrize(
    ("stage", "num_ranks"),
    [(0, 2), (1, 2), pytest.param(2, 3, marks=pytest.mark.long), (3, 3)],  # 2 keeps and copies the shards that 3 does
)
def test_two_kills_leave_no_trace_under_every_stage(
    stage: int, num_ranks: int, tmp_path: Path, undisturbed: Any
) -> None:
    """Rank 1 in a step, rank 0 in the middle of a copy; rank 2 keeps its process.

    DistributedDataParallel, of stages 0 and 1, lays its buckets out anew after its first step: three ranks would add up
    the gradients of the step after a kill in another order.
    """
    found = run(tmp_path, *flags(stage), "--kill", "1:7:step", "0:11:copy", num_ranks=num_ranks)
    assert lines_naming(found.text, "rank 1", "SIGKILL", "1 of 3")
    assert lines_naming(found.text, "rank 0", "SIGKILL", "2 of 3")
    assert [final["calls"] for final in found.finals] == [1, 2, 3][:num_ranks]
    assert [final["made"] for final in found.finals] == [list(range(9, STEPS))] * num_ranks
    assert_same_end(found, undisturbed(stage, num_ranks))


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_on_a_gpu_goes_on_from_its_copy(stage: int, tmp_path: Path, undisturbed: Any) -> None:
    """One rank, because ranks of fleetrun do not share a GPU. Its copies, in the machine's memory, outlive it."""
    found = run(tmp_path, *flags(stage), "--kill", "0:7:step", "0:11:copy", num_ranks=1)
    assert found.finals[0]["calls"] == 1, "a third process"
    assert found.finals[0]["made"] == list(range(9, STEPS))
    assert_same_end(found, undisturbed(stage, 1))


def test_two_neighbours_killed_at_once_leave_no_trace(tmp_path: Path, undisturbed: Any) -> None:
    found = run(tmp_path, *flags(3), "--kill", "1:7:step", "2:7:step")
    assert [final["made"] for final in found.finals] == [list(range(6, STEPS))] * RANKS
    assert found.finals[0]["calls"] > 1
    assert_same_end(found, undisturbed(3))


def test_a_kill_before_the_first_copy_begins_anew(tmp_path: Path, undisturbed: Any) -> None:
    found = run(tmp_path, *flags(3), "--kill", "1:1:step")
    assert_same_end(found, undisturbed(3))
    assert found.finals[0]["calls"] == 2


def test_lost_copies_lead_to_the_last_save(tmp_path: Path) -> None:
    found = run(tmp_path, *flags(1), "--save_step", 4, "--kill", "1:7:forget", "2:7:forget")
    assert found.status == 0, found.text
    assert lines_naming(found.text, "step 6", "ranks 1, 2", "save of step 4")
    assert [final["made"] for final in found.finals] == [list(range(4, STEPS))] * RANKS


def test_lost_copies_without_a_save_are_an_error_that_names_the_ranks(tmp_path: Path) -> None:
    found = run(tmp_path, *flags(1), "--kill", "1:7:forget", "2:7:forget", max_restart=2)
    assert found.status == 1
    assert "ranks 1, 2 are lost, and there is no save" in found.text


def test_a_lost_machine_gets_its_copies_back_from_its_neighbour(tmp_path: Path, undisturbed: Any) -> None:
    """Two launchers are two machines here. The second one is killed with its ranks and all of its memory."""
    launch = ("--nnodes", "2", "--nproc_per_node", "1", "--max_restart", "3")
    place = ("--master", f"127.0.0.1:{free_ports(1)[0]}")

    def start(machine: int) -> subprocess.Popen[str]:
        folder = tmp_path / f"machine{machine}"
        started = [*command(tmp_path, *flags(3), "--pause", 0.25, launch=(*launch, *place, "--rank", str(machine)))]
        started[started.index("--log_dir") + 1] = str(folder)
        return processes.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    close_gates(tmp_path, 8)
    machines = [start(0), start(1)]
    wait_for_line(tmp_path / "machine1", "step 7")
    status = (tmp_path / "machine1" / "latest").resolve() / ".status.rank.1"
    machines[1].kill()
    wait_until(lambda: not processes.with_variable("FLEET_STATUS_FILE", str(status)), SOON, "end of its rank")
    open_gate(tmp_path, 8)
    machines[1].communicate(timeout=30)
    machines[1] = start(1)
    texts = [machine.communicate(timeout=200)[0] for machine in machines]
    found = Ended(max(machine.returncode for machine in machines), "\n".join(texts), finals(tmp_path, 2))
    assert lines_naming(found.text, "going on from step", "copied in memory")
    # The newest whole copy is older if the thread that copies had no time.
    assert all(final["made"][0] in (3, 6, 9, 12) for final in found.finals)
    assert_same_end(found, undisturbed(3, 2))


def wait_for_line(folder: Path, line: str) -> None:
    deadline = time.monotonic() + 120
    while not any(line in log.read_text() for log in folder.glob("*/workerlog.*")):
        assert time.monotonic() < deadline, f"{folder}: no log has {line!r}"
        time.sleep(0.05)
