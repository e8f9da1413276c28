"""Repairs of the modules of a trace, so that they compute like the model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class _Ordered(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module, places: Sequence[int]) -> None:
        super().__init__()
        self._call: Callable[..., Any] = layer.__call__  # not registered, to keep the model's names
        self._places = places

    def forward(self, *args: torch.Tensor) -> Any:
        return self._call(*[args[place] for place in self._places])


def in_its_order(traced: Any, layer: torch.nn.Module) -> torch.nn.Module:
    """`layer` with its own order of inputs, which a trace may change. Stand-ins copy their inputs to show the order."""
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    copies = [node.args[0] for node in traced.graph.nodes if node.target is torch.ops.aten.clone.default]
    places = [inputs.index(source) for source in copies if source in inputs]
    return _Ordered(layer, places) if places else layer


def without_assertions(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Remove export's assertions on dtypes. In torch 2.8 they split the module around them in two."""
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def keep_buffers_in_backward(module: torch.nn.Module) -> None:
    """Let the second run of the module, in backward, change copies of its buffers (running statistics)."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return inner(*args, **kwargs)
        kept = [(inside, dict(inside._buffers)) for inside in module.modules() if inside._buffers]
        for inside, buffers in kept:
            inside._buffers.update(
                {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}
            )
        try:
            return inner(*args, **kwargs)
        finally:
            for inside, buffers in kept:
                inside._buffers.update(buffers)

    module.forward = forward
