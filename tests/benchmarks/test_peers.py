"""benchmarks/peers: the same data for all, quality against scikit-learn, pairs in turns, and rivals that cannot run."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.extras import Late
from support.paths import ROOT

from benchmarks.peers import __main__ as peers
from benchmarks.peers import clicks, runs

oracle = Late("sklearn.metrics")
CHOSEN = argparse.Namespace(rows=400, batch=50, dim=4, largest=100, seed=0, threads=1, rounds=3, site={}, number=2)


def test_workers_share_the_same_rows_and_ids_are_rows_of_one_table() -> None:
    whole = clicks.generated(400 + clicks.WARM * 50 * 2, 100, 0)
    parts = [clicks.share(argparse.Namespace(**{**vars(CHOSEN), "index": index})) for index in range(2)]
    for column, halves in zip(whole, zip(*parts, strict=True), strict=True):
        assert np.array_equal(np.stack(halves, 1).reshape(column.shape), column)
    assert whole[0].max() < clicks.num_rows(CHOSEN)
    assert 0.1 < whole[2].mean() < 0.6


def test_quality_is_the_area_of_scikit_learn_with_ties() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 300), rng.integers(0, 2, 300)
    assert clicks.auc(scores, labels) == pytest.approx(oracle.roc_auc_score(labels, scores))


def report(samples: float, seconds: float, **more: float) -> dict[str, float]:
    return {"samples": samples, "seconds": seconds, "cpu_s": seconds, "peak_mb": 100.0, **more}


def test_a_run_is_all_of_its_processes() -> None:
    found = runs.summary([report(0, 0), report(1000, 2.0, auc=0.75), report(1000, 4.0)])
    assert found == {"samples_per_s": 500, "cpu_us": 3000, "peak_mb": 300, "auc": 0.75}


def test_pairs_take_turns_and_ratios_are_medians_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds, order = iter([100, 200, 100, 100, 100, 400]), []

    def run(contender: runs.Contender, chosen: argparse.Namespace) -> list[dict[str, float]]:
        order.append(contender.module)
        return [report(next(speeds), 1.0, auc=0.7)]

    monkeypatch.setattr(peers, "run", run)
    found = peers.measured("torch", CHOSEN)
    assert order == ["torch_loader", "ours"] * 3
    assert found["torch_ratio"] == 2
    assert found["torch_samples_per_s"] == 100
    assert "| 2.00 |" in peers.table(found, ["torch"])


def test_a_rival_that_cannot_run_has_the_reason_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "run", lambda *_: (_ for _ in ()).throw(runs.Unable("no module named paddle")))
    found: dict[str, Any] = peers.measured("paddle", CHOSEN)
    assert list(found) == ["paddle_ratio"]
    assert "no module named paddle. Works: paddlepaddle 2.6.2" in peers.table(found, ["paddle"])


def test_versions_that_work_are_those_of_the_page() -> None:
    """Of every package that the script names, the page installs that version."""
    page = (ROOT / "docs" / "compare.md").read_text()
    named = {match for text in peers.SEEN.values() for match in re.findall(r"([a-z-]+) (\d+\.\d+\.\d+)", text)}
    missing = {f"{package}=={version}" for package, version in named if f"{package}=={version}" not in page}
    assert missing == {"torchrec==0.1.0"}  # what pip takes by itself


@pytest.mark.slow
def test_processes_of_one_that_has_failed_are_ended_and_its_error_is_told() -> None:
    failing = "print('ValueError: no rows'); print('bye'); exit(3)"
    commands = [[sys.executable, "-c", text] for text in ("import time; time.sleep(600)", failing)]
    begin = time.monotonic()
    with pytest.raises(runs.Unable, match=r"^played failed: ValueError: no rows$"):
        runs.run_all(commands, runs.Contender("played"))
    assert time.monotonic() - begin < 300


@pytest.mark.slow
def test_a_server_that_does_not_end_is_ended_after_the_worker_and_its_memory_is_told(tmp_path: Path) -> None:
    """The worker ends when the server's interpreter runs: before, it has next to no memory."""
    up = str(tmp_path / "up")
    serving = f"import time; open({up!r}, 'w').close(); time.sleep(600)"
    working = f"import os, time\nwhile not os.path.exists({up!r}): time.sleep(0.01)\nprint('trained')"
    commands = [[sys.executable, "-c", text] for text in (serving, working)]
    server, worker = runs.run_all(commands, runs.Contender("played", has_server=True))
    assert worker == "trained\n"
    assert 1 < json.loads(server.partition("RESULT ")[2])["peak_mb"] < 1000


@pytest.mark.slow
@pytest.mark.long
def test_a_process_that_fails_is_told_by_its_last_line() -> None:
    chosen = argparse.Namespace(**{**vars(CHOSEN), "rows": -10_000})
    with pytest.raises(runs.Unable, match="torch_loader failed"):
        runs.run(runs.Contender("torch_loader"), chosen)
