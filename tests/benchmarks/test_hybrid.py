"""benchmarks/hybrid: ratios are medians over those of the roof, and the table of a step adds up."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import hybrid, hybrid_auc, hybrid_runs, hybrid_uneven
from benchmarks.hybrid_data import batches, new_batches
from benchmarks.hybrid_worker import WARM, Plan
from benchmarks.scale_runs import Outcome, script_flags


def worker(number: int, seconds: float, auc: float | None = None) -> dict[str, Any]:
    spent = {"rounds": 10, "computed": 0.3, "waited": 0.1, "slowest": 0.04, "rows": 0.02}
    found = {"worker": number, "workers": 2, "samples": 100, "seconds": seconds, "steps": 10, "spent": spent}
    found["trained"] = 150 + number
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
    assert result["trained"] == {"servers": 301, "balance": 301, "quorum": 301}
    table = result["step_ms"]
    assert table == {"compute": 28.0, "rows": 2.0, "slowest": 4.0, "exchange": 6.0, "step": 40.0}
    assert sum(table.values()) == 2 * table["step"]
    assert result["lost"] == {"compute": 0.1, "rows": 0.025, "slowest": 0.1, "exchange": 0.15, "efficiency": 0.625}
    assert sum(result["lost"].values()) == pytest.approx(1.0)


def test_uneven_workers_are_held_against_even_ones_of_the_same_seed() -> None:
    even = [[worker(0, 1.0, auc), worker(1, 1.0)] for auc in (0.70, 0.72)]
    balance = [[worker(0, 2.0, auc), worker(1, 2.0)] for auc in (0.701, 0.717)]
    quorum = [[worker(0, 2.0, auc), worker(1, 2.0)] for auc in (0.69, 0.71)]
    for own in quorum:
        own[0]["quorum"] = {"samples": {"on_time": 60.0, "late": 20.0, "dropped": 15.0, "waiting": 5.0}}
    found = hybrid_uneven.table({"servers": even, "balance": balance, "quorum": quorum}, 5.0)
    assert found["servers"] == {"auc": [0.70, 0.72], "trained": 301}
    assert found["balance"] == {"auc": [0.701, 0.717], "trained": 301, "apart": -0.001, "ratio": round(0.5 / 0.6, 3)}
    assert (found["quorum"]["apart"], found["quorum"]["ratio"]) == (-0.01, round(0.8 * 0.5 / 0.6, 3))


def auc_options(**others: Any) -> argparse.Namespace:
    given = {"auc_workers": [8, 32], "auc_real_up_to": 12, "auc_batch": 1920, "auc_rates": [1e-3], "auc_epochs": 2}
    return argparse.Namespace(**given | {"seeds": 2, "servers": 2} | others)


def test_every_workers_batch_is_its_share_of_the_global_one() -> None:
    found = hybrid_auc.settings(auc_options(), "rows")
    assert {(s.mode, s.workers, s.batch, s.simulated) for s in found} == {
        (mode, *shape) for mode in ("hybrid", "sync") for shape in ((8, 240, False), (32, 60, True))
    }
    made = [(setting, Outcome([0.6, 0.7 + setting.seed / 100], 1000.0)) for setting in found]
    table = hybrid_auc.table(made)
    wanted = {"mean": 0.705, "seeds": [0.7, 0.71], "epochs": [0.6, 0.705], "samples_per_s": 1000.0}
    assert table["sync_32_simulated"] == wanted
    assert set(table) == {"hybrid_8", "sync_8", "hybrid_32_simulated", "sync_32_simulated"}


def test_both_modes_are_given_the_same_rates_and_the_best_is_that_of_the_mean_of_seeds() -> None:
    found = hybrid_auc.settings(auc_options(auc_workers=[8], auc_rates=[1e-3, 4e-3]), "rows")
    assert sorted((s.mode, s.row_rate) for s in found) == sorted(
        2 * [(m, r) for m in hybrid_auc.MODES for r in (1e-3, 4e-3)]
    )
    assert [flag for s in found for flag in script_flags(s)].count("0.004") == 4
    # The lower rate has the best single seed, and the higher one the best mean, after the first epoch.
    low, high = ([0.5, 0.6], [0.5, 0.76]), ([0.74, 0.7], [0.73, 0.7])
    made = [(s, Outcome((low if s.row_rate == 1e-3 else high)[s.seed], 1.0)) for s in found]
    best = {"mean": 0.735, "seeds": [0.74, 0.73], "rate": 4e-3, "epoch": 1}
    assert hybrid_auc.searched(made) == {"hybrid_8": best, "sync_8": best}
    assert hybrid_auc.table(made)["sync_8_rate_0.001"]["mean"] == 0.68


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


def test_batches_made_beforehand_are_followed_by_others() -> None:
    found = list(islice(batches(3, 1, 4, 2), 4))
    wanted = list(islice(batches(3, 1, 4, 0), 4))
    assert all(torch.equal(own[1], other[1]) for own, other in zip(found, wanted, strict=True))
    others = [next(batches(*other, 4, 1)) for other in ((3, 0), (0, 1))]
    assert len({tuple(batch[1].flatten().tolist()) for batch in [*found, *others]}) == 6


@pytest.mark.parametrize(("num_workers", "steps"), [(8, 60), (3, 60), (2, 5)])
def test_with_a_quorum_uneven_workers_train_as_many_samples_as_even_ones(num_workers: int, steps: int) -> None:
    chosen = argparse.Namespace(way="quorum", slow=num_workers - 1, factor=5.0, steps=steps)
    plans = [Plan.of(chosen, worker, num_workers) for worker in range(num_workers)]
    assert sum(plan.total for plan in plans) == num_workers * (WARM + steps)
    assert 0 < plans[-1].num <= plans[-1].total <= plans[0].total / chosen.factor
    chosen.way = "balance"
    assert Plan.of(chosen, 0, num_workers) == Plan(WARM, steps)
