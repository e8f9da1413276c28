"""benchmarks.serving --overload: what is refused, and memory. No figure of speed: other tests run beside this one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.extras import needing
from support.paths import ROOT

pytestmark = [pytest.mark.slow, needing("uvicorn", "httptools")]


@pytest.mark.timeout(600)
def test_an_overloaded_server_goes_on_answering_in_bounded_memory() -> None:
    command = [sys.executable, "-m", "benchmarks.serving", "--overload", "--quick", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=600)
    found = json.loads(ended.stdout.splitlines()[-1])
    for times in (1, 2, 4):
        assert found[f"overload_{times}x_accepted"] > 0
    assert found["overload_mb"] < 100
    assert found["overload_p99_ratio"] > 0
