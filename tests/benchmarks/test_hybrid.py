"""benchmarks/hybrid: ratios are medians over those of the roof, and the table of a step adds up."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import hybrid, hybrid_auc, hybrid_runs
from benchmarks.hybrid_worker import new_batches
from benchmarks.scale_runs import Outcome


def worker(number: int, seconds: float, auc: float | None = None) -> dict[str, Any]:
    spent = {"rounds": 10, "computed": 0.3, "waited": 0.1, "slowest": 0.04, "rows": 0.02}
    found = {"worker": number, "workers": 2, "samples": 100, "seconds": seconds, "steps": 10, "spent": spent}
    return found if auc is None else {**found, "auc": auc}


def test_figures_are_ratios_to_data_parallelism_without_rows() -> None:
    found = {way: [[worker(0, seconds, 0.7), worker(1, seconds)]] for way, seconds in
             (("ddp", 1.0), ("servers", 1.25), ("ranks", 2.0))}  # fmt: skip
    alone = worker(0, 1.0)
    alone["seconds"] = 0.25
    alone["spent"] = {"rounds": 0, "computed": 0.0, "waited": 0.0, "slowest": 0.0, "rows": 0.01}  # it exchanges nothing
    found["alone"] = [[alone]]
    slowed = {way: [[worker(0, seconds, 0.69), worker(1, seconds)]] for way, seconds in
              (("ddp", 5.0), ("servers", 5.0), ("balance", 2.5))}  # fmt: skip
    with_quorum = [worker(0, 2.0, 0.68), worker(1, 2.0)]
    with_quorum[0]["quorum"] = {"samples": {"on_time": 60.0, "late": 20.0, "dropped": 15.0, "waiting": 5.0}}
    slowed["quorum"] = [with_quorum]
    result = hybrid.summary(found, slowed, 5.0)
    assert result["quorum_ratio"] == pytest.approx(0.8 * 100 / (160 * 1.2 / 2))
    assert result["quorum_auc"] == 0.68
    assert (result["servers_ratio"], result["ranks_ratio"]) == (0.8, 0.5)
    assert result["straggler_ratio"] == pytest.approx(80 / (160 * 1.2 / 2))
    assert result["straggler_ratio_ddp"] == pytest.approx(40 / (200 * 1.2 / 2))
    assert (result["servers_auc"], result["straggler_auc"]) == (0.7, 0.69)
    table = result["step_ms"]
    assert table == {"compute": 28.0, "rows": 2.0, "slowest": 4.0, "exchange": 6.0, "step": 40.0}
    assert sum(table.values()) == 2 * table["step"]
    assert result["lost"] == {"compute": 0.1, "rows": 0.025, "slowest": 0.1, "exchange": 0.15, "efficiency": 0.625}
    assert sum(result["lost"].values()) == pytest.approx(1.0)


def test_every_workers_batch_is_its_share_of_the_global_one() -> None:
    chosen = argparse.Namespace(
        auc_workers=[8, 32], auc_real_up_to=12, auc_batch=1920, auc_epochs=3, seeds=2, servers=2
    )
    found = hybrid_auc.settings(chosen, "rows")
    assert {(s.mode, s.workers, s.batch, s.simulated) for s in found} == {
        (mode, *shape) for mode in ("hybrid", "sync") for shape in ((8, 240, False), (32, 60, True))
    }
    made = [(setting, Outcome([0.6, 0.7 + setting.seed / 100], 1000.0)) for setting in found]
    table = hybrid_auc.table(made)
    assert table["sync_32_simulated"] == {"mean": 0.705, "seeds": [0.7, 0.71], "samples_per_s": 1000.0}
    assert set(table) == {"hybrid_8", "sync_8", "hybrid_32_simulated", "sync_32_simulated"}


def test_results_on_one_line_are_told_apart() -> None:
    made = [{"worker": 0, "exchange": {"rounds": 1}}, {"worker": 1}]
    assert hybrid_runs.results("".join(f"RESULT {json.dumps(each)}" for each in made) + "\n[rank] ends") == made


def test_a_worker_that_joins_again_goes_on_with_its_data_and_no_batch_is_seen_twice(tmp_path: Path) -> None:
    until = tmp_path / "done"
    whole = [[batch[1] for batch in islice(new_batches(worker, 4, until, 0), 3)] for worker in range(2)]
    again = next(new_batches(1, 4, until, 2))
    assert torch.equal(again[1], whole[1][2])
    numbers = {tuple(dense.flatten().tolist()) for own in whole for dense in own}
    assert len(numbers) == 6
    until.touch()
    assert next(new_batches(1, 4, until, 2), None) is None
