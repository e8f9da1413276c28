"""Traces a model to the graph of its network, by torch.export, with lookups as operations of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchfleet.api.model_copy import copied
from torchfleet.api.serving.graph_sizes import check_sizes
from torchfleet.api.serving.model_inputs import ModelInputs
from torchfleet.api.serving.network_graph import (
    MAX_CONSTANT,
    POOLED,
    ROWS,
    Constant,
    GraphInput,
    GraphOutput,
    NetworkGraph,
    Node,
    encoded,
    steps_of,
)
from torchfleet.api.serving.traced_lookups import TracedLookup, operations
from torchfleet.base.errors import ModelError
from torchfleet.data.features import Feature
from torchfleet.ps.worker.embedding.conversion import sparse_embeddings
from torchfleet.ps.worker.lookup.dense_group import saved_tensors

_SAMPLES, _VALUES = 3, 5  # of the batch that is traced


class _Call(torch.nn.Module):
    """The model, called with the tensors of a batch; it returns tensors by name."""

    def __init__(self, model: torch.nn.Module, inputs: ModelInputs) -> None:
        super().__init__()
        self.model, self._inputs = model, inputs

    def forward(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return outputs_of(self.model(*self._inputs.args(tensors), **self._inputs.kwargs(tensors)))


def traced(model: torch.nn.Module, inputs: ModelInputs) -> NetworkGraph:
    """The network in eval mode.

    Raises ModelError, which says why, if the model cannot be written as a graph.
    """
    operations()
    replaced = {id(module): TracedLookup(module) for some in sparse_embeddings(model).values() for module in some}
    call = _Call(copied(model, replaced).eval().to("cpu"), inputs)
    tensors, shapes = _example(inputs.features)
    try:
        program = torch.export.export(call, (tensors,), dynamic_shapes=(shapes,), strict=False)
        if any(_is_mutable(node) for node in program.graph.nodes):
            program = program.run_decompositions({})
    except Exception as error:  # torch.export raises errors of many kinds, some of them the model's own
        lines = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {' '.join(lines[:2])[:400]}"
        raise ModelError(f"torch.export cannot trace the model: {why}") from None
    graph = _Graph(program, inputs.features, _saved_names(model)).made()
    check_sizes(graph, inputs.features, saved_tensors(model))
    return graph


def outputs_of(found: Any) -> dict[str, torch.Tensor]:
    """What a model returned, by name: `output` for one tensor; output_0, output_1, ... for several; a dict's keys."""
    if isinstance(found, torch.Tensor):
        found = {"output": found}
    elif isinstance(found, (list, tuple)):
        found = {f"output_{i}": value for i, value in enumerate(found)}
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise ModelError(f"the model returns {type(found).__name__}; a response has tensors: one, a list or a dict")
    return {str(name): value for name, value in found.items()}


def _example(features: Sequence[Feature]) -> tuple[list[torch.Tensor], list[Any]]:
    """A batch to trace, and which of its dimensions vary."""
    samples = torch.export.Dim("samples", min=1)
    tensors: list[torch.Tensor] = []
    shapes: list[Any] = []
    for i, feature in enumerate(features):
        dtype = getattr(torch, feature.dtype)
        if feature.shape is None:
            tensors += [torch.zeros(_VALUES, dtype=dtype), torch.arange(_SAMPLES)]
            shapes += [{0: torch.export.Dim(f"values_{i}", min=0)}, {0: samples}]
        else:
            tensors.append(torch.zeros(_SAMPLES, *feature.shape, dtype=dtype))
            shapes.append({0: samples})
    return tensors, shapes


def _saved_names(model: torch.nn.Module) -> dict[str, str]:
    """Maps every name of a parameter or buffer to its name in saves, where shared tensors have one name."""
    saved = {id(tensor): name for name, tensor in saved_tensors(model).items()}
    everything = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: saved[id(tensor)] for name, tensor in everything if id(tensor) in saved}


