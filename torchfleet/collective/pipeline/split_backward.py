"""A backward pass in two parts: first the gradients of a stage's inputs, later those of its weights.

The graph of a stage has nodes on paths from its outputs to its inputs, and branches of weights, which leave these paths
at some nodes. The first part runs the paths alone and keeps the gradients that arrive at these nodes; the second part
runs the branches from there. Outputs that do not depend on the inputs (all of them in the first stage) are left to the
second part.

torch.distributed.pipelining has two functions for it, which are not used: they detach outputs in place, which fails
where an activation keeps its output for backward (tanh), lose the gradients of outputs that do not depend on the
inputs, and before torch 2.13 count the gradient of a weight twice if a stage uses it twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

Gradients = tuple[torch.Tensor | None, ...]


class _Branches(NamedTuple):
    """Weights whose branches leave the paths at the same nodes."""

    nodes: list[Any]
    weights: list[torch.nn.Parameter]


class SplitBackward:
    """The backward pass of one micro-batch through one stage: create it, send `input_gradients` on, call `finish`."""

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
        weights: Iterable[torch.nn.Parameter],
    ) -> None:
        """`outputs` need gradients, and `inputs` are leaves. The gradient of an output that is a loss is None."""
        self._weights = {id(weight): weight for weight in weights}
        needing = {id(tensor): place for place, tensor in enumerate(inputs) if tensor.requires_grad}
        graph = _Graph([_node(output) for output in outputs], needing, self._weights)
        self._branches = [_Branches(nodes, [self._weights[key] for key in keys]) for nodes, keys in graph.branches()]
        self._arrived: dict[Any, Gradients] = {}  # node → the gradients of its outputs
        pairs = list(zip(outputs, gradients, strict=True))
        self._later = [pair for pair in pairs if _node(pair[0]) not in graph.paths]
        found = self._run_paths([pair for pair in pairs if _node(pair[0]) in graph.paths], [*inputs])
        self.input_gradients = found

    def _run_paths(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [None] * len(inputs)
        places = [place for place, tensor in enumerate(inputs) if tensor.requires_grad]
        if not pairs:
            return found
        nodes = [node for branches in self._branches for node in branches.nodes]
        handles = [node.register_prehook(_keeper(self._arrived, node)) for node in nodes]
        try:
            outputs, gradients = [output for output, _ in pairs], [gradient for _, gradient in pairs]
            needing = [inputs[place] for place in places]
            every = torch.autograd.grad(outputs, needing, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for place, gradient in zip(places, every, strict=True):
            found[place] = gradient
        return found

    def finish(self) -> None:
        """Add the gradients of the weights to .grad. Hooks that run after gradients are added are not called."""
        for branches in self._branches:
            self._run_branches(branches)
        if self._later:
            weights = list(self._weights.values())
            outputs, gradients = [output for output, _ in self._later], [gradient for _, gradient in self._later]
            _add(weights, torch.autograd.grad(outputs, weights, gradients, allow_unused=True))
        self._branches, self._later, self._arrived = [], [], {}

    def _run_branches(self, branches: _Branches) -> None:
        arrived = [(node, self._arrived[node]) for node in branches.nodes if node in self._arrived]
        edges = [(GradientEdge(node, i), g) for node, own in arrived for i, g in enumerate(own) if g is not None]
        if not edges:
            return
        # With several nodes, a gradient may flow from one to another along a path, where it has been counted already.
        handles = [node.register_prehook(_constant(own)) for node, own in arrived if len(arrived) > 1]
        try:
            starts, gradients = [edge for edge, _ in edges], [gradient for _, gradient in edges]
            found = torch.autograd.grad(starts, branches.weights, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        _add(branches.weights, found)


class _Graph:
    """The nodes that backward passes from `roots`, and which of them lie on paths to the inputs."""

    def __init__(self, roots: Sequence[Any], inputs: Iterable[int], weights: Iterable[int]) -> None:
        """`inputs`, `weights`: the ids of tensors that are leaves."""
        self._inputs, self._weights = set(inputs), set(weights)
        self._nodes = _ordered(roots)
        self.paths: set[Any] = set()
        self._to_weights: set[Any] = set()
        for node in self._nodes:
            leaf, after = id(getattr(node, "variable", None)), _after(node)
            if leaf in self._inputs or any(one in self.paths for one in after):
                self.paths.add(node)
            if leaf in self._weights or any(one in self._to_weights for one in after):
                self._to_weights.add(node)

    def branches(self) -> list[tuple[list[Any], list[int]]]:
        """(nodes on paths, ids of the weights whose branches leave there); no two groups share a node or a weight."""
        groups: list[tuple[list[Any], list[int]]] = []
        for node in self._nodes:
            if node not in self.paths:
                continue
            roots = [one for one in _after(node) if one in self._to_weights and one not in self.paths]
            leaves = {id(getattr(one, "variable", None)) for one in _ordered(roots)} & self._weights
            if not leaves:
                continue
            joined = [group for group in groups if leaves & {*group[1]}]
            groups = [group for group in groups if group not in joined]
            nodes = [one for group in joined for one in group[0]]
            groups.append(([*nodes, node], [*leaves.union(*(group[1] for group in joined))]))
        return groups


def _node(tensor: torch.Tensor) -> Any:
    """The node at which backward from this tensor begins."""
    return tensor.grad_fn if tensor.grad_fn is not None else tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _after(node: Any) -> list[Any]:
    return [one for one, _ in node.next_functions if one is not None]


def _ordered(roots: Sequence[Any]) -> list[Any]:
    """The nodes that backward passes from `roots`, each after all that follow it."""
    found: dict[Any, None] = {}
    seen: set[Any] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            found[node] = None
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(one, False) for one in _after(node)]
    return list(found)


def _keeper(arrived: dict[Any, Gradients], node: Any) -> Any:
    return lambda gradients: arrived.__setitem__(node, gradients)


def _constant(gradients: Gradients) -> Any:
    return lambda _: gradients


@torch.no_grad()
def _add(weights: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add to .grad. The first gradient is copied: it may be the one of an input, which is being sent."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is None:
            continue
        if weight.grad is None:
            weight.grad = gradient.clone() if gradient.is_sparse else torch.empty_like(weight).copy_(gradient)
        else:
            weight.grad += gradient
