"""benchmarks/scale: what it reads from logs, and how its keys come from the runs."""

from __future__ import annotations

import os

import pytest
from support.cases import each_of
from support.messages import naming

from benchmarks import scale_runs
from benchmarks.scale import means, result_of
from benchmarks.scale_runs import MODES, Outcome, Setting, outcome, script_flags


def log(*epochs: tuple[int, float]) -> str:
    lines = [
        f"epoch {i}: {speed:,} samples/s, AUC while training 0.5\nepoch {i}: test AUC {auc}"
        for i, (speed, auc) in enumerate(epochs)
    ]
    return "\n".join(lines)


def setting(mode: str, workers: int, seed: int = 0, simulated: bool = False) -> Setting:
    return Setting("rows", mode, workers, seed, simulated=simulated)


def test_speeds_of_workers_are_summed_and_the_first_epoch_does_not_count() -> None:
    logs = [log((100, 0.5), (1_000, 0.6), (3_000, 0.7)), log((900, 0.5), (2_000, 0.6), (4_000, 0.7))]
    assert outcome(logs, setting("async", 2)) == Outcome([0.5, 0.6, 0.7], 5_000.0)


def test_in_sync_mode_each_worker_counts_the_batches_of_all() -> None:
    logs = [log((100, 0.5), (1_000, 0.6), (3_000, 0.7))] * 2
    assert outcome(logs, setting("sync", 2)).samples_per_s == 2_000.0


def test_a_log_without_all_epochs_is_an_error() -> None:
    with pytest.raises(SystemExit, match=naming(3)):
        outcome([log((100, 0.5))], setting("async", 1))


@each_of("mode", MODES)
def test_a_workers_batch_stays_the_same_in_every_mode(mode: str) -> None:
    flags = script_flags(setting(mode, 4))
    batch = int(flags[flags.index("--batch_size") + 1])
    assert batch == (4_000 if mode == "sync" else 1_000)
    assert ("--gather" in flags) == (mode == "gather")


def test_keys_take_real_runs_and_compare_simulated_ones_with_them() -> None:
    runs = {
        setting("hybrid", 1): Outcome([0.7], 100.0),
        setting("hybrid", 8): Outcome([0.70], 700.0),
        setting("hybrid", 8, seed=1): Outcome([0.72], 720.0),
        setting("hybrid", 8, seed=2): Outcome([0.71], 600.0),
        setting("hybrid", 8, simulated=True): Outcome([0.72], 770.0),
        setting("sync", 8, simulated=True): Outcome([0.69], 500.0),
    }
    result = result_of(means(runs))
    assert result["auc_hybrid_8"] == pytest.approx(0.71)
    assert result["auc_sync_8"] == 0.69
    assert "auc_async_8" not in result
    assert result["hybrid_efficiency_8"] == pytest.approx(700 / 800)
    assert result["simulator_error"] == pytest.approx(0.1)
    assert result["simulator_auc_apart"] == {"hybrid_8": pytest.approx(0.01)}


def test_a_simulation_beside_copies_has_their_median_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([100.0, 500.0, 300.0])
    monkeypatch.setattr(scale_runs, "run", lambda setting: Outcome([0.7], next(speeds)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    made = scale_runs.run_beside_copies(Setting("rows", "sync", workers=2, seed=0, servers=1, simulated=True))
    assert made == Outcome([0.7], 300.0)
    assert next(speeds, None) is None, "as many copies as the job has processes"
