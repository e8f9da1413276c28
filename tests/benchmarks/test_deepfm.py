"""benchmarks/deepfm: rivals are tried in every setting, and rounds are put together by medians."""

from __future__ import annotations

import pytest

from benchmarks import deepfm


def worker(seconds: float, auc: float = 0.8, cpu_ms: float = 10.0) -> dict[str, float]:
    lookups = {"lookups": 52.0, "unforeseen_lookups": 13.0}
    return {"samples": 1000, "seconds": seconds, "auc": auc, "cpu_ms": cpu_ms, "training_thread_cpu_ms": 9.0, **lookups}


def test_plain_torch_is_tried_with_one_thread_and_with_all_cores_and_both_kinds_of_gradients() -> None:
    assert list(deepfm.rivals(2)) == ["dense, 1 threads", "dense, 2 threads", "sparse, 1 threads", "sparse, 2 threads"]
    assert len(deepfm.rivals(1)) == 2


def test_workers_are_added_up_until_the_last_of_them_is_done() -> None:
    assert deepfm.speed([worker(2.0), worker(4.0)]) == 500


def test_figures_are_medians_of_rounds_beside_the_rivals() -> None:
    rounds = {
        "plain": [[worker(1.0, 0.79)], [worker(2.0, 0.80)], [worker(9.0, 0.81)]],
        "async": [[worker(2.0, 0.7, 20.0), worker(2.0)], [worker(1.0, 0.8, 20.0), worker(1.0)]],
        "hybrid": [[worker(4.0, 0.9), worker(4.0)]],
    }
    found = deepfm.summary(rounds)
    assert found["plain_samples_per_s"] == 500
    assert found["fleet_samples_per_s"] == 1500
    assert (found["ratio"], found["hybrid_ratio"]) == (3.0, 1.0)
    assert (found["auc_plain"], found["auc_fleet"], found["auc_hybrid"]) == (0.80, pytest.approx(0.75), 0.9)
    assert (found["plain_cpu_ms"], found["fleet_cpu_ms"], found["unforeseen_share"]) == (10, 15, 0.25)
