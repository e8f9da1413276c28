"""A saved network as a plain torch module: it contains all rows, or takes looked-up rows as inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from torchfleet.api.infer import load_tensors
from torchfleet.api.plain_layers import KeyedEmbedding
from torchfleet.api.serving.description import ServingDescription, read_saved
from torchfleet.api.serving.graph_sizes import check_sizes, rows_like
from torchfleet.api.serving.network_graph import POOLED, ROWS, NetworkGraph, Step, constants_of, filled, steps_of
from torchfleet.base.errors import CheckpointError, ModelError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.chain import live_rows
from torchfleet.ps.checkpoint.manifest import Manifest

Given = Literal["ids", "rows"]  # what a network is given: ids of features, or the rows of its lookups


class NetworkInput(msgspec.Struct, omit_defaults=True):
    """One input of an exported network: a tensor of a feature, or what a lookup in a table returned.

    `features`: for rows, the features whose ids are looked up. Rows of several ids are pooled as `pooling` says.
    """

    name: str
    kind: Literal["values", "offsets", "rows"]
    dtype: str
    features: list[str]
    table: str = ""
    pooling: str = ""
    shape: list[int | str] = []  # a string is the name of a dimension whose size varies


class PlainNetwork(torch.nn.Module):
    """Runs a saved network on tensors in the order of `inputs`; returns tensors in the order of `graph.outputs`.

    With given="ids" every table is a layer with all of its rows; ids without a row read as zeros.
    """

    def __init__(
        self,
        described: ServingDescription,
        parameters: Mapping[str, torch.Tensor],
        layers: Mapping[str, KeyedEmbedding] | None,
    ) -> None:
        """`layers`: by table, its rows; None: looked-up rows are inputs."""
        super().__init__()
        graph = described.network
        if graph is None:
            raise ModelError(f"the network was not saved with this model: {described.reason}")
        self.graph, self._steps = graph, _needed(graph, layers is None)
        self.dtypes = {feature.name: feature.dtype for feature in described.features}
        self.shapes = {feature.name: feature.shape or [] for feature in described.features}
        missing = [name for name in graph.parameters if name not in parameters]
        if missing:
            raise CheckpointError(f"the saved model has no parameter {', '.join(missing)}, which its network uses")
        check_sizes(graph, described.features, parameters)
        self.state = torch.nn.ParameterList([_fixed(parameters[name]) for name in graph.parameters])
        self.constants = torch.nn.ParameterList([_fixed(constant) for constant in constants_of(graph)])
        self.tables = torch.nn.ModuleList(list((layers or {}).values()))
        self._places = {name: i for i, name in enumerate(layers or {})}
        self.inputs, self._numbers = self._described_inputs(layers is None)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        graph = self.graph
        values: list[Any] = [None] * (graph.num_given + len(graph.nodes))
        start = len(graph.inputs)
        values[start : graph.num_given] = [*self.state, *self.constants]
        for number, tensor in zip(self._numbers, tensors, strict=True):
            values[number] = tensor
        for step in self._steps:
            if step.function is not None:
                step.run(values)
            elif self._places:
                values[step.number] = self._looked_up(step, values)
        return tuple(values[output.value] for output in graph.outputs)

    def example_inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors for `inputs`, chosen from those for all inputs of the graph. Rows become zeros of the shape of
        their lookup.
        """
        graph = self.graph
        values: list[Any] = [None] * (graph.num_given + len(graph.nodes))
        values[: graph.num_given] = [*tensors, *self.state, *self.constants]
        for step in steps_of(graph):
            if step.function is not None:
                step.run(values)
            else:
                values[step.number] = rows_like(step, values, "cpu")
        return [values[number] for number in self._numbers]

    def _looked_up(self, step: Step, values: list[Any]) -> torch.Tensor:
        args = [filled(arg, values) for arg in step.args]
        if step.op == ROWS:
            ids, table, _, _, padding = args
            return self._layer(table, padding).rows(ids)
        slots, offsets, weights, table, _, _, padding, pooling = args
        layer = self._layer(table, padding, pooling)
        pairs = zip(slots, offsets, strict=True)
        return torch.stack([_pooled(layer, ids, starts, weights) for ids, starts in pairs], dim=1)

    def _layer(self, table: str, padding: int | None, pooling: str = "sum") -> KeyedEmbedding:
        found = self.tables[self._places[table]]
        assert isinstance(found, KeyedEmbedding)
        found.padding_idx, found.pooling = padding, pooling  # of this lookup; a table may have several lookups
        return found

    def _described_inputs(self, are_rows: bool) -> tuple[list[NetworkInput], list[int]]:
        """The inputs that the outputs depend on, and their numbers in the graph."""
        used = {
            number for step in self._steps for number in step.sources() if step.function is not None or not are_rows
        }
        used |= {output.value for output in self.graph.outputs}
        made, numbers = [], []
        for number, source in enumerate(self.graph.inputs):
            if number in used:
                name = source.feature if source.part == "values" else f"{source.feature}.offsets"
                dtype = "int64" if source.part == "offsets" else self.dtypes[source.feature]
                made.append(NetworkInput(name, source.part, dtype, [source.feature]))
                numbers.append(number)
        if are_rows:
            for step in self._steps:
                if step.function is None:
                    made.append(self._rows_input(step))
                    numbers.append(step.number)
        names = [one.name for one in made]
        for one in made:
            if names.count(one.name) > 1:  # a table that is looked up several times
                one.name = f"{one.name}.{'.'.join(one.features)}"
        return made, numbers

    def _rows_input(self, step: Step) -> NetworkInput:
        table = step.args[1 if step.op == ROWS else 3]
        pooling = step.args[7] if step.op == POOLED else ""
        return NetworkInput(f"rows.{table}", "rows", "float32", self._features_of(step), str(table), str(pooling))

    def _features_of(self, step: Step) -> list[str]:
        """The features that a lookup's ids are made of."""
        by_number = {other.number: other for other in steps_of(self.graph)}
        found: dict[str, None] = {}
        rest = list(step.sources())
        while rest:
            number = rest.pop(0)
            if number < len(self.graph.inputs):
                found[self.graph.inputs[number].feature] = None
            elif number in by_number:
                rest += by_number[number].sources()
        return list(found)


