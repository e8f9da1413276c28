"""benchmarks.freshness: clicks arrive both ways. No figure of speed: other tests run beside this one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.paths import ROOT


@pytest.mark.long
@pytest.mark.timeout(600)
def test_clicks_that_are_trained_on_change_predictions() -> None:
    command = [sys.executable, "-m", "benchmarks.freshness", "--quick", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=600)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert 0 < found["fresh_push_p50_s"] <= found["fresh_push_p99_s"] < 60
    assert 0 < found["fresh_file_p50_s"] <= found["fresh_file_p99_s"] < 60
    assert found["training_ratio"] > 0
