"""Learns the shapes that cross between stages, by one micro-batch that is run forward stage by stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from torchfleet.collective.pipeline.flow import Call, Part
from torchfleet.collective.pipeline.shapes import Shape, Wire, as_tuple, shape_of


def explore(
    calls: Mapping[int, Call], inputs: Any, model: torch.nn.Module, rank_of: Sequence[int], wire: Wire
) -> dict[int, Part]:
    """The stages of this rank, which `calls` runs. Ranks of the pipeline call it together; it changes no state."""
    here = tree_map_only(torch.Tensor, lambda tensor: tensor.to(wire.computing), inputs)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts: dict[int, Part] = {}
    crossing: list[torch.Tensor] = []
    shapes: list[Shape] = []
    for stage, call in calls.items():
        if stage and stage - 1 not in calls:
            shapes, crossing = wire.recv_described(rank_of[stage - 1])
        incoming, shapes = shapes, []
        if stage < len(rank_of) - 1:
            with torch.no_grad(), _unchanged(model, wire.computing):
                crossing = list(as_tuple(call(crossing, here)))
            shapes = [shape_of(output) for output in crossing]
            if stage + 1 not in calls:
                wire.send_described(crossing, rank_of[stage + 1])
        parts[stage] = Part(call, incoming, shapes, weights)
    return parts


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers (running statistics) and random states on exit."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
