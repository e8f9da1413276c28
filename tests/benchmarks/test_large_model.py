"""benchmarks/large_model: a small run of it on the CPU trains, and its figures are those that it promises."""

from __future__ import annotations

import json
import sys

import pytest
from support import processes
from support.paths import ROOT
from support.scripts.launching import clean_environment

from benchmarks import large_model


def test_models_have_as_many_parameters_as_are_asked_for_and_no_memory() -> None:
    for asked in (2e6, 20e9):
        model = large_model.make_model(asked, "bfloat16")
        num = sum(parameter.numel() for parameter in model.parameters())
        assert asked <= num < 1.06 * asked
        assert all(parameter.is_meta for parameter in model.parameters())


def test_a_small_model_trains_on_the_cpu() -> None:
    options = ["--parameters", "2e6", "--dtype", "float32", "--length", "16", "--steps", "3", "--json"]
    command = [sys.executable, "-m", "benchmarks.large_model", *options]
    environment = {**clean_environment(), "FLEET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = processes.run(command, cwd=ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["part_gb"] == pytest.approx(4e-9 * found["parameters"])
    assert found["host_peak_at_start_gb"] >= 0.5 * found["part_gb"]
    assert found["seconds_to_first_step"] > found["seconds_to_model"]
