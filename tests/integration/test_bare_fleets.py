"""Fleets whose servers do without the script: what they have imported, what they load, and how soon one is replaced."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.scripts.launching import START, Started, fleetrun, forked_fleetrun, in_log, run_dir, wait_until

from torchfleet.ps.kernels.jit import mark_of_all
from torchfleet.ps.server.job.warm import compile_all

COUNTED = str(Path(__file__).parents[1] / "support" / "scripts" / "counted.py")
SCRIPT = """
import torch
import torchfleet as fleet

fleet.init()
torch.manual_seed(0)
print("the script runs")
model = fleet.distributed_model(torch.nn.Sequential(fleet.nn.SparseEmbedding(2, name="words"), torch.nn.Linear(2, 1)))
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.5))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    ids = torch.arange(6)
    for _ in range(3):
        model(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.save_persistables("model")
    print(f"numbers: {model(ids).flatten().tolist()}")
    fleet.stop_worker()
"""


def status(log_dir: Path, replica: int) -> dict[str, Any]:
    path = run_dir(log_dir) / f".status.server.0{'.replica1' if replica else ''}"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def check_bare(pid: int) -> psutil.Process:
    """The process has not loaded torch, and is small. Returns it."""
    with open(f"/proc/{pid}/maps") as file:
        assert "libtorch" not in file.read()
    process = psutil.Process(pid)
    assert process.memory_info().rss < 250 << 20
    return process


@pytest.mark.slow
@pytest.mark.long
def test_a_lost_server_is_replaced_by_one_that_imports_nothing_anew(tmp_path: Path) -> None:
    """In processor time, which does not depend on what else runs: of a new interpreter it would be a second or more,
    and seconds with the script."""
    if not mark_of_all().exists():
        compile_all()  # a server that compiles kernels spends more, and is larger
    end = tmp_path / "end"
    script = (COUNTED, "--mode", "async", "--steps", "1000000", "--until", str(end))
    flags = ("--server_num", "1", "--worker_num", "1", "--replicas", "2")
    with fleetrun(tmp_path, *flags, *script, FLEET_FORK_SERVERS="1") as started:
        logs = [run_dir(tmp_path) / name for name in ("serverlog.0", "serverlog.0.replica1")]
        wait_until(in_log(logs[0], " is the backup now"), START, "backup")
        wait_until(lambda: bool(status(tmp_path, 0) and status(tmp_path, 1)), START, "status of both replicas")
        before = [check_bare(status(tmp_path, replica)["pid"]).pid for replica in range(2)]
        os.kill(before[0], signal.SIGKILL)
        wait_until(in_log(logs[1], " is the backup now"), START, "new backup")
        wait_until(lambda: status(tmp_path, 0).get("pid", before[0]) != before[0], START, "status of the new backup")
        spent = check_bare(status(tmp_path, 0)["pid"]).cpu_times()
        assert spent.user + spent.system < 1.0
        end.touch()
        assert started.wait() == 0, started.output
        assert " 0 numbers are wrong" in (run_dir(tmp_path) / "workerlog.0").read_text()


def run_script(folder: Path, text: str, *flags: str) -> tuple[Started, str]:
    """Run the script by a fleet with two servers. Returns its output, and the numbers that worker 0 has found."""
    (folder / "train.py").write_text(text)
    job = forked_fleetrun(folder / "log", "--server_num", "2", "--worker_num", "1", *flags, str(folder / "train.py"))
    with job as started:
        assert started.wait() == 0, started.output
    text = (run_dir(folder / "log") / "workerlog.0").read_text()
    return started, next(line for line in text.splitlines() if line.startswith("numbers: "))


def server_log(folder: Path) -> str:
    return (run_dir(folder / "log") / "serverlog.1").read_text()


@pytest.mark.slow
def test_training_is_the_same_with_and_without_the_script_on_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bare, first = run_script(tmp_path, SCRIPT)
    assert "the script runs" not in server_log(tmp_path)
    assert "servers run the script" not in bare.output
    asked, same = run_script(tmp_path, SCRIPT, "--servers_run_script")
    assert "the script runs" in server_log(tmp_path)
    assert "servers run the script" not in asked.output
    more, again = run_script(tmp_path, SCRIPT.replace("fleet.run_server", "print('mine'); fleet.run_server"))
    assert "mine" in server_log(tmp_path)
    assert "servers run the script: train.py, line " in more.output
    assert first == same == again


@pytest.mark.slow
def test_servers_without_the_script_load_what_init_server_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is written out, and workers do not know it; or it is a variable, which workers give to init_worker."""
    monkeypatch.chdir(tmp_path)
    _, first = run_script(tmp_path, SCRIPT)
    resuming = SCRIPT.replace("fleet.save_persistables", "str").replace("init_server()", "init_server('model')")
    variable = resuming.replace("init_server('model')", "init_server(saved)").replace(
        "init_worker()", "init_worker(saved)"
    )
    _, by_script = run_script(tmp_path, resuming, "--servers_run_script")
    for text in (resuming, f"saved = 'model'\n{variable}"):
        _, bare = run_script(tmp_path, text)
        assert "the script runs" not in server_log(tmp_path)
        assert bare == by_script != first
