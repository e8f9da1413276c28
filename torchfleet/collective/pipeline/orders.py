"""Orders of a pipeline: what each rank computes, one action after another, and where it starts to receive.

A pipeline of p ranks has p·v stages, v = `vpp_degree` of them on each rank, and runs n micro-batches. `schedule_mode`:

    F-then-B                all forwards, then all backwards
    1F1B                    a backward as soon as it can be, then alternately a forward and a backward
    Interleaved1F1B         1F1B with v > 1 stages on each rank (stage s on rank s mod p)
    InterleavedZeroBubble   the same, v >= 1; backward is split: gradients of weights fill idle time
    ZBVZeroBubble           v = 2, in the shape of a V (stages s and 2p-1-s on rank s); backward is split

The last three are those of torch.distributed.pipelining, which computes the orders here; flow.py carries them out.
torch's own runtime is not used: over gloo that of torch 2.6 and 2.7 loses tensors and that of 2.9 to 2.11 does not
start (that of 2.13 does), it learns shapes from pickles, and has no tied weights.

Sources: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters; Qi et al. 2023, Zero
Bubble Pipeline Parallelism.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import schedules

from torchfleet.base.errors import StrategyError

FORWARD, BACKWARD = "F", "B"
BACKWARD_INPUT, BACKWARD_WEIGHT = "I", "W"  # the two parts of a backward pass that is split
RECEIVE_FORWARD, RECEIVE_BACKWARD = "RF", "RB"
_BY_TORCH = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": BACKWARD_INPUT,
    "BACKWARD_WEIGHT": BACKWARD_WEIGHT,
}


class Action(NamedTuple):
    """What a rank does for one micro-batch in one of its stages."""

    kind: str
    stage: int
    micro_batch: int


def ranks_of_stages(mode: str, size: int, vpp_degree: int) -> list[int]:
    """The rank of each stage."""
    if mode == "ZBVZeroBubble":
        return [*range(size), *reversed(range(size))]
    return [stage % size for stage in range(size * vpp_degree)]


def forwards(rank_of: Sequence[int], num: int) -> list[list[Action]]:
    """The order of each rank without backward passes: stage by stage, all micro-batches."""
    orders: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    for stage, rank in enumerate(rank_of):
        orders[rank] += [Action(FORWARD, stage, index) for index in range(num)]
    return orders


def orders(mode: str, size: int, vpp_degree: int, num: int) -> list[list[Action]]:
    """The order of each rank, without receives. Raises StrategyError for numbers that the schedule does not support."""
    if mode not in ("1F1B", "F-then-B"):
        return _of_torch(mode, size, vpp_degree, num)
    found = []
    for rank in range(size):
        ahead = min(num, size - rank) if mode == "1F1B" else num
        own = [Action(FORWARD, rank, index) for index in range(ahead)]
        for index in range(num):
            own.append(Action(BACKWARD, rank, index))
            if index + ahead < num:
                own.append(Action(FORWARD, rank, index + ahead))
        found.append(own)
    return found


def num_kept(orders: Sequence[Sequence[Action]], num_stages: int) -> list[int]:
    """The most micro-batches that a stage keeps for backward at a time, by stage."""
    most = [0] * num_stages
    for order in orders:
        now = [0] * num_stages
        for action in order:
            now[action.stage] += {FORWARD: 1, BACKWARD_INPUT: 0}.get(action.kind, -1)
            most[action.stage] = max(most[action.stage], now[action.stage])
    return most


class _StageOfTorch:
    """Has the attributes of a stage that torch's schedules read when they compute an order."""

    def __init__(self, index: int, rank_of: Sequence[int]) -> None:
        self.stage_index, self.num_stages = index, len(rank_of)
        self.group_rank, self.group_size = 0, max(rank_of) + 1
        self.is_first, self.is_last = index == 0, index == len(rank_of) - 1
        self.stage_index_to_group_rank = dict(enumerate(rank_of))  # older versions of torch read it
        self.submod = torch.nn.Module()
        self.has_backward = True


def _of_torch(mode: str, size: int, vpp_degree: int, num: int) -> list[list[Action]]:
    kind: Any = getattr(schedules, f"Schedule{mode}", None)
    if kind is None:
        raise StrategyError(f"pipeline_configs['schedule_mode']={mode!r} needs a newer torch than {torch.__version__}")
    rank_of = ranks_of_stages(mode, size, vpp_degree)
    stages = [_StageOfTorch(stage, rank_of) for stage, rank in enumerate(rank_of) if rank == 0]
    try:
        made = kind(stages, num, loss_fn=torch.nn.functional.mse_loss)
    except ValueError as error:
        raise StrategyError(
            f"pipeline_configs['schedule_mode']={mode!r} cannot run {num} micro-batches on {size} ranks. torch says: "
            f"{error} Take a multiple of {size}."
        ) from error
    return [[_action(found) for found in made.pipeline_order[rank] if found is not None] for rank in range(size)]


def _action(found: Any) -> Action:
    return Action(_BY_TORCH[found.computation_type.name], found.stage_index, found.microbatch_index)


def with_receives(orders: Sequence[Sequence[Action]], rank_of: Sequence[int]) -> list[list[Action]]:
    """The orders with an action for each receive, at which a rank starts to receive and goes on.

    The orders are simulated action by action; when a rank sends, the receive is appended to the receiver's order.
    So every rank sends and receives in one common order of all ranks, and no two of them wait for each other, even
    where a send lasts until it is received.
    """
    found: list[list[Action]] = [[] for _ in orders]
    waiting = [deque(order) for order in orders]
    done: set[Action] = set()
    while any(waiting):
        before = len(done)
        for rank, queue in enumerate(waiting):
            if queue and needed(queue[0], len(rank_of)) <= done:
                action = queue.popleft()
                found[rank].append(action)
                done.add(action)
                done.add(action._replace(kind=BACKWARD) if action.kind == BACKWARD_INPUT else action)
                receive = _receive(action)
                if receive and 0 <= receive.stage < len(rank_of) and rank_of[receive.stage] != rank:
                    found[rank_of[receive.stage]].append(receive)
        assert len(done) > before, "stages wait for each other"
    return found


def needed(action: Action, num_stages: int) -> set[Action]:
    """The actions that must be done before this one; a BACKWARD_INPUT counts as a BACKWARD."""
    kind, stage, index = action
    if kind == FORWARD:
        return {Action(FORWARD, stage - 1, index)} if stage else set()
    if kind == BACKWARD_WEIGHT:
        return {Action(BACKWARD, stage, index)}
    after = {Action(BACKWARD, stage + 1, index)} if stage < num_stages - 1 else set()
    return {Action(FORWARD, stage, index), *after}


def _receive(action: Action) -> Action | None:
    """The receive in another stage that this action leads to. That stage may not exist, or be on the same rank."""
    if action.kind == FORWARD:
        return Action(RECEIVE_FORWARD, action.stage + 1, action.micro_batch)
    if action.kind in (BACKWARD, BACKWARD_INPUT):
        return Action(RECEIVE_BACKWARD, action.stage - 1, action.micro_batch)
    return None
