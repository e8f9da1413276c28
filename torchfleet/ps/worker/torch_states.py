"""The state of torch's optimizers, as dicts by parameter, and the same numbers as tables have them: rows of state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.shard import Floats
from torchfleet.ps.worker.lookup.dense_group import DenseGroup
from torchfleet.ps.worker.row_state.whole_rows import WholeRows

OneState = Mapping[str, Any]  # a parameter's: {"step": ..., "exp_avg": ...}
KEYS = "keys"  # entry of the state of a table without a declared size: the ids of its rows


class BlockState(NamedTuple):
    """The state of a dense table after `step` updates: one row of numbers for each kind of state."""

    rows: Floats
    step: int


class RowsState(NamedTuple):
    """The state of a table of rows after `step` updates, side by side as in a row; `rows.keys` as in WholeRows."""

    rows: WholeRows
    step: int


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether torch's optimizers keep this param group's counts of steps on the parameters' device."""
    return bool(group.get("fused") or group.get("capturable"))


def states_of(group: DenseGroup, state: BlockState, whole_steps: bool = False) -> list[dict[str, Any]]:
    """The state of each parameter of a dense group, as torch has it. `whole_steps`: SparseAdam counts in an int."""
    row_rule, found = group.spec.rule.row_rule, []
    for place, parameter in zip(group.layout(), group.parameters, strict=True):
        own = _step(group.spec, state.step, whole_steps)
        if "step" in own and counts_on_device(group.group):
            own["step"] = own["step"].to(parameter.device)
        for name, row in zip(row_rule.state_names(group.spec.rule), state.rows, strict=True):
            values = torch.from_numpy(row[place.start : place.start + place.size].copy())
            own[name] = values.view(parameter.shape).to(parameter.device)
        found.append(own)
    return found


def block_state(group: DenseGroup, states: Sequence[OneState], step: int = 1) -> BlockState:
    """The inverse of `states_of`. A parameter without state has the initial one. `step`: the number of updates if the
    states have no count. Raises ModelError for state of another optimizer or shape.
    """
    spec = group.spec
    rule, names = spec.rule, spec.rule.row_rule.state_names(spec.rule)
    rows = np.full((len(names), spec.size), rule.row_rule.initial_state(rule), np.float32)
    for place, parameter, state in zip(group.layout(), group.parameters, states, strict=True):
        if not has_state(state):
            continue
        for row, tensor in zip(rows, _named(state, names, f"parameter '{place.name}'"), strict=True):
            _check_shape(tensor, tuple(parameter.shape), f"parameter '{place.name}'")
            row[place.start : place.start + place.size] = tensor.reshape(-1).numpy()
    return BlockState(rows, _steps(states, step))


def rows_as_torch(spec: TableSpec, state: RowsState, whole_steps: bool) -> dict[str, Any]:
    """The state of a table's rows, as torch has that of a parameter of shape (rows, dim)."""
    found: dict[str, Any] = {} if state.rows.keys is None else {KEYS: state.rows.keys}
    found |= _step(spec, state.step, whole_steps)
    start = 0
    for name, width in _columns(spec):
        found[name] = state.rows.values[:, start : start + width].contiguous()
        start += width
    return found


def rows_state(spec: TableSpec, state: OneState, step: int = 1) -> RowsState:
    """The inverse of `rows_as_torch`. Raises ModelError for state of another optimizer or shape."""
    text, columns, keys = f"table '{spec.name}'", _columns(spec), state.get(KEYS)
    if spec.has_size == (keys is not None):
        expected = f"rows of all {spec.size:,} ids" if spec.has_size else "rows with their ids (`keys`)"
        raise ModelError(
            f"optimizer.load_state_dict: {text} expects the state of {expected}, found {sorted(map(str, state))}. "
            "Tables without a declared size are saved with fleet.save_persistables, or with "
            "SparseEmbedding(..., state='rows') on both sides."
        )
    if keys is not None and (keys.dtype != torch.int64 or len(torch.unique(keys)) < len(keys)):
        raise ModelError(f"optimizer.load_state_dict: {text}: `keys` must be ids of type int64, each once")
    num = spec.size if keys is None else len(keys)
    parts = _named(state, [name for name, _ in columns], text)
    for tensor, (_, width) in zip(parts, columns, strict=True):
        _check_shape(tensor, (num, width), text)
    values = torch.cat(parts, dim=1)
    return RowsState(WholeRows(None if keys is None else keys.cpu(), values), _steps([state], step))


def has_state(state: OneState) -> bool:
    """Whether an optimizer that has made a step left this; SGD without momentum may leave None."""
    return any(value is not None for value in state.values())


def _columns(spec: TableSpec) -> list[tuple[str, int]]:
    """The name and width of each part of a row's state, in order: those of its values, then those of the whole row."""
    names = spec.rule.row_rule.state_names(spec.rule)
    return [(name, spec.dim if number < spec.num_states else 1) for number, name in enumerate(names)]


def _step(spec: TableSpec, step: int, whole_steps: bool) -> dict[str, Any]:
    if not spec.rule.row_rule.counts_steps:
        return {}
    return {"step": step if whole_steps else torch.tensor(float(step))}


def _steps(states: Iterable[OneState], otherwise: int) -> int:
    found = [int(state["step"]) for state in states if state.get("step") is not None]
    has_any = any(has_state(state) for state in states)
    return max(found) if found else otherwise if has_any else 0


def _named(state: OneState, names: Sequence[str], text: str) -> list[torch.Tensor]:
    """The tensors of these names, in host memory. Raises ModelError unless they are there, and no others."""
    given = sorted(str(name) for name, value in state.items() if value is not None and name not in ("step", KEYS))
    if given != sorted(names):
        raise ModelError(
            f"optimizer.load_state_dict: {text} has the state {', '.join(sorted(names)) or 'of no kind'} under its "
            f"optimizer here, and the file has {', '.join(given) or 'none'}: it was saved by another optimizer, or "
            "with other options. Load it into the same one."
        )
    found = [state[name].detach().to("cpu", torch.float32) for name in names]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in found):
        raise ModelError(f"optimizer.load_state_dict: {text}: NaN or infinity in its state, which servers do not hold")
    return found


def _check_shape(tensor: torch.Tensor, shape: tuple[int, ...], text: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"optimizer.load_state_dict: {text} expects state of shape {shape}, found {tuple(tensor.shape)}: the file "
            "is of another model, or of parameters in another order"
        )
