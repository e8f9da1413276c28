"""The scripts of the design that begin with files, on made-up Criteo rows: a reader in a pipe, training and prediction
from a dataset, in one process and under fleetrun."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.paths import SCRIPTS
from support.scripts.launching import Forked, clean_environment, forked_fleetrun

import torchfleet as fleet

NUM_FILES, NUM_ROWS = 3, 100  # rows per file
NUM = NUM_FILES * NUM_ROWS
# `python` in a pipe command is the one that runs the tests
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows whose label follows from their first category; and the reader. The working directory of what is started."""
    rng = np.random.default_rng(0)
    for i in range(NUM_FILES):
        lines = []
        for _ in range(NUM_ROWS):
            label = int(rng.integers(2))
            numbers = ["" if rng.random() < 0.2 else str(rng.integers(-2, 500)) for _ in range(13)]
            names = ["" if rng.random() < 0.1 else f"{rng.integers(1 << 6):08x}" for _ in range(25)]
            lines.append("\t".join([str(label), *numbers, f"{label * 100 + rng.integers(5):08x}", *names]) + "\n")
        text = "".join(lines)
        if i:
            (tmp_path / f"part-{i}").write_text(text)
        else:
            (tmp_path / f"part-{i}.gz").write_bytes(gzip.compress(text.encode()))
    shutil.copy(SCRIPTS / "criteo_reader.py", tmp_path / "reader.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reports(text: str) -> list[dict[str, Any]]:
    """What the workers say at the end."""
    return [json.loads(line.partition("found ")[2]) for line in text.splitlines() if "found {" in line]


def untrained(found: dict[str, Any]) -> bool:
    return bool(found["mean"]["loss"] > 0.5)  # without training it is 0.69


def test_the_reader_prints_what_training_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader in a pipe and the built-in format agree on every value."""
    monkeypatch.setenv("PATH", PATH)
    slots = [fleet.Slot(slot.name) if slot.name.startswith("C") else slot for slot in fleet.CriteoFormat.slots()]
    files = sorted(str(path) for path in folder.glob("part-*"))
    made = []
    for options in ({"pipe_command": "python reader.py"}, {"data_format": fleet.CriteoFormat()}):
        data = fleet.InMemoryDataset()
        data.init(batch_size=NUM, use_var=slots, **options)
        data.set_filelist(files)
        data.load_into_memory()
        made.append(next(iter(data)))
    piped, built_in = made
    assert piped.num_samples == built_in.num_samples == NUM
    for slot in slots:
        if slot.dim is None:
            assert torch.equal(piped[slot.name].values, built_in[slot.name].values)
            assert torch.equal(piped[slot.name].offsets, built_in[slot.name].offsets)
        else:
            torch.testing.assert_close(piped[slot.name], built_in[slot.name], rtol=1e-6, atol=0)


def test_the_reader_can_be_looked_at_from_the_command_line(folder: Path) -> None:
    """cat part-1 | python reader.py"""
    done = subprocess.run(
        [sys.executable, "reader.py"],
        input=(folder / "part-1").read_text(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=clean_environment(),
    )
    lines = done.stdout.splitlines()
    assert len(lines) == NUM_ROWS
    fields = lines[0].split()
    assert len(fields) == 14 + 26 * 2 + 2
    assert (fields[0], fields[14], fields[-2]) == ("13", "1", "1")


@pytest.mark.parametrize(("mode", "thread"), [("async", 3), pytest.param("sync", 1, marks=pytest.mark.long)])
def test_script_2_runs_as_one_process(folder: Path, mode: str, thread: int) -> None:
    arguments = [str(SCRIPTS / "from_files.py"), str(folder), "--mode", mode, "--thread", str(thread)]
    with Forked([sys.executable, *arguments], PATH=PATH) as job:
        assert job.wait() == 0, job.output
    (found,) = reports(job.output)
    assert found["sizes"] == [NUM, NUM]
    assert found["results"] == [[NUM // 20, NUM]] * 3
    assert not untrained(found)
    assert found["unforeseen"] <= 2 * 2 * thread  # two tables, the first two batches of each thread
    assert "train step 5 |" in job.output
    assert job.output.count("\nauc 0.") >= 3, "the watch speaks at the end of each pass"


@pytest.mark.slow
def test_script_2_runs_under_fleetrun(folder: Path) -> None:
    log = folder / "log"
    script = str(SCRIPTS / "from_files.py")
    counts = ("--server_num", "2", "--worker_num", "2")
    # Six passes: on cores that others use, most gradients of the first ones come late.
    with forked_fleetrun(log, *counts, script, str(folder), "--passes", "6", PATH=PATH) as job:
        assert job.wait() == 0, job.output
    logs = {path.name: path.read_text() for path in log.rglob("*") if path.is_file()}
    found = sorted(
        (report for name, text in logs.items() for report in reports(text)), key=lambda report: report["worker"]
    )
    assert [report["worker"] for report in found] == [0, 1], logs.keys()
    for report in found:
        assert report["sizes"] == [NUM // 2, NUM]
        assert report["results"] == [[8, NUM // 2]] * 6
        assert not untrained(report)


DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def test_script_7_runs_as_one_process(tmp_path: Path) -> None:
    with Forked([sys.executable, str(SCRIPTS / "network_on_device.py")], folder=tmp_path) as job:
        assert job.wait() == 0, job.output
    (found,) = reports(job.output)
    assert found["devices"] == [DEVICE]
    assert found["losses"][1] < 0.5 * found["losses"][0]


def test_script_7_runs_under_fleetrun(tmp_path: Path) -> None:
    script, counts = str(SCRIPTS / "network_on_device.py"), ("--server_num", "1", "--worker_num", "2")
    with forked_fleetrun(tmp_path / "log", *counts, script, folder=tmp_path) as job:
        assert job.wait() == 0, job.output
    logs = [path.read_text() for path in (tmp_path / "log" / "latest").glob("workerlog.*")]
    found = sorted((report for text in logs for report in reports(text)), key=lambda report: report["worker"])
    assert [report["worker"] for report in found] == [0, 1]
    for report in found:
        (device,) = report["devices"]
        assert device.startswith(DEVICE[:3])
        assert report["losses"][1] < 0.5 * report["losses"][0]
