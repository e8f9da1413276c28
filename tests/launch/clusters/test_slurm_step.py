"""What Slurm tells a task, as srun of Slurm 22.05 sets it, and the roles that follow from it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import each_of
from support.messages import lines_naming, naming
from support.searches import examples

from torchfleet.base.errors import RoleError, SecurityError
from torchfleet.base.monitor.stop_request import REQUEUE
from torchfleet.launch.cli import main
from torchfleet.launch.clusters import slurm_launcher
from torchfleet.launch.clusters.slurm_meeting import SlurmMeeting
from torchfleet.launch.clusters.slurm_step import expand_hostlist, read_step
from torchfleet.launch.clusters.slurm_watch import watched
from torchfleet.launch.job_spec import JobSpec
from torchfleet.observe.watch.history import HistoryReader

TASK = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[0-2]", "SLURMD_NODENAME": "n1", "SLURM_CPUS_PER_TASK": "4",
}  # fmt: skip
HET = {"SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "2", "SLURM_NTASKS_HET_GROUP_1": "3",
       "SLURM_JOB_ID_HET_GROUP_0": "17", "SLURM_JOB_ID": "18"}  # fmt: skip

NUMBERS = st.integers(0, 120).flatmap(
    lambda first: st.tuples(st.sampled_from(["", "0", "00"]), st.integers(0, 9)).map(
        lambda rest: f"{rest[0]}{first}" if not rest[1] else f"{rest[0]}{first}-{first + rest[1]}"
    )
)
INSIDE = st.lists(NUMBERS, min_size=1, max_size=3).map(",".join)
PREFIX = st.from_regex(r"[a-z][a-z-]{0,3}", fullmatch=True).filter(lambda text: not text.endswith("-"))
ITEMS = st.one_of(PREFIX, st.tuples(PREFIX, INSIDE).map(lambda item: f"{item[0]}[{item[1]}]"))
LISTS = st.lists(ITEMS, min_size=1, max_size=4).map(",".join)


def described(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str, **task: str) -> str:
    for name, value in {**TASK, **task}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    status = main(["--cluster", "slurm", "--dry_run", *options, __file__])
    told = capsys.readouterr()
    return told.out if status == 0 else told.err


def test_servers_have_the_first_ranks_and_workers_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = ("--server_num", "2", "--worker_num", "3")
    assert described(capsys, monkeypatch, *counts, SLURM_PROCID="1").startswith("server 1: ")
    told = described(capsys, monkeypatch, *counts)
    assert told.startswith("worker 0: ")
    assert "OMP_NUM_THREADS=4" in told
    assert "FLEET_NUM_WORKERS=3" in told


def test_the_first_of_two_components_are_the_servers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = described(capsys, monkeypatch, **HET)
    assert "slurm-17.0/workerlog.0" in told
    assert "FLEET_NUM_WORKERS=3" in told
    told = described(capsys, monkeypatch, "--server_num", "1", **HET)
    assert lines_naming(told, 2, 1)


def test_other_numbers_than_those_of_the_step_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = described(capsys, monkeypatch, "--server_num", "2", "--worker_num", "2")
    assert lines_naming(told, 5, 2)
    assert "srun" in described(capsys, monkeypatch, "--max_restart", "2")


@pytest.mark.parametrize("options", [(), ("--worker_num", "2"), ("--nproc_per_node", "2"), ("--cluster", "ray")])
def test_a_whole_job_in_every_task_of_a_step_is_refused_and_the_flag_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    assert main([*options, "--dry_run", __file__]) == 2
    assert lines_naming(capsys.readouterr().err, "--cluster slurm", 5)


@pytest.mark.parametrize(
    ("hidden", "options"),
    [
        ({"SLURM_STEP_ID": ""}, ()),  # a batch script: SLURM_PROCID is set in it
        ({"SLURM_STEP_NUM_TASKS": "1"}, ()),  # srun --pty
        ({}, ("--servers", "localhost:7000", "--workers", "localhost:0")),  # every task is one machine's fleetrun
        ({}, ("--nproc_per_node", "1", "--nnodes", "5", "--master", "localhost:7000", "--rank", "2", "--insecure")),
    ],
)
def test_one_job_of_a_node_and_one_on_several_machines_start_under_slurm(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    hidden: dict[str, str],
    options: tuple[str, ...],
) -> None:
    for name, value in {**TASK, **hidden}.items():
        monkeypatch.setenv(name, value)
    assert main([*options, "--dry_run", __file__]) == 0, capsys.readouterr().err


def test_servers_of_a_task_without_a_log_need_no_store_and_those_with_one_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "FLEET_DURABILITY=none" in described(capsys, monkeypatch, "--durability", "none")
    assert "--log_store" in described(capsys, monkeypatch, "--durability", "log")
    told = described(capsys, monkeypatch, "--durability", "log", "--log_store", "/store")
    assert "FLEET_LOG_STORE=/store" in told
    assert "FLEET_LOG_RUN=slurm-17.0" in told


def test_a_process_that_srun_did_not_start_is_told_so() -> None:
    with pytest.raises(RoleError, match="srun"):
        read_step({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0"})  # as in the shell of an sbatch file


def test_a_requeued_job_meets_elsewhere_and_jobs_try_different_ports(tmp_path: Path) -> None:
    alone = {"SLURM_STEP_NODELIST": "n1"}
    steps = [
        read_step({**TASK, **alone, **more}) for more in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "18"})
    ]
    meetings = [SlurmMeeting(tmp_path, step, 5.0) for step in steps]
    assert [meeting.folder.name for meeting in meetings] == ["slurm-17.0", "slurm-17.0-1", "slurm-18.0"]
    assert all(meeting.folder.stat().st_mode & 0o777 == 0o700 for meeting in meetings)
    places = [meeting.publish("server.0", 0) for meeting in meetings]
    assert len(set(places)) == 3
    assert meetings[0].places(["server.0"]) == places[:1]
    assert meetings[0].publish("server.0", 0) == places[0]  # derived, not drawn


def run_out_of_time(*arguments: Any, timeout: float, **options: Any) -> NoReturn:
    raise subprocess.TimeoutExpired("scontrol", timeout)


@pytest.mark.parametrize("run", [subprocess.run, run_out_of_time])
def test_a_job_that_cannot_be_requeued_ends_with_the_status_that_asks_for_it(
    run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**TASK, "SLURM_PROCID": "1", "PATH": str(tmp_path)}.items():  # worker 0, without a scontrol
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm_launcher, "_run_role", lambda *job: REQUEUE)
    monkeypatch.setattr(slurm_launcher.subprocess, "run", run)
    assert main(["--cluster", "slurm", "--requeue", "--log_dir", str(tmp_path / "log"), __file__]) == REQUEUE
    assert lines_naming(capsys.readouterr().out, 17, "scontrol")


def test_keys_are_made_once_by_rank_0_and_removed_by_it(tmp_path: Path) -> None:
    first, other = (read_step({**TASK, "SLURM_PROCID": rank}) for rank in ("0", "1"))
    with pytest.raises(RoleError, match=naming("0.3", "keys")):
        SlurmMeeting(tmp_path, other, 0.3).keys()
    folder = SlurmMeeting(tmp_path, first, 5.0).keys()
    assert SlurmMeeting(tmp_path, other, 5.0).keys() == folder
    SlurmMeeting(tmp_path, other, 5.0).remove_keys()
    assert (Path(folder) / "server.key_secret").stat().st_mode & 0o077 == 0
    SlurmMeeting(tmp_path, first, 5.0).remove_keys()
    assert not Path(folder).exists()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    step = read_step(TASK)
    (tmp_path / step.name).mkdir()
    (tmp_path / step.name).chmod(0o777)
    with pytest.raises(SecurityError, match=naming(tmp_path / step.name)):
        SlurmMeeting(tmp_path, step, 5.0)


@pytest.mark.parametrize("is_finished", [True, False])
def test_the_first_task_records_what_the_others_said_last_and_whether_the_job_finished(
    is_finished: bool, tmp_path: Path
) -> None:
    status = tmp_path / ".status.worker.0"
    status.write_text('{"steps": 3}')
    step = read_step({**TASK, "SLURM_PROCID": "0"})
    with watched(JobSpec(("train.py",), tmp_path), step, tmp_path, 1, 1) as (show, show_end):
        show()
        status.unlink()  # as a task does when it has ended
        if is_finished:
            show_end()
    *others, end = HistoryReader(tmp_path).records()
    assert end["finished"] is is_finished
    workers = [(record["state"], record["status"]) for record in others if record.get("key") == "worker.0"]
    assert workers == [("running", {"steps": 3}), ("done", {"steps": 3})][: 1 + is_finished]


# Lists of hosts, held against scontrol where it is installed


@each_of(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[01-03,7],m5", ["n01", "n02", "n03", "n7", "m5"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu-a[1-2].site,b", ["gpu-a1.site", "gpu-a2.site", "b"]),
    ],
)
def test_names_are_written_out(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@each_of("text", ["", ",", "n[1-2", "n]1[", "n[]", "n[3-1]", "n[1-x]", "n[[1]]", "n[0-9999999]", "a,"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(RoleError, match=r"hosts|brackets"):
        expand_hostlist(text)


def test_a_list_of_too_many_is_refused_before_it_is_made() -> None:
    with pytest.raises(RoleError, match="more than 65,536"):
        expand_hostlist("n[0-60000][0-60000][0-60000][0-60000]")


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment for it: it wants a configuration, and asks no daemon."""
    if shutil.which("scontrol") is None:
        pytest.skip("needs the program scontrol (apt-get install slurm-client)")
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=any\nSlurmctldHost=localhost\nNodeName=localhost\n")
    return {**os.environ, "SLURM_CONF": str(path)}


@settings(max_examples=examples(60), deadline=None)
@given(LISTS)
def test_scontrol_writes_out_the_same(scontrol: dict[str, str], text: str) -> None:
    command = ["scontrol", "show", "hostnames", text]
    told = subprocess.run(command, env=scontrol, capture_output=True, text=True, check=True)
    assert expand_hostlist(text) == told.stdout.split()
