"""Runs the network of a model on batches, with the rows and parameters of one version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from torchfleet.api.serving.graph_sizes import check_sizes
from torchfleet.api.serving.network_graph import POOLED, NetworkGraph, Step, Value, constants_of, filled, steps_of
from torchfleet.apps.serve.model_version import ModelVersion
from torchfleet.apps.serve.samples import BlockValues, JoinedBatch
from torchfleet.base.errors import CheckpointError, ModelError
from torchfleet.data.features import Feature
from torchfleet.ps.kernels import lookup, pooling
from torchfleet.ps.tables.rows.keyrange import check_range
from torchfleet.ps.worker.batch.bags import Bags, split_slots

Outputs = dict[str, npt.NDArray[Any]]

_LINEAR = "aten.linear.default"
_MAX_BY_COLUMN = 1 << 22  # numbers of a weight


class Network(Protocol):
    """What computes the results of a batch."""

    @property
    def unknown_ids(self) -> Counter[str]:
        """By table: how many ids that were looked up had no row. The caller may empty it."""
        ...

    def run(self, batch: JoinedBatch, version: ModelVersion) -> Outputs:
        """One array per output, with an entry per sample."""
        ...


class GraphNetwork:
    """The network that was saved with the model. Used by one thread."""

    def __init__(self, graph: NetworkGraph, features: Sequence[Feature]) -> None:
        """`features`: of the model. Raises ModelError for an operation that a saved network may not have."""
        self._graph, self._features, steps = graph, features, steps_of(graph)
        self._constants = constants_of(graph)
        self._num_values = graph.num_given + len(graph.nodes)
        self._stages = _staged(steps, self._num_values)
        lookups = [found for _, some in self._stages for found in some]
        for found in lookups:
            found.read_columns(graph, {feature.name: feature for feature in features})
        by_block = {found.step.number for found in lookups if found.columns}
        read = {number for step in steps if step.number not in by_block for number in step.sources()}
        read |= {output.value for output in graph.outputs}
        self._read = [(number, source) for number, source in enumerate(graph.inputs) if number in read]
        uses = Counter(number for step in steps for number in step.sources())
        linear = [step.args[1] for step in steps if step.op == _LINEAR and type(step.args[1]) is Value]
        self._weights = {number for number, num in Counter(linear).items() if uses[number] == num}  # no other use
        self._bound: tuple[ModelVersion | None, list[Any]] = None, []
        self._checked: list[tuple[torch.Size, torch.dtype]] = []  # shapes and types of parameters, once looked at
        self.unknown_ids = Counter(dict.fromkeys(sorted({found.table for found in lookups}), 0))

    @torch.inference_mode()
    def run(self, batch: JoinedBatch, version: ModelVersion) -> Outputs:
        graph, parts = self._graph, {"values": batch.values, "offsets": batch.offsets}
        values: list[Any] = [None] * self._num_values
        for number, source in self._read if isinstance(batch.values, BlockValues) else enumerate(graph.inputs):
            values[number] = parts[source.part][source.feature]
        values[len(graph.inputs) : graph.num_given] = self._given(version)
        for steps, lookups in self._stages:
            for step in steps:
                step.run(values)
            if lookups:
                self.unknown_ids.update(_look_up(lookups, values, batch, version))
        return {output.name: values[output.value].numpy() for output in graph.outputs}

    def _given(self, version: ModelVersion) -> list[torch.Tensor]:
        """Parameters of this version, and constants."""
        if self._bound[0] is not version:
            found = version.parameters()
            missing = [name for name in self._graph.parameters if name not in found]
            if missing:
                raise CheckpointError(f"version {version.number} of the model has no parameter {', '.join(missing)}")
            self._check(found)
            first = len(self._graph.inputs)
            laid_out = [
                _by_column(found[name]) if first + i in self._weights else found[name]
                for i, name in enumerate(self._graph.parameters)
            ]
            self._bound = version, [*laid_out, *self._constants]
        return self._bound[1]

    def _check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raise ModelError unless the graph can run with parameters of these shapes."""
        found = [(parameters[name].shape, parameters[name].dtype) for name in self._graph.parameters]
        if not self._checked or found != self._checked:
            check_sizes(self._graph, self._features, parameters)
            self._checked = found


