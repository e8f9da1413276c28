"""benchmarks/ctr_auc: which AUCs break its rules, and a whole run of it, tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from support import processes
from support.cases import each_of
from support.paths import ROOT
from support.scripts.launching import clean_environment

from benchmarks import ctr_auc

LOCAL = [[0.70, 0.750], [0.70, 0.755], [0.70, 0.752]]


def moved(by: float, seeds: int = 3) -> list[list[float]]:
    return [[first, last + by] for first, last in LOCAL[:seeds]]


@each_of(
    ("sync", "asynchronous", "broken"),
    [
        (0.0, 0.0, []),
        (4e-4, -0.0019, []),
        (0.0, 0.01, []),  # better than local breaks no rule
        (6e-4, 0.0, ["sync"] * 3),
        (-6e-4, 0.0, ["sync"] * 3),
        (0.0, -0.0021, ["async"]),
    ],
)
def test_sync_must_be_local_and_async_at_most_two_thousandths_below(
    sync: float, asynchronous: float, broken: list[str]
) -> None:
    modes, found = ctr_auc.judged({"local": LOCAL, "sync": moved(sync), "async": moved(asynchronous), "geo": LOCAL})
    assert modes == ["sync", "async"]
    assert [line.split()[0] for line in found] == broken


def test_async_is_not_judged_by_fewer_than_three_seeds() -> None:
    assert ctr_auc.judged({"local": LOCAL[:2], "async": moved(-0.1, 2)}) == ([], [])
    assert ctr_auc.judged({"async": moved(-0.1)}) == ([], [])


@pytest.mark.parametrize(("below", "status"), [(0.001, 0), (0.003, 1)])
def test_a_broken_rule_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], below: float, status: int
) -> None:
    def trained(chosen: Any, mode: str, seed: int, curve: Any) -> list[float]:
        return LOCAL[seed] if mode != "async" else moved(-below)[seed]

    monkeypatch.setattr(ctr_auc, "trained", trained)
    monkeypatch.setattr(sys, "argv", ["ctr_auc", "--data", "none", "--no_regression", "--json"])
    assert ctr_auc.main() == status
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["judged"] == ["sync", "async"]
    assert len(result["broken"]) == status


@pytest.mark.slow
@pytest.mark.parametrize("modes", [["local", "sync"], pytest.param(ctr_auc.MODES, marks=pytest.mark.long)], ids=len)
def test_a_quick_run_holds_that_sync_is_local(modes: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.ctr_auc", "--quick", "--json", "--modes", *modes]
    done = processes.run(command, timeout=300, stderr=subprocess.PIPE, cwd=ROOT, env=clean_environment())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["judged"] == ["sync"]
    assert abs(result["sync"] - result["local"]) <= ctr_auc.SYNC_APART
    assert set(result["runs"]) == {"local", "sync", "async"} & set(modes)
    assert all(0.4 < result[mode] < 1.0 for mode in result["runs"])