def _is_mutable(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


class _Graph:
    """Converts an exported program."""

    def __init__(
        self, program: torch.export.ExportedProgram, features: Sequence[Feature], saved: Mapping[str, str]
    ) -> None:
        self._program, self._saved = program, saved
        self._sources = [
            GraphInput(feature.name, part)
            for feature in features
            for part in (("values", "offsets") if feature.shape is None else ("values",))
        ]
        self._numbers: dict[torch.fx.Node, int] = {}
        self._inputs: list[GraphInput] = []
        self._parameters: list[str] = []
        self._constants: list[Constant] = []

    def made(self) -> NetworkGraph:
        graph = self._program.graph
        for node in reversed(list(graph.nodes)):
            if node.op == "call_function" and not node.users:  # checks of shapes, and what led only to them
                graph.erase_node(node)
        self._number_given()
        nodes = [self._node(node) for node in graph.nodes if node.op == "call_function"]
        made = NetworkGraph(self._inputs, self._parameters, self._constants, nodes, self._outputs())
        steps_of(made)  # raises for operations that a reader would refuse
        return made

    def _number_given(self) -> None:
        """Number inputs, parameters and constants that are used, and then the nodes."""
        signature = self._program.graph_signature
        used = [node for node in self._program.graph.nodes if node.op == "placeholder" and node.users]
        places = {name: i for i, name in enumerate(signature.user_inputs)}
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        inputs, parameters, constants = [], [], []
        for node in used:
            if node.name in places:
                inputs.append(node)
                self._inputs.append(self._sources[places[node.name]])
            elif (name := names.get(node.name, "").removeprefix("model.")) in self._saved:
                parameters.append(node)
                self._parameters.append(self._saved[name])
            else:
                constants.append(node)
                self._constants.append(self._constant(node))
        calls = [node for node in self._program.graph.nodes if node.op == "call_function"]
        self._numbers = {node: i for i, node in enumerate((*inputs, *parameters, *constants, *calls))}

    def _constant(self, node: torch.fx.Node) -> Constant:
        """A tensor that a save does not have: one made in forward, or a buffer that is not part of the state."""
        signature, program = self._program.graph_signature, self._program
        buffer = signature.inputs_to_buffers.get(node.name)
        if buffer is not None:
            tensor = program.state_dict.get(buffer, program.constants.get(buffer))
        else:
            tensor = program.constants.get(signature.inputs_to_lifted_tensor_constants.get(node.name, ""))
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"the model computes with '{node.name}', which is not part of its state")
        if tensor.numel() > MAX_CONSTANT:
            raise ModelError(
                f"'{buffer or node.name}' of shape {tuple(tensor.shape)} is not saved with the model: make it a buffer "
                "that is part of the state (persistent=True)"
            )
        data = tensor.detach().cpu().reshape(-1).tolist()
        return Constant(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data)

    def _node(self, node: torch.fx.Node) -> Node:
        args = [encoded(arg, self._numbers.__getitem__) for arg in node.args]
        kwargs = {name: encoded(arg, self._numbers.__getitem__) for name, arg in node.kwargs.items()}
        return Node(_name_of(node.target), args, kwargs)

    def _outputs(self) -> list[GraphOutput]:
        (last,) = (node for node in self._program.graph.nodes if node.op == "output")
        names = self._output_names()
        made = []
        for name, node in zip(names, last.args[0], strict=True):
            value = node.meta["val"]
            is_fixed = [isinstance(size, int) for size in value.shape]
            if is_fixed[:1] != [False] or not all(is_fixed[1:]):
                raise ModelError(
                    f"the model's '{name}' has shape {tuple(value.shape)}: expected one entry of a fixed shape for "
                    "each sample"
                )
            dtype = str(value.dtype).removeprefix("torch.")
            made.append(GraphOutput(name, self._numbers[node], dtype, list(value.shape[1:])))
        return made

    def _output_names(self) -> list[str]:
        """The keys of the dict that `_Call` returns, in the order of its tensors."""
        spec = self._program.call_spec.out_spec
        assert spec is not None
        num = spec.num_leaves
        return [str(name) for name in torch.utils._pytree.tree_unflatten(list(range(num)), spec)]


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return {"torchfleet.rows.default": ROWS, "torchfleet.pooled.default": POOLED}.get(name, name)
    if getattr(target, "__module__", "") == "_operator":
        return f"operator.{target.__name__}"
    raise ModelError(f"the model uses {target!r:.80}, which a graph of single operations does not have")
