"""The idle time of a pipeline, from the order in which its stages compute, beside the formula of docs/collective."""

from __future__ import annotations

import pytest

from torchfleet.collective.pipeline.flow import order

FORWARD, BACKWARD = 1.0, 2.0  # durations


def makespan(mode: str, num_stages: int, num: int) -> float:
    """When the last stage is done, if sending takes no time: each stage computes in its order, as soon as it can."""
    orders = [list(order(mode, stage, num_stages, num, has_loss=True)) for stage in range(num_stages)]
    ends: dict[tuple[int, bool, int], float] = {}
    clocks, places = [0.0] * num_stages, [0] * num_stages
    while any(place < len(own) for place, own in zip(places, orders, strict=True)):
        before = list(places)
        for stage, own in enumerate(orders):
            while places[stage] < len(own):
                is_forward, index = own[places[stage]]
                source = stage - 1 if is_forward else stage + 1
                needed = (source, is_forward, index) if 0 <= source < num_stages else None
                if needed is not None and needed not in ends:
                    break
                start = max(clocks[stage], ends[needed] if needed is not None else 0.0)
                clocks[stage] = ends[stage, is_forward, index] = start + (FORWARD if is_forward else BACKWARD)
                places[stage] += 1
        assert places != before, "stages wait for each other"
    return max(clocks)


@pytest.mark.parametrize("mode", ["1F1B", "F-then-B"])
@pytest.mark.parametrize(("num_stages", "num"), [(2, 4), (4, 4), (8, 8), (8, 16), (8, 64)])
def test_p_minus_1_of_n_plus_p_minus_1_time_steps_are_idle(mode: str, num_stages: int, num: int) -> None:
    took = makespan(mode, num_stages, num)
    idle = 1 - num * (FORWARD + BACKWARD) / took
    assert idle == pytest.approx((num_stages - 1) / (num + num_stages - 1))
