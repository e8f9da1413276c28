"""Parameters that stages on several ranks of a pipeline use (an embedding that is the head's weight too).

Each of the ranks has a copy, under the parameter's name there, and computes its own share of the gradient. The shares
are summed at the end of a batch, so that copies that start equal, and make equal steps, stay equal:

    g = Σ_{r: rank r uses it} g_r
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchfleet.collective.tensors.local_tensors import local
from torchfleet.collective.world import AXES, World

Tie = dict[int, list[str]]  # rank of the pipeline → the names of one parameter there


class _Tied(NamedTuple):
    parameter: torch.nn.Parameter
    group: dist.ProcessGroup
    num_copies: int


def ties(model: torch.nn.Module, rank_of: dict[str, int]) -> list[Tie]:
    """Parameters that more than one rank uses, in the order of the model; `rank_of`: the rank of each module."""
    found: dict[torch.Tensor, Tie] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, {}).setdefault(rank_of[name.rpartition(".")[0]], []).append(name)
    return [tie for tie in found.values() if len(tie) > 1]


def by_name(found: Sequence[Tie]) -> dict[str, Tie]:
    """The tie of each name that a tied parameter has."""
    return {name: tie for tie in found for names in tie.values() for name in names}


class StageTies:
    """The tied parameters of this rank. All ranks create it together, with the same ties."""

    def __init__(self, found: Sequence[Tie], world: World) -> None:
        self._rank = world.axis("pipe").rank
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._own: list[tuple[str, dist.ProcessGroup, int]] = []
        for tie in found:
            ranks = tuple(tie)
            if ranks not in groups:
                groups[ranks] = _group(ranks, world)
            group = groups[ranks]
            if group is not None:
                self._own.append((tie[self._rank][0], group, len(tie)))
        self._tied: list[_Tied] = []
        self._is_summed = False  # whether the gradients are summed at present

    def find(self, model: torch.nn.Module) -> None:
        """Find the parameters in the model that all strategies have converted; mark them `fleet_copies` for norms."""
        named = dict(model.named_parameters(remove_duplicate=False))
        for name, group, num in self._own:
            named[name].fleet_copies = num  # type: ignore[attr-defined]
            self._tied.append(_Tied(named[name], group, num))

    def begin(self) -> None:
        """Prepare summed gradients for further accumulation: each copy keeps an equal share of the sum."""
        for parameter, _, num_copies in self._tied:
            if self._is_summed and parameter.grad is not None:
                local(parameter.grad).div_(num_copies)
        self._is_summed = False

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients of copies after a batch. Ranks of the pipeline call it together."""
        for parameter, group, _ in self._tied:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # another stage may have one
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local(parameter.grad), group=group)
        self._is_summed = True


def _group(ranks: tuple[int, ...], world: World) -> dist.ProcessGroup | None:
    """The group of these ranks of this pipeline. All ranks call it together."""
    grid = torch.arange(world.size).reshape([world.degrees[axis] for axis in AXES])
    pipelines = grid.movedim(AXES.index("pipe"), -1)[..., list(ranks)].reshape(-1, len(ranks)).tolist()
    own = None
    for members in pipelines:
        group = dist.new_group(members)
        if world.rank in members:
            own = group
    return own
