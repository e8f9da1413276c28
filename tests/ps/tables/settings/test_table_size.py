"""tables/settings/table_size: sizes as users write them, and where a limit of tables reaches them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import jobs
from support.messages import names, naming
from support.scripts.launching import SOON, TINY, forked_fleetrun

import torchfleet as fleet
from torchfleet.base.errors import FleetError, TableError
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.rows.memory import physical_bytes
from torchfleet.ps.tables.settings.table_size import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("1073741824", 1 << 30),
        ("8GB", 8 << 30),
        ("8 GB", 8 << 30),
        ("8g", 8 << 30),
        ("8GiB", 8 << 30),
        (" 512MB ", 512 << 20),
        ("1.5T", 3 << 39),
        ("64kb", 64 << 10),
        ("100B", 100),
    ],
)
def test_a_size_is_read_in_powers_of_1024(text: str, expected: int) -> None:
    assert parse_bytes(text, "it") == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "0", "0.5", "8 bananas", "8GBB", "1e9", "nan", "8,000", "9999999T", "²"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(TableError, match="8GB"):
        parse_bytes(text, "it")


def test_the_environment_limits_the_tables_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_MAX_TABLE_BYTES", "3MB")
    assert Server().state.max_table_bytes == 3 << 20
    assert Server(77).state.max_table_bytes == 77
    monkeypatch.setenv("FLEET_MAX_TABLE_BYTES", "lots")
    with pytest.raises(TableError, match=naming("FLEET_MAX_TABLE_BYTES", "'lots'")):
        Server()
    monkeypatch.delenv("FLEET_MAX_TABLE_BYTES")
    assert Server().state.max_table_bytes == physical_bytes()


@pytest.mark.slow
def test_the_environment_limits_the_tables_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the error of a full table says how to set it."""
    monkeypatch.setenv("FLEET_MAX_TABLE_BYTES", "1KB")
    with jobs.clean_facade():
        fleet.init()
        model = fleet.distributed_model(torch.nn.Sequential(fleet.nn.SparseEmbedding(2)))
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fleet.init_worker()
        model(torch.arange(60))
        advice = naming(60, "fleetrun --max_table_bytes 8GB", "FLEET_MAX_TABLE_BYTES")
        with pytest.raises(FleetError, match=advice):
            model(torch.arange(60, 70))


@pytest.mark.slow
def test_a_bare_server_takes_a_size_and_refuses_what_is_none() -> None:
    command = [sys.executable, "-m", "torchfleet.server", "--max_table_bytes", "plenty"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert names(done.stderr, "--max_table_bytes", "8GB")


@pytest.mark.slow
def test_fleetrun_hands_the_limit_to_every_process_of_the_job(tmp_path: Path) -> None:
    with forked_fleetrun(tmp_path, "--dry_run", "--max_table_bytes", "2GB", "--server_num", "1", str(TINY)) as job:
        assert job.wait(SOON) == 0, job.output
    assert job.output.count(f"FLEET_MAX_TABLE_BYTES={2 << 30}") == 2


@pytest.mark.slow
def test_a_job_whose_table_outgrows_its_limit_ends_and_says_how_to_raise_it(tmp_path: Path) -> None:
    counts = ("--server_num", "1", "--worker_num", "1")
    with forked_fleetrun(tmp_path, "--max_table_bytes", "64B", *counts, str(TINY)) as job:
        assert job.wait() == 1, job.output
    assert "max_table_bytes" in job.output
    assert "fleetrun --max_table_bytes 8GB" in job.output
