"""The benchmark of narrower rows: a whole run of it, small; and what its figures say of bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support import processes
from support.paths import ROOT
from support.scripts.launching import clean_environment

from benchmarks import row_dtypes

STORED = {"float32": 68, "bfloat16": 36, "float16": 36, "int8": 24, "int8-learned": 24}


def test_bytes_on_the_wire_follow_the_types() -> None:
    chosen = row_dtypes.options(["--quick", "--only", "wire"])
    figures = row_dtypes.measure_wire(chosen)["wire_bytes_per_sample"]
    for direction, wire in (("pulled", "as stored"), ("pushed", "both ways")):
        found = {dtype: figures[direction][f"{dtype}, {wire}"] for dtype in STORED}
        assert found["float32"] > 1.7 * found["bfloat16"] * (1 if direction == "pulled" else 0.8)
        assert found["bfloat16"] == found["float16"] > found["int8"] == found["int8-learned"]
    assert figures["pushed"]["int8, as stored"] == figures["pushed"]["float32, as stored"]


@pytest.mark.slow
@pytest.mark.long
def test_a_quick_run_has_all_figures() -> None:
    command = [sys.executable, "-m", "benchmarks.row_dtypes", "--quick", "--json", "--dtypes", "int8-learned"]
    done = processes.run(command, timeout=300, stderr=subprocess.PIPE, cwd=ROOT, env=clean_environment())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["stored_bytes"] == {name: STORED[name] for name in ("float32", "int8-learned")}
    assert result["auc_difference"]["float32"] == 0
    assert abs(result["auc_difference"]["int8-learned"]) < 0.1
    assert set(result["samples_per_s"]) == {"float32", "int8-learned"}
    assert result["bytes_per_row"]["int8-learned"] < result["bytes_per_row"]["float32"]
    assert result["link"] is None or result["link"]["int8-learned, both ways"]["bytes_per_sample"] > 0
