"""The time that is left of a pass over data, by a clock of the test's own."""

from __future__ import annotations

import pytest

from torchfleet.base.monitor.epochs import Epochs


def test_the_time_left_is_told_by_the_speed_of_late() -> None:
    now = 0.0
    epochs = Epochs(lambda: round(now), lambda: now)
    epochs.plan(2)
    with epochs.begin(lambda: 1000, "batches") as epoch:
        now, epoch.done = 20.0, 1  # the first step compiles
        epochs.status()
        for _ in range(100):  # then ten a second
            now, epoch.done = now + 0.5, epoch.done + 5
            found = epochs.status()["eta_s"]
            assert found == pytest.approx((2000 - epoch.done) / 10, rel=0.01)
        for _ in range(100):  # and five a second
            now, epoch.done = now + 1.0, epoch.done + 5
            found = epochs.status()["eta_s"]
        assert found == pytest.approx((2000 - epoch.done) / 5, rel=0.05)
