"""The benchmark of attacks: it attacks, the server lives, and what it holds is bounded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.paths import ROOT

COMMAND = [sys.executable, "-m", "benchmarks.abuse", "--seconds", "1", "--json"]


@pytest.mark.timeout(100)
def test_a_server_outlives_attacks_and_holds_little_of_them() -> None:
    """No figure of speed: other tests run beside this one."""
    command = [*COMMAND, "--only", "leave,gathers", "--keys_per_pull", "1000"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=90)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["survived"]
    assert set(found["attacks"]) == {"leave", "gathers"}
    assert 1 << 20 < found["attacks"]["gathers"]["held_bytes"] <= found["held_bytes_max"] <= 256 << 20
    assert found["p99_ratio"] == max(figures["p99_ratio"] for figures in found["attacks"].values()) > 0


def test_attacks_that_nobody_knows_are_an_error() -> None:
    ended = subprocess.run(
        [*COMMAND, "--only", "leave,sorcery"], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60
    )
    assert ended.returncode == 2
    assert "found sorcery" in ended.stderr
