"""The benchmark of attacks: it attacks, the server lives, and what it holds is bounded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.paths import ROOT

from benchmarks import abuse


@pytest.mark.long
@pytest.mark.parametrize("attacks", [["gathers"], ["leave", "gathers"]], ids=len)
def test_a_server_outlives_attacks_and_holds_little_of_them(attacks: list[str]) -> None:
    """No figure of speed: other tests run beside this one. Real interpreters, because memory is looked at."""
    options = ["--seconds", "1", "--json", "--only", ",".join(attacks), "--keys_per_pull", "1000"]
    command = [sys.executable, "-m", "benchmarks.abuse", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=200)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["survived"]
    assert set(found["attacks"]) == set(attacks)
    assert 1 << 20 < found["attacks"]["gathers"]["held_bytes"] <= found["held_bytes_max"] <= 256 << 20
    assert found["p99_ratio"] == max(figures["p99_ratio"] for figures in found["attacks"].values()) > 0


def test_attacks_that_nobody_knows_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["abuse", "--only", "leave,sorcery"])
    with pytest.raises(SystemExit) as ended:
        abuse.options()
    assert ended.value.code == 2
    assert "sorcery" in capsys.readouterr().err
