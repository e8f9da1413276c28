"""The peak of allocations that benchmarks/model_plan.py sets beside a plan."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.model_plan import most_allocated


def test_the_peak_is_that_of_tensors_that_live_together() -> None:
    before = torch.empty(4000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        first, second = torch.empty(1000), torch.empty(500)
        del first
        third = torch.empty(700)
    assert most_allocated(profiled) == 4 * 1500
    assert before.numel() + second.numel() + third.numel() == 5200