def _by_column(weight: torch.Tensor) -> torch.Tensor:
    """The same weight of a linear layer, laid out so that batches of up to a hundred samples take two thirds of the
    time. A large weight is returned unchanged: a copy would take as much memory again.
    """
    return weight.t().contiguous().t() if weight.dim() == 2 and weight.numel() <= _MAX_BY_COLUMN else weight


def _staged(steps: list[Step], num_values: int) -> list[tuple[list[Step], list[_Lookup]]]:
    """Stages of a graph: (operations, the lookups whose ids they compute). Lookups of a stage are made together."""
    depths = [0] * num_values
    stages: list[tuple[list[Step], list[_Lookup]]] = []
    for step in steps:
        depth = max((depths[source] for source in step.sources()), default=0)
        while len(stages) <= depth:
            stages.append(([], []))
        if step.function is None:
            stages[depth][1].append(_Lookup(step))
            depths[step.number] = depth + 1
        else:
            stages[depth][0].append(step)
            depths[step.number] = depth
    return stages


class _Lookup:
    """A lookup of the graph: its arguments, as traced_lookups.py defines them."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.is_pooled = step.op == POOLED
        table = step.args[3:] if self.is_pooled else step.args[1:]
        if [type(arg) for arg in table[:3]] != [str, int, int] or len(table) != (5 if self.is_pooled else 4):
            raise ModelError(f"a lookup of the network names no table: {table!r:.80}")
        self.table, self.dim, self.size, self.padding_idx = table[:4]
        self.pooling = table[4] if self.is_pooled else ""
        self.columns: tuple[str, tuple[str, ...]] | None = None  # type and names of the features that it looks up

    def read_columns(self, graph: NetworkGraph, features: Mapping[str, Feature]) -> None:
        """Set `columns`, if all ids are of features with one id per sample: pooling leaves each row as it is."""
        if not self.is_pooled or self.step.args[2] is not None or any(arg is not None for arg in self.step.args[1]):
            return
        numbers = [arg for arg in self.step.args[0] if type(arg) is Value and arg < len(graph.inputs)]
        names = tuple(graph.inputs[number].feature for number in numbers)
        if len(names) < len(self.step.args[0]) or not all(name in features for name in names):
            return
        kinds = {(features[name].dtype, tuple(features[name].shape or ())) for name in names}
        if len(kinds) == 1 and next(iter(kinds))[1] == (1,):
            self.columns = next(iter(kinds))[0], names

    def keys(self, values: list[Any], batch: JoinedBatch) -> tuple[npt.NDArray[np.int64], Any]:
        """(all ids, flat; their shape, or their bags and weights)."""
        if self.columns is not None and isinstance(batch.values, BlockValues):
            block = batch.values.columns(*self.columns)
            return block.reshape(-1).astype(np.int64, copy=False), block.shape
        if not self.is_pooled:
            ids = filled(self.step.args[0], values).numpy()
            return ids.reshape(-1).astype(np.int64, copy=False), ids.shape
        given, offsets, weights = (filled(arg, values) for arg in self.step.args[:3])
        slots = [ids if starts is None else (ids, starts) for ids, starts in zip(given, offsets, strict=True)]
        parts, bags = split_slots(slots, self.pooling)
        arrays = [part.numpy().reshape(-1) for part in parts]
        keys = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return keys.astype(np.int64, copy=False), bags._replace(weights=weights)

    def result(self, keys: npt.NDArray[np.int64], rows: npt.NDArray[np.float32], form: Any) -> torch.Tensor:
        """What the embedding returns for these rows."""
        is_padding = None if self.padding_idx is None else keys == self.padding_idx
        if not isinstance(form, Bags):
            if is_padding is not None and is_padding.any():
                rows = np.where(is_padding[:, None], np.float32(0), rows)
            return torch.from_numpy(np.ascontiguousarray(rows).reshape(*form, self.dim))
        index = np.arange(len(keys), dtype=np.int32)
        if is_padding is not None:
            index[is_padding] = -1
        return torch.from_numpy(_pooled(np.ascontiguousarray(rows).reshape(-1), self.dim, index, form))


def _pooled(rows: npt.NDArray[np.float32], dim: int, index: npt.NDArray[np.int32], bags: Bags) -> npt.NDArray[Any]:
    """Pool rows with the kernels that training uses."""
    out = np.empty(((len(bags.offsets) - 1) // bags.num_slots, bags.num_slots, dim), np.float32)
    flat = out.reshape(-1)
    if bags.pooling == "max":
        pooling.pool_max(rows, dim, index, bags.offsets, bags.num_slots, flat, np.empty(out.size, np.int32))
    elif bags.weights is not None:
        weights = bags.weights.numpy().astype(np.float32, copy=False).reshape(-1)
        pooling.pool_weighted(rows, dim, index, weights, bags.offsets, bags.num_slots, flat)
    else:
        lookup.pool(rows, dim, index, bags.offsets, bags.num_slots, bags.pooling == "mean", flat, 0, len(out))
    return out


def _look_up(lookups: list[_Lookup], values: list[Any], batch: JoinedBatch, version: ModelVersion) -> dict[str, int]:
    """Make all lookups of a stage: the rows of a table are read once for all of its lookups.

    Returns how many ids had no row, by table, without tables in which all had one.
    """
    unknown: dict[str, int] = {}
    by_table: dict[str, list[tuple[_Lookup, npt.NDArray[np.int64], Any]]] = {}
    for found in lookups:
        by_table.setdefault(found.table, []).append((found, *found.keys(values, batch)))
    for table, asked in by_table.items():
        keys = asked[0][1] if len(asked) == 1 else np.concatenate([keys for _, keys, _ in asked])
        if asked[0][0].size:
            check_range(keys.view(np.uint64), asked[0][0].size, f"table '{table}'")
        (rows, is_known), start = version.known_rows(table, keys), 0
        if not is_known.all():
            unknown[table] = _num_unknown([(found.padding_idx, own) for found, own, _ in asked], is_known)
        if rows.shape != (len(keys), asked[0][0].dim):  # the kernels rely on it
            raise CheckpointError(_other_width(table, rows.shape[1], asked[0][0].dim))
        for found, own, form in asked:
            values[found.step.number] = found.result(own, rows[start : start + len(own)], form)
            start += len(own)
    return unknown


def _num_unknown(asked: Sequence[tuple[int | None, npt.NDArray[np.int64]]], is_known: npt.NDArray[np.bool_]) -> int:
    """How many of the ids of several lookups have no row. Padding, which never has one, does not count."""
    num, start = 0, 0
    for padding_idx, own in asked:
        is_unknown = ~is_known[start : start + len(own)]
        num += int(np.count_nonzero(is_unknown if padding_idx is None else is_unknown & (own != padding_idx)))
        start += len(own)
    return num


def check_tables(graph: NetworkGraph, version: ModelVersion) -> None:
    """Raise CheckpointError if the network looks up rows of another width than the model's tables have."""
    for found in (_Lookup(step) for step in steps_of(graph) if step.function is None):
        if version.dim(found.table) != found.dim:
            raise CheckpointError(_other_width(found.table, version.dim(found.table), found.dim))


def _other_width(table: str, found: int, expected: int) -> str:
    return (
        f"table '{table}' has rows of {found} numbers, and the network in serving.json takes rows of {expected}: save "
        "the model again"
    )
