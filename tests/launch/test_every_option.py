"""Every option at every launcher: alone it changes what would be started, or it is refused by its name.

The options are those that --help lists, so that a new one is tried, too. Nothing is started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.messages import names

from torchfleet.launch import cli

ADDRESSES = ("--servers", "127.0.0.1:7000", "--workers", "127.0.0.1:0")
STEP = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n1", "SLURMD_NODENAME": "n1", "SLURM_CPUS_PER_TASK": "4",
}  # fmt: skip
# By launcher: its command, and what makes a job one of it.
JOBS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "servers": ((), ("--server_num", "1", "--worker_num", "1")),
    "hosts": ((), ADDRESSES),
    "ranks": ((), ("--nproc_per_node", "2")),
    "simulate": ((), ("--simulate",)),
    "ray": ((), ("--cluster", "ray")),
    "ray ranks": ((), ("--cluster", "ray", "--nproc_per_node", "2")),
    "step": ((), ("--cluster", "slurm")),
    "step of ranks": ((), ("--cluster", "slurm", "--nproc_per_node", "2")),
    "slurm": (("slurm",), ()),
    "slurm collective": (("slurm",), ("--nproc_per_node", "2")),
    "k8s": (("k8s",), ("--image", "train:1")),
    "k8s ranks": (("k8s",), ("--image", "train:1", "--nproc_per_node", "2", "--insecure")),
    "k8s serve": (("k8s", "serve"), ("--image", "train:1", "--model", "s3://bucket/model")),
}
HELP = re.compile(r"^  (?:(-\w)(?: \S+)?, )?(--\w+)(?: (\{[^}]+\}|[^\s,]+))?", re.MULTILINE)
# What is not about the job: --keygen and --version do nothing else, --dry_run is how jobs are looked at here.
APART = {"--help", "--version", "--keygen", "--dry_run"}
VALUES = {
    "--server_num": "3", "--worker_num": "3", "--servers": "127.0.0.1:7001", "--workers": "127.0.0.1:5",
    "--heter_workers": "127.0.0.1:7100", "--max_table_bytes": "6GB", "--table_memory": "6GB", "--table_path": "rows",
    "--log_max_bytes": "1MB", "--private": "keys", "--coordinator": "etcd://etcd:2379/run", "--gpus": "4",
    "--orphan_timeout": "60", "--nnodes": "2", "--master": "127.0.0.1:7000", "--rank": "1",
    "--ips": "127.0.0.1,192.0.2.1", "--link": "1Gbit", "--straggler": "0.5x3", "--cluster": "ray=local",
    "--files": "data", "--log_dir": "logs", "--key_dir": "keys", "--metrics_port": "9400",
    "--metrics_host": "192.0.2.1", "--server_memory": "6GB", "--worker_memory": "6GB", "--dashboard": "8000",
    "--time": "60", "--sbatch": "--qos=high", "--signal_seconds": "30", "--resume": "more", "--image": "other:2",
    "--log_size": "20Gi", "--storage_class": "fast", "--pvc": "data=/data", "--node_selector": "disk=ssd",
    "--toleration": "gpu", "--env": "SOME=1", "--ttl": "1000", "--user": "2000", "--name": "other",
    "--namespace": "team", "--env_secret": "store", "--image_pull_secret": "registry", "--service_account": "trainer",
    "--priority_class": "high", "--model": "s3://bucket/other", "--memory": "6GB", "--shard_memory": "6GB",
    "--token_secret": "token", "--tls_secret": "tls", "--key_secret": "keys", "--output": "made",
}  # fmt: skip
# Options that need another one: tried beside it, and without it they are refused.
NEEDS = {
    ("servers", "--log_store"): ("--durability", "log"),
    ("servers", "--fsync_ms"): ("--durability", "log"),
    ("servers", "--coordinator"): ("--replicas", "2"),
    ("servers", "--no_wait_for_backups"): ("--replicas", "2"),
    ("servers", "--metrics_host"): ("--metrics_port", "9400"),
    ("ray", "--no_wait_for_backups"): ("--replicas", "2", "--coordinator", "etcd://etcd:2379/run"),
    ("ray", "--fsync_ms"): ("--durability", "log", "--log_store", "logs"),
    ("step", "--fsync_ms"): ("--durability", "log", "--log_store", "logs"),
    ("slurm", "--signal_seconds"): ("--time", "60", "--requeue"),
    ("slurm", "--resume"): ("--save_on_stop", "model"),
    ("slurm", "--server_cpus"): ("--het",),
    ("slurm", "--fsync_ms"): ("--durability", "log", "--log_store", "logs"),
    ("k8s", "--fsync_ms"): ("--durability", "log"),
    ("k8s", "--log_size"): ("--durability", "log"),
    ("k8s", "--storage_class"): ("--durability", "log"),
    ("k8s", "--no_wait_for_backups"): ("--replicas", "2", "--coordinator", "etcd://etcd:2379/run"),
    ("k8s", "--max_job_restart"): ("--format", "jobset"),
    ("k8s serve", "--shard_cpus"): ("--shards", "2", "--key_secret", "keys"),
    ("k8s serve", "--shard_memory"): ("--shards", "2", "--key_secret", "keys"),
    ("k8s serve", "--shard_replicas"): ("--shards", "2", "--key_secret", "keys"),
}


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a script, what it imports, and a folder of data; an environment without options."""
    for name in ("FLEET_KEY_DIR", "FLEET_METRICS_PORT", "FLEET_LOG_FORMAT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "250")  # --help has one line for an option and its value
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import part\nimport torchfleet as fleet\nfleet.init()\n"
        "if fleet.is_server():\n    fleet.init_server()\n    fleet.run_server()\n"
    )
    Path("part.py").touch()
    Path("data").mkdir()
    Path("data/words.txt").write_text("a\n")


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The status of fleetrun, and what it prints: with status 0 the plan, or the manifests, else the error."""
    try:
        status = cli.main(words)
    except SystemExit as left:
        status = int(left.code or 0)
    told = capsys.readouterr()
    return status, told.err if status else told.out


def options_of(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Every option that --help lists: its short name or "", its name, and how its value is called or ""."""
    _, told = asked(capsys, *command, "--help")
    found = HELP.findall(told)
    assert len(found) > 20, told
    return ((short, name, value) for short, name, value in found if name not in APART)


