"""What a job has from the process that starts it: variables of the user, and nothing of a job around it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.messages import names
from support.scripts.launching import fleetrun, run_dir

from torchfleet.base.role.variables import NAMES
from torchfleet.launch import cli

RAY = ("--cluster", "ray")
RANKS = ("--nproc_per_node", "2")
# What a worker of a job with a log, backups and workers that come and go finds in its environment.
OUTER = {
    "FLEET_ROLE": "WORKER", "FLEET_WORKER_INDEX": "1", "FLEET_NUM_WORKERS": "4", "FLEET_RESTART": "2",
    "FLEET_SERVER_ENDPOINTS": "127.0.0.1:7000|127.0.0.1:7001", "FLEET_WORKER_ENDPOINTS": "127.0.0.1:99",
    "FLEET_MAX_RESTART": "3", "FLEET_MIN_WORKERS": "2", "FLEET_ON_WORKER_LOSS": "go_on", "FLEET_DURABILITY": "log",
    "FLEET_LOG_STORE": "/outer/store", "FLEET_LOG_RUN": "outer", "FLEET_FSYNC_MS": "77",
    "FLEET_COORDINATOR": "etcd://outer:2379/run", "FLEET_WAIT_FOR_BACKUPS": "0", "FLEET_SAVE_ON_STOP": "/outer/model",
    "FLEET_STATUS_FILE": "/outer/.status.worker.1", "FLEET_ADDRESS_BOOK": "/outer/book", "FLEET_LOG_FORMAT": "text",
}  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import os\nfor name, value in os.environ.items():\n    print(f'{name}={value}')\n")
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = cli.main(["--dry_run", *words])
    told = capsys.readouterr()
    return status, told.err if status else told.out


class TestOfAnOuterJob:
    @pytest.mark.parametrize("options", [(), RAY, ("--replicas", "2"), ("--durability", "log"), ("--simulate",)])
    def test_a_plan_has_nothing_of_it(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        script: str,
        options: tuple[str, ...],
    ) -> None:
        alone = planned(capsys, "--servers", "127.0.0.1:7100", "--workers", "127.0.0.1:0", script)
        for name, value in OUTER.items():
            monkeypatch.setenv(name, value)
        assert planned(capsys, "--servers", "127.0.0.1:7100", "--workers", "127.0.0.1:0", script) == alone
        status, told = planned(capsys, *options, script)
        assert status == 0, told
        assert "outer" not in told
        assert "FLEET_MIN_WORKERS" not in told
        assert "=77" not in told

    @pytest.mark.slow
    @pytest.mark.parametrize("options", [("--worker_num", "1"), ("--nproc_per_node", "1")])
    def test_processes_inherit_nothing_of_it(self, tmp_path: Path, script: str, options: tuple[str, ...]) -> None:
        given = {**OUTER, "FLEET_WORKER_TIMEOUT": "33", "FLEET_REGION": "north"}
        with fleetrun(tmp_path / "log", *options, script, **given) as job:
            job.wait()
        found = (run_dir(tmp_path / "log") / "workerlog.0").read_text().splitlines()
        assert "FLEET_WORKER_TIMEOUT=33" in found
        assert "FLEET_REGION=north" in found
        of_outer = {f"{name}={value}" for name, value in OUTER.items()} - {"FLEET_ROLE=WORKER"}
        assert not of_outer & set(found)
        assert not [line for line in found if "outer" in line]


class TestOfTheUser:
    @pytest.mark.parametrize(
        ("name", "value", "named"),
        [
            ("FLEET_DURABILTY", "log", "FLEET_DURABILITY"),
            ("FLEET_DURABILITY", "lgo", "log"),
            ("FLEET_MAX_RESTART", "abc", "--max_restart"),
            ("FLEET_MAX_RESTART", "3", "--max_restart"),
            ("FLEET_NUM_WORKERS", "3", "--worker_num"),
            ("FLEET_FORK_SERVERS", "abc", "'abc'"),
            ("FLEET_SERVERS_RUN_SCRIPT", "abc", "'abc'"),
            ("FLEET_WAIT_FOR_BACKUPS", "abc", "'abc'"),
            ("FLEET_ORPHAN_TIMEOUT", "abc", "'abc'"),
        ],
    )
    @pytest.mark.parametrize("options", [(), RANKS, ("--simulate",), RAY])
    def test_a_variable_that_would_be_ignored_is_refused(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        script: str,
        name: str,
        value: str,
        named: str,
        options: tuple[str, ...],
    ) -> None:
        monkeypatch.setenv(name, value)
        status, told = planned(capsys, *options, script)
        assert status == 2
        assert names(told, name, named)

    @pytest.mark.parametrize(
        ("name", "value"), [("FLEET_DURABILITY", "log"), ("FLEET_REPLICAS", "2"), ("FLEET_ON_WORKER_LOSS", "wait")]
    )
    @pytest.mark.parametrize("options", [RANKS, ("--simulate",), (*RAY, *RANKS)])
    def test_a_protection_that_the_job_cannot_have_is_refused(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        script: str,
        name: str,
        value: str,
        options: tuple[str, ...],
    ) -> None:
        monkeypatch.setenv(name, value)
        status, told = planned(capsys, *options, script)
        assert status == 2
        assert names(told, name, value)

    def test_ray_passes_settings_on_but_not_the_format_of_logs(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str
    ) -> None:
        monkeypatch.setenv("FLEET_LOG_FORMAT", "json")
        monkeypatch.setenv("FLEET_WORKER_TIMEOUT", "33")
        status, told = planned(capsys, *RAY, script)
        assert status == 0, told
        assert told.count("FLEET_WORKER_TIMEOUT=33") == 2
        assert "FLEET_LOG_FORMAT" not in told  # the lines are made JSON once, where the logs are


@pytest.mark.parametrize(("options", "is_keyed", "is_insecure"), [((), True, False), (("--insecure",), False, True)])
def test_a_plan_for_ray_says_what_keys_there_are(
    capsys: pytest.CaptureFixture[str],
    script: str,
    options: tuple[str, ...],
    is_keyed: bool,
    is_insecure: bool,
) -> None:
    status, told = planned(capsys, *RAY, *options, script)
    assert status == 0, told
    assert ("keys are made" in told) == is_keyed
    assert ("FLEET_KEY_DIR=" in told) == is_keyed
    assert ("FLEET_INSECURE=1" in told) == is_insecure


def test_a_plan_for_ray_names_the_given_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path, script: str) -> None:
    assert cli.main(["--keygen", str(tmp_path / "keys")]) == 0
    capsys.readouterr()
    status, told = planned(capsys, *RAY, "--key_dir", str(tmp_path / "keys"), "-m", "json.tool")
    assert status == 0, told
    assert "keys are made" not in told
    assert str(tmp_path / "keys") in told


def test_a_plan_of_ranks_under_slurm_is_that_of_this_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    step = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "1", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "n[1-2]"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    status, told = planned(capsys, "--cluster", "slurm", *RANKS, "--insecure", script)
    assert status == 0, told
    assert [line.partition(":")[0] for line in told.splitlines() if not line.startswith(" ")] == ["rank 2", "rank 3"]
    assert "MASTER_ADDR=n1" in told


@pytest.mark.parametrize("hosts", ["abc.invalid", "192.0.2.1"])
def test_one_machine_that_is_another_one_is_refused(
    capsys: pytest.CaptureFixture[str], script: str, hosts: str
) -> None:
    status, told = planned(capsys, *RANKS, "--ips", hosts, script)
    assert status == 2
    assert names(told, "--ips", hosts)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_variable_stands_once_in_every_pod(capsys: pytest.CaptureFixture[str], script: str, name: str) -> None:
    options = [
        "--image", "train:1", "--max_restart", "2", "--durability", "log", "--fsync_ms", "5", "--replicas", "2",
        "--coordinator", "etcd://etcd:2379/run", "--no_wait_for_backups", "--servers_run_script", "--save_on_stop",
        "/model", "--metrics_port", "9400", "--log_format", "json", "--insecure", "--worker_num", "1:2",
    ]  # fmt: skip
    status = cli.main(["k8s", *options, "--dry_run", "--env", f"{name}=1", script])
    told = capsys.readouterr()
    if status:
        assert status == 2
        assert names(told.err, "--env", name)
        return
    pods = told.out.split("\n    ")
    assert sum(line.startswith(f"{name}=") for line in pods) == told.out.count(" pod")
