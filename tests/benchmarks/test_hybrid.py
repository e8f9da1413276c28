"""benchmarks/hybrid: ratios are medians over those of the roof, and the table of a step adds up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import hybrid


def worker(number: int, seconds: float, auc: float | None = None) -> dict[str, Any]:
    exchange = {"rounds": 10, "computed": 0.3, "waited": 0.1, "slowest": 0.04}
    found = {"worker": number, "workers": 2, "samples": 100, "seconds": seconds, "rows_ms": 2.0, "exchange": exchange}
    return found if auc is None else {**found, "auc": auc}


def test_figures_are_ratios_to_data_parallelism_without_rows() -> None:
    found = {way: [[worker(0, seconds, 0.7), worker(1, seconds)]] for way, seconds in
             (("ddp", 1.0), ("servers", 1.25), ("ranks", 2.0))}  # fmt: skip
    slowed = {way: [[worker(0, seconds, 0.69), worker(1, seconds)]] for way, seconds in
              (("ddp", 5.0), ("servers", 5.0), ("balance", 2.5))}  # fmt: skip
    result = hybrid.summary(found, slowed, 5.0)
    assert (result["servers_ratio"], result["ranks_ratio"]) == (0.8, 0.5)
    assert result["straggler_ratio"] == pytest.approx(80 / (160 * 1.2 / 2))
    assert result["straggler_ratio_ddp"] == pytest.approx(40 / (200 * 1.2 / 2))
    assert (result["servers_auc"], result["straggler_auc"]) == (0.7, 0.69)
    table = result["step_ms"]
    assert table == {"compute": 28.0, "rows": 2.0, "slowest": 4.0, "exchange": 6.0, "step": 40.0}
    assert sum(table.values()) == 2 * table["step"]


def test_results_on_one_line_are_told_apart() -> None:
    made = [{"worker": 0, "exchange": {"rounds": 1}}, {"worker": 1}]
    assert hybrid.results("".join(f"RESULT {json.dumps(each)}" for each in made) + "\n[rank] ends") == made
