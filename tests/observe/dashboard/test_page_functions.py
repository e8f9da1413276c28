"""Functions of the page, in node: smoothing is TensorBoard's, and a compared run is read at the times of the other."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torchfleet
from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.observe.watch.job_totals import totals_of

PAGE = Path(torchfleet.__file__).parent / "observe" / "dashboard" / "static" / "js"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")


def called(folder: Path, module: str, expression: str) -> Any:
    """What an expression of a module's functions gives. The page's files are modules there, too."""
    for path in PAGE.glob("*.js"):
        (folder / path.name).write_text(path.read_text())
    (folder / "package.json").write_text('{"type": "module"}')
    script = f"import * as page from './{module}.js'; console.log(JSON.stringify({expression}));"
    done = subprocess.run(
        [str(NODE), "--input-type=module", "-e", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def exponential_mean(values: list[float | None], weight: float) -> list[float | None]:
    """As TensorBoard computes it."""
    mean, num, found = 0.0, 0, list[float | None]()
    for value in values:
        if value is None:
            found.append(None)
            continue
        mean, num = weight * mean + (1 - weight) * value, num + 1
        found.append(mean / (1 - weight**num))
    return found


def test_smoothing_is_that_of_tensorboard(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=8).round(3).tolist()
    values = [*numbers[:3], None, *numbers[3:]]
    found = called(tmp_path, "smoothing", f"page.smoothed({json.dumps(values)}, 0.6)")
    assert found[3] is None
    assert [value for value in found if value is not None] == pytest.approx(
        [value for value in exponential_mean(values, 0.6) if value is not None]
    )


def test_constants_and_weight_zero_stay_as_they_are(tmp_path: Path) -> None:
    found = called(tmp_path, "smoothing", "[page.smoothed([1, 2, null], 0), page.smoothed([0.1, 0.1, 0.1], 0.9)]")
    assert found == [[1, 2, None], [0.1, 0.1, 0.1]]


def test_another_run_is_read_at_the_times_of_this_one(tmp_path: Path) -> None:
    found = called(tmp_path, "comparison", "page.at([1, null, 3, 4], 2, [0, 1, 2, 3, 4, 5, 6, 7])")
    assert found == [1, 1, 1, 1, 3, 3, 4, None]


def test_the_metric_of_a_compared_run_is_the_mean_of_its_workers(tmp_path: Path) -> None:
    other = (
        "{grid: {width: 1}, times: () => [0, 1, 2], job: {points: [], values: {}}, workers: ["
        "{series: {points: [0, 1], values: {'metrics.loss': [4, 2]}}}, "
        "{series: {points: [0, 2], values: {'metrics.loss': [2, 1]}}}]}"
    )
    assert called(tmp_path, "comparison", f"page.otherLine({other}, 'metrics.loss', [0, 1, 2])") == [3, 2, 1]
    assert called(tmp_path, "comparison", f"page.otherLine({other}, 'metrics.auc', [0, 1, 2])") is None


def test_the_mean_rate_is_that_of_the_terminal(tmp_path: Path) -> None:
    statuses = [
        {"samples": 5_000, "samples_per_s_mean": 1_000.0},
        {"samples": 4_000, "samples_per_s_mean": 100.0},
        {"samples": 64},
    ]
    workers = [RoleSnapshot("worker", index, "done", status) for index, status in enumerate(statuses)]
    page = json.dumps([[role.key, {"role": role.role, "index": role.index, "status": role.status}] for role in workers])
    made = f"Object.assign(new page.Store(), {{roles: new Map({page})}}).meanRate"
    found = called(tmp_path, "store", f"[{made}, new page.Store().meanRate]")
    assert found == pytest.approx([totals_of(JobSnapshot(1.0, workers)).mean_rate, 0])


def test_single_large_values_do_not_set_the_scale(tmp_path: Path) -> None:
    usual = [float(3 + number % 5) for number in range(50)]
    first_pulls = [[7500.0, *usual], [None, 9000.0, *usual[:20]]]
    cases: list[list[list[float | None]]] = [first_pulls, [usual], [[7500.0]], [[0.0, 0.0, 5.0]], [[1.0, 2.0, 5.0]], []]
    found = called(tmp_path, "scale", f"{json.dumps(cases)}.map((lines) => page.usualTop(lines) ?? null)")
    assert found == [7.0, 7.0, 7500.0, 5.0, 5.0, None]
