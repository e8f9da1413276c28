"""Optimizer state by parameter name: the pieces that this rank holds, and new state to load into."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchfleet.base.errors import CheckpointError
from torchfleet.collective.checkpoint.collective_manifest import CollectiveManifest, SavedGroup, SavedTensor
from torchfleet.collective.checkpoint.pieces import DTYPES, HeldPiece, Pieces, piece_of
from torchfleet.collective.strategies.sharding.zero import ShardedOptimizer

# Options of the implementation, not of the rule: loading keeps those of the present optimizer.
_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")

Names = Mapping[torch.Tensor, str]


def names_of(model: torch.nn.Module, given: Names | None) -> Names:
    """The names of the optimizer's parameters: `given`, or those of the model."""
    return {parameter: name for name, parameter in model.named_parameters()} if given is None else given


def optimizer_pieces(optimizer: torch.optim.Optimizer, names: Names, homes: Pieces) -> tuple[Pieces, dict[str, Any]]:
    """(states that are tensors by "parameter.key", all other states by parameter). `homes`: returned by
    model_pieces."""
    made: Pieces = {}
    values: dict[str, Any] = {}
    for parameter, name, _ in optimized(optimizer, names):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                made[f"{name}.{key}"] = _like(f"state '{key}' of '{name}'", value, homes[name])
            elif _is_plain(value):
                values.setdefault(name, {})[key] = value
            else:
                raise CheckpointError(f"state '{key}' of '{name}' is {value!r}: expected a tensor, or a finite number")
    return made, values


def master_pieces(optimizer: torch.optim.Optimizer, names: Names, homes: Pieces, model: torch.nn.Module) -> Pieces:
    """The optimizer's copies of parameters, which it steps on instead of the parameters."""
    own = set(model.parameters())
    masters = [(parameter, name) for parameter, name, _ in optimized(optimizer, names) if parameter not in own]
    return {name: _like(f"the optimizer's copy of '{name}'", parameter, homes[name]) for parameter, name in masters}


def optimized(optimizer: torch.optim.Optimizer, names: Names) -> Iterator[tuple[torch.Tensor, str, dict[str, Any]]]:
    """(parameter, its name, its group)."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"a parameter of shape {tuple(parameter.shape)} in param group {number} is not in the model"
                )
            yield parameter, names[parameter], group


def _like(what: str, value: torch.Tensor, home: HeldPiece) -> HeldPiece:
    """The piece of a tensor that belongs to a parameter: sharded as the parameter, or a scalar that is equal on all
    ranks."""
    if hasattr(value, "placements"):
        return piece_of(value)
    if value.shape == home.tensor.shape:
        return HeldPiece(value.detach(), home.shape, home.offset)
    if home.is_whole or value.numel() == 1:
        return piece_of(value)
    raise CheckpointError(
        f"{what} has shape {tuple(value.shape)}, and this rank's part of the parameter {tuple(home.tensor.shape)} of "
        f"{home.shape}: it is not known which part of the whole state this rank holds; such an optimizer cannot be "
        "saved with a sharded parameter"
    )


def groups_of(optimizer: torch.optim.Optimizer, names: Names) -> list[SavedGroup]:
    made = []
    for group in optimizer.param_groups:
        options = {key: _plain(key, value) for key, value in group.items() if key not in _IMPLEMENTATION}
        made.append(SavedGroup(options, [names[parameter] for parameter in group["params"]]))
    return made


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if _is_plain(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(key, item) for item in value]
    raise CheckpointError(f"option '{key}'={value!r} of a param group: expected numbers, which must be finite, or text")


def _is_plain(value: Any) -> bool:
    """Whether JSON can represent it."""
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value is None or (isinstance(value, (bool, int, float, str)) and is_finite)


def check_groups(
    optimizer: torch.optim.Optimizer, names: Names, kept: Sequence[SavedGroup], saved_name: Callable[[str], str]
) -> None:
    """Check that the groups are the saved ones; a rank may have only some of their parameters."""
    if len(optimizer.param_groups) != len(kept):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} param groups, and {len(kept)} were saved"
        )
    homes = {name: number for number, group in enumerate(kept) for name in group.parameters}
    for number, group in enumerate(optimizer.param_groups):
        for name in (names[parameter] for parameter in group["params"]):
            there = homes.get(saved_name(name), homes.get(name))
            if there is not None and there != number:
                raise CheckpointError(
                    f"'{name}' is in param group {number} of the optimizer, and was saved in group {there}"
                )


def set_options(optimizer: torch.optim.Optimizer, kept: Sequence[SavedGroup]) -> None:
    """Set saved options in place, in the same dicts and option tensors: schedulers and CUDA graphs hold references."""
    for group, saved in zip(optimizer.param_groups, kept, strict=True):
        for key, value in saved.options.items():
            present = group.get(key)
            if isinstance(present, torch.Tensor):
                present.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) and not isinstance(present, list) else value


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that implements the update rule, inside all wrappers."""
    while isinstance(optimizer, ShardedOptimizer):
        optimizer = optimizer.inner
    return optimizer


def states_by_parameter(manifest: CollectiveManifest) -> dict[str, dict[str, SavedTensor]]:
    found: dict[str, dict[str, SavedTensor]] = {}
    for name, tensor in manifest.of_kind("optimizer").items():
        parameter, _, key = name.rpartition(".")
        found.setdefault(parameter, {})[key] = tensor
    return found


def new_state(
    parameter: torch.Tensor, home: HeldPiece, sources: Mapping[str, SavedTensor], group: Mapping[str, Any]
) -> tuple[dict[str, Any], Pieces]:
    """(a state for the optimizer, not filled yet; the piece that each of `sources` is read into)."""
    counts_on_device = group.get("fused") or group.get("capturable")  # as torch's optimizers do
    state: dict[str, Any] = {}
    pieces: Pieces = {}
    for key, source in sources.items():
        dtype = DTYPES[source.dtype]
        if key == "step" and not counts_on_device:
            state[key] = torch.empty(source.shape, dtype=dtype)
        elif tuple(source.shape) == home.shape:  # sharded as the parameter, if it is sharded
            state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            pieces[key] = home.like(state[key])
            continue
        else:
            state[key] = torch.empty(source.shape, dtype=dtype, device=parameter.device)
        pieces[key] = piece_of(state[key])
    return state, pieces
