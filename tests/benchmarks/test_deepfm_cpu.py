"""benchmarks/deepfm_cpu: ratios are those of processor time, beside the cheaper of torch's two ways."""

from __future__ import annotations

import pytest

from benchmarks import deepfm_cpu


def test_ratios_are_beside_plain_torch_at_its_best() -> None:
    step_ms = {"dense": 4.0, "sparse": 6.0, "one process": 5.0, "sync": 8.0, "async": 4.0, "hybrid": 2.0}
    expected = {"one process": 0.8, "sync": 0.5, "async": 1.0, "hybrid": 2.0}
    assert deepfm_cpu.ratios(step_ms) == pytest.approx(expected)