def value_of(option: str, metavar: str) -> list[str]:
    """A value that is not the default of the option."""
    if not metavar:
        return []
    if option in VALUES:
        return [VALUES[option]]
    return [metavar.strip("{}").split(",")[-1] if metavar.startswith("{") else "3"]


def planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launcher: str, *more: str
) -> tuple[int, str]:
    """What a command line of this launcher plans, without what differs from plan to plan: ports, keys, names of runs.
    A step of Slurm has a server and a worker, or two machines: the plans of both tasks."""
    command, base = JOBS[launcher]
    script = () if launcher == "k8s serve" else ("train.py",)
    dry = () if command else ("--dry_run",)
    plans = []
    for task in ("0", "1") if launcher.startswith("step") else ("0",):
        if launcher.startswith("step"):
            for name, value in {**STEP, "SLURM_PROCID": task}.items():
                monkeypatch.setenv(name, value)
        status, told = asked(capsys, *command, *dry, *base, *more, *script)
        told = re.sub(r"\b127\.0\.0\.1:\d{5}", "HERE", told)
        told = re.sub(r'\b[0-9a-f]{8}\b|"[\w+/=]{60,}"', "MADE", told)
        plans += [line for line in told.splitlines() if "made by:" not in line]
    return status, "\n".join(plans)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", JOBS)
def test_every_option_changes_the_plan_or_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    assert cli.main(["--keygen", "keys"]) == 0
    capsys.readouterr()
    status, base = planned(capsys, monkeypatch, launcher)
    assert status == 0, base
    assert planned(capsys, monkeypatch, launcher) == (0, base), "the plan of the same line must be the same"
    wrong = []
    for short, option, metavar in options_of(capsys, JOBS[launcher][0]):
        if option in JOBS[launcher][1] and not metavar:
            continue
        status, told = planned(capsys, monkeypatch, launcher, option, *value_of(option, metavar))
        is_named = any(names(told, name) for name in (short, option) if name)
        if told == base if status == 0 else (status != 2 or not is_named):
            wrong.append((option, status, told[-300:]))
    assert not wrong


@pytest.mark.parametrize(("launcher", "option"), NEEDS)
def test_an_option_that_needs_another_acts_beside_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launcher: str, option: str
) -> None:
    (metavar,) = (value for _, name, value in options_of(capsys, JOBS[launcher][0]) if name == option)
    words = [option, *value_of(option, metavar)]
    alone, told = planned(capsys, monkeypatch, launcher, *words)
    assert alone == 2
    assert names(told, option)
    before, after = (
        planned(capsys, monkeypatch, launcher, *NEEDS[launcher, option]),
        planned(capsys, monkeypatch, launcher, *NEEDS[launcher, option], *words),
    )
    assert (before[0], after[0]) == (0, 0), after[1]
    assert before[1] != after[1]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["servers", "slurm", "k8s", "k8s serve"])
def test_an_empty_value_is_refused_by_the_name_of_its_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    wrong = []
    found = [("", "--keygen", "DIR"), *options_of(capsys, JOBS[launcher][0])]
    for _, option, metavar in found if launcher == "servers" else found[1:]:
        status, told = planned(capsys, monkeypatch, launcher, f"{option}=") if metavar else (2, option)
        if status != 2 or not names(told, option):
            wrong.append((option, status, told[-300:]))
    assert not wrong
    assert not Path("made").exists()


@pytest.mark.parametrize("more", [("train.py",), ("--worker_num", "2"), ("--dry_run",)])
def test_keygen_refuses_what_it_would_ignore(capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    status, told = asked(capsys, "--keygen", "keys", *more)
    assert status == 2
    assert names(told, "--keygen", "script" if more == ("train.py",) else more[0])
    assert not Path("keys").exists()