def plain_network(folder: str, given: Given) -> PlainNetwork:
    """The network of a saved model, in eval mode. Raises CheckpointError or ModelError if the model has no network."""
    storage = Storage(folder)
    manifest, described = read_saved(storage)
    names = [table.name for table in manifest.tables if not table.is_dense]
    layers = {name: _layer_of(storage, manifest, name) for name in names} if given == "ids" else None
    return PlainNetwork(described, load_tensors(storage, manifest), layers).eval()


def _layer_of(storage: Storage, manifest: Manifest, table: str) -> KeyedEmbedding:
    """All rows of a table, which must fit into memory twice."""
    dim = manifest.table(table).dim
    keys, rows = [np.empty(0, np.int64)], [np.empty((0, dim), np.float32)]
    for some, arrays in live_rows(storage, manifest, table):
        keys.append(some.view(np.int64))
        rows.append(arrays["rows"][:, :dim])
    ids, values = np.concatenate(keys), np.concatenate(rows)
    if not len(ids):
        ids, values = np.zeros(1, np.int64), np.zeros((1, dim), np.float32)
    order = np.argsort(ids)
    return KeyedEmbedding(torch.from_numpy(ids[order]), _fixed(torch.from_numpy(values[order])))


def _needed(graph: NetworkGraph, are_rows: bool) -> list[Step]:
    """The operations that the outputs depend on, in order; with `are_rows`, without the operations that compute the ids
    of lookups.
    """
    wanted = {output.value for output in graph.outputs}
    found = []
    for step in reversed(steps_of(graph)):
        if step.number in wanted:
            found.append(step)
            if step.function is not None or not are_rows:
                wanted |= set(step.sources())
    return found[::-1]


def _fixed(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _pooled(
    layer: KeyedEmbedding, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """One row per bag: bags of equal length are the rows of a matrix of ids, others begin at `offsets`."""
    if offsets is None and weights is None:
        rows: torch.Tensor = layer([ids]).squeeze(1)
        return rows
    if offsets is None:
        offsets = torch.arange(ids.shape[0]) * ids.shape[1]
    pooled: torch.Tensor = layer(ids.reshape(-1), offsets, weights)
    return pooled
