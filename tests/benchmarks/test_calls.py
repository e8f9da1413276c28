"""Calls of a request and a step: what was gained is not lost unnoticed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support import processes

MOST = {"pull_calls": 94, "push_calls": 106, "forward_calls": 143, "step_calls": 208, "api_to_handler": 11}


@pytest.mark.timeout(300)  # where other work keeps the cores busy
def test_a_request_and_a_step_take_few_calls() -> None:
    """Half of what they took before the package had one way for a request (benchmarks/log.md); of a step ten more, by
    which it notices what a script has written into parameters, and carries gradients until zero_grad. The calls of a
    save depend on the disk, and have no bound here."""
    command = [sys.executable, "-m", "benchmarks.calls", "--rounds", "2", "--json"]
    done = processes.run(command, stderr=subprocess.PIPE, timeout=300, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(0 < found[name] <= most for name, most in MOST.items()), found
