"""The share of time that unforeseen lookups took."""

from __future__ import annotations

from torchfleet.ps.worker.batch.unforeseen_cost import UnforeseenCost


def test_waits_count_from_the_second_step_on() -> None:
    clock = [0.0]
    cost = UnforeseenCost(lambda: clock[0])
    cost.waited(5.0)  # nothing can be foreseen yet
    for clock[0] in (10.0, 20.0):
        assert cost.share == 0.0
        cost.step_made()
    assert cost.share == 0.0
    cost.waited(3.0)
    clock[0] = 50.0
    cost.step_made()
    assert cost.share == 0.1
    cost.waited(100.0)  # of several threads
    assert cost.share == 1.0
