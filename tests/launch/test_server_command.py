"""The command of servers under every launcher: the script's source decides, unless the user asks for the script."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest

from torchfleet.launch.clusters import k8s_command, slurm_command
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.server_command import server_command, with_server_command

PREPARED = "import torchfleet as fleet\nmodel, optimizer = fleet.prepare(1, 2)\n"
BARE = (sys.executable, "-m", "torchfleet.server", "--of_job", "--load_by_worker")


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(PREPARED)
    return str(tmp_path / "train.py")


def test_only_servers_do_without_the_script(script: str, tmp_path: Path) -> None:
    options = Namespace(script=script, arguments=[], module=False, servers_run_script=False)
    job, told = with_server_command(JobSpec((sys.executable, script), tmp_path), options)
    assert job.command_of("server") == BARE
    assert job.command_of("worker") == (sys.executable, script)
    assert told == []
    options.servers_run_script = True
    job, told = with_server_command(JobSpec((sys.executable, script), tmp_path), options)
    assert job.command_of("server") == job.command_of("worker") == (sys.executable, script)
    assert told == []


def test_the_variable_asks_for_the_script_as_the_flag_does(script: str) -> None:
    for value, expected in (("1", None), ("0", list(BARE)), ("", list(BARE))):
        assert server_command(script, [], False, {"FLEET_SERVERS_RUN_SCRIPT": value})[0] == expected


def test_pods_of_servers_are_told_to_run_the_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {}
    for flags in ([], ["--servers_run_script"]):
        assert k8s_command.main(["--image", "image", "--server_num", "2", *flags, "--dry_run", script]) == 0
        counts[len(flags)] = capsys.readouterr().out.count("FLEET_SERVERS_RUN_SCRIPT=1")
    assert counts[0] == 0
    assert counts[1] >= 1


def test_tasks_of_slurm_are_told_to_run_the_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--servers_run_script"]):
        assert slurm_command.main(["--server_num", "1", "--worker_num", "1", *flags, script]) == 0
        task = [line for line in capsys.readouterr().out.splitlines() if "torchfleet.launch" in line]
        assert ("--servers_run_script" in " ".join(task)) == bool(flags)
