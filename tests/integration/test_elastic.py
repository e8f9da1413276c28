"""A rank that is killed: all start again from the last save, and the losses go on as if nothing had been."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import processes
from support.messages import lines_naming
from support.paths import SCRIPTS

from torchfleet.launch.roles import free_ports

SCRIPT = SCRIPTS / "collective_resume.py"
STEPS, EVERY = 12, 4

pytestmark = pytest.mark.xdist_group("collective_elastic")


def run(folder: Path, name: str, *options: object, launch: tuple[str, ...] = ("--nproc_per_node", "2")) -> str:
    log = ("--log_dir", str(folder / f"log_{name}"))
    command = [sys.executable, "-m", "torchfleet.launch", *launch, *log, str(SCRIPT)]
    arguments = [str(one) for one in (folder / f"model_{name}", folder / f"losses_{name}", *options)]
    done = processes.run([*command, *arguments], timeout=200)
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


def losses(folder: Path, name: str) -> list[tuple[int, int, float]]:
    lines = [line.split() for line in (folder / f"losses_{name}").read_text().splitlines()]
    return [(int(step), int(num), float(loss)) for step, num, loss in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, int, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder, "whole")
    return losses(folder, "whole")


@pytest.mark.slow
def test_a_killed_rank_is_replaced_and_the_losses_go_on(
    tmp_path: Path, undisturbed: list[tuple[int, int, float]]
) -> None:
    launch = ("--nproc_per_node", "2", "--max_restart", "2")
    text = run(tmp_path, "killed", "--kill", 1, 6, launch=launch)
    assert lines_naming(text, "rank 1", "SIGKILL", "1 of 2")
    found = losses(tmp_path, "killed")
    # Steps 4 and 5 were made twice: the last save was after step 3, and rank 1 died in step 6.
    assert [step for step, _, _ in found] == [0, 1, 2, 3, 4, 5, *range(4, STEPS)]
    assert found[:6] == undisturbed[:6]
    assert found[6:] == undisturbed[4:]  # bit for bit


@pytest.mark.slow
def test_a_job_goes_on_with_another_number_of_ranks(tmp_path: Path, undisturbed: list[tuple[int, int, float]]) -> None:
    """1e-6: the mean over the batch is taken in other parts."""
    run(tmp_path, "changed", "--steps", 8)
    run(tmp_path, "changed", "--steps", STEPS, launch=("--nproc_per_node", "3"))
    found = losses(tmp_path, "changed")
    assert [num for _, num, _ in found] == [2] * 8 + [3] * 4
    assert [loss for _, _, loss in found] == pytest.approx([loss for _, _, loss in undisturbed], abs=1e-6)


def test_two_launchers_form_one_job(tmp_path: Path, undisturbed: list[tuple[int, int, float]]) -> None:
    """As on two machines, each with one rank."""
    master = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "torchfleet.launch", "--nnodes", "2", "--nproc_per_node", "1", "--master", master]
    script = [str(SCRIPT), str(tmp_path / "model"), str(tmp_path / "losses_two"), "--steps", "4"]
    nodes = [
        processes.Popen(
            [*command, "--rank", str(i), "--log_dir", str(tmp_path / f"log{i}"), *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    texts = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    assert losses(tmp_path, "two") == undisturbed[:4]
