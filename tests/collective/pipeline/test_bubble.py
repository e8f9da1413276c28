"""The idle time of a pipeline, from the orders of its ranks, beside the formulas of docs/collective."""

from __future__ import annotations

import pytest

from benchmarks.pipeline_bubble import idle_of_formula, idle_of_order, spans
from torchfleet.base.errors import StrategyError
from torchfleet.collective.pipeline.orders import (
    Action,
    forwards,
    orders,
    ranks_of_stages,
    with_receives,
)


@pytest.mark.parametrize("mode", ["1F1B", "F-then-B"])
@pytest.mark.parametrize(("size", "num"), [(2, 4), (4, 4), (8, 8), (8, 16), (8, 64)])
def test_p_minus_1_of_n_plus_p_minus_1_time_steps_are_idle(mode: str, size: int, num: int) -> None:
    found = idle_of_order(mode, size, num, 1)
    assert found == pytest.approx((size - 1) / (num + size - 1)) == idle_of_formula(mode, size, num, 1)


@pytest.mark.parametrize("vpp_degree", [2, 4])
@pytest.mark.parametrize(("size", "num"), [(2, 4), (4, 8), (8, 16), (8, 64)])
def test_interleaving_divides_the_idle_time_by_the_stages_of_a_rank(size: int, num: int, vpp_degree: int) -> None:
    found = idle_of_order("Interleaved1F1B", size, num, vpp_degree)
    assert found == pytest.approx((size - 1) / (vpp_degree * num + size - 1))


@pytest.mark.parametrize(("size", "num"), [(2, 4), (4, 8), (8, 16), (8, 64)])
def test_split_backward_passes_fill_idle_time(size: int, num: int) -> None:
    """With parts of equal duration the V has none between a rank's first and last action, and the ranks start one
    after another."""
    for place, (start, end, busy) in enumerate(spans("ZBVZeroBubble", size, num, 2)):
        assert start == place
        assert end - start == pytest.approx(busy)
    whole = max(end for _, end, _ in spans("1F1B", size, num))
    assert max(end for _, end, _ in spans("InterleavedZeroBubble", size, num)) < whole


@pytest.mark.parametrize(
    ("mode", "size", "vpp_degree"),
    [("1F1B", 4, 1), ("F-then-B", 3, 1), ("Interleaved1F1B", 8, 2), ("Interleaved1F1B", 2, 3),
     ("InterleavedZeroBubble", 4, 1), ("InterleavedZeroBubble", 2, 2), ("ZBVZeroBubble", 8, 2)],
)  # fmt: skip
@pytest.mark.parametrize("is_trained", [True, False])
def test_ranks_send_and_receive_in_one_order(mode: str, size: int, vpp_degree: int, is_trained: bool) -> None:
    """Each rank goes through its order by itself, and a send waits until it is received."""
    rank_of, num = ranks_of_stages(mode, size, vpp_degree), 2 * size
    every = orders(mode, size, vpp_degree, num) if is_trained else forwards(rank_of, num)
    found = with_receives(every, rank_of)
    for rank, own in enumerate(found):
        assert [action for action in own if not action.kind.startswith("R")] == every[rank]
    messages = [[message for action in own for message in exchanged(action, rank_of)] for own in found]
    while any(messages):
        ready = next(
            (
                (sender, message[1])
                for sender, own in enumerate(messages)
                for message in own[:1]
                if message[0] == "send"
                and messages[message[2]]
                and messages[message[2]][0][:2] == ("receive", message[1])
            ),
            None,
        )
        assert ready is not None, "ranks wait for each other"
        sender, _ = ready
        receiver = messages[sender][0][2]
        del messages[sender][0], messages[receiver][0]


def exchanged(action: Action, rank_of: list[int]) -> list[tuple[str, Action, int]]:
    """(send or receive, the message, the other rank)."""
    kind, stage, index = action
    if kind in ("RF", "RB"):
        return [("receive", action, rank_of[stage - 1 if kind == "RF" else stage + 1])]
    target = Action("RF", stage + 1, index) if kind == "F" else Action("RB", stage - 1, index)
    if kind == "W" or not 0 <= target.stage < len(rank_of) or rank_of[target.stage] == rank_of[stage]:
        return []
    return [("send", target, rank_of[target.stage])]


def test_orders_in_writing() -> None:
    def written(mode: str, rank: int, num: int = 4) -> str:
        return " ".join(f"{kind}{index}" for kind, _, index in orders(mode, 3, 1, num)[rank])

    assert written("1F1B", 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert written("1F1B", 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert written("1F1B", 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert written("F-then-B", 1) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert written("1F1B", 0, num=2) == "F0 F1 B0 B1"
    assert forwards([0, 1, 0, 1], 2)[1] == [Action("F", 1, 0), Action("F", 1, 1), Action("F", 3, 0), Action("F", 3, 1)]


def test_numbers_that_a_schedule_cannot_have_are_named() -> None:
    with pytest.raises(StrategyError, match="5 micro-batches on 2 ranks"):
        orders("Interleaved1F1B", 2, 2, 5)
