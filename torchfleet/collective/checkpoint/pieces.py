"""The pieces of a model's tensors that this rank holds, by the names of the user's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from torchfleet.base.errors import CheckpointError
from torchfleet.collective.checkpoint.planning import Key, PieceSpec, Report, error_text, exchange
from torchfleet.collective.strategies.sharding.sharding import sharded_modules
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.tensors.local_tensors import local
from torchfleet.collective.tensors.shard_offsets import offset_of
from torchfleet.collective.world import World
from torchfleet.ps.worker.row_state.table_rows import without_rows

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class HeldPiece:
    """A box of a whole tensor; `tensor` shares memory with the tensor it was taken from."""

    tensor: torch.Tensor
    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]
    is_buffer: bool = False

    @property
    def is_whole(self) -> bool:
        return tuple(self.tensor.shape) == self.shape

    def like(self, tensor: torch.Tensor) -> HeldPiece:
        """The piece for `tensor`, which holds the same box."""
        return HeldPiece(local(tensor), self.shape, self.offset)

    def spec(self, key: Key) -> PieceSpec:
        dtype = _NAMES.get(self.tensor.dtype)
        if dtype is None:
            known = ", ".join(map(str, _NAMES))
            raise CheckpointError(f"'{key[1]}' is of type {self.tensor.dtype}, which cannot be saved; {known} can")
        return PieceSpec(*key, dtype, self.shape, self.offset, tuple(self.tensor.shape), self.is_buffer)


Pieces = dict[str, HeldPiece]


class Cuts(Report, kw_only=True):
    """Parameters that are sharded without DTensor: name → index of this rank's piece, number of pieces, its length."""

    pieces: dict[str, tuple[int, int, int]] = msgspec.field(default_factory=dict)


def named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by the user's names; a tied parameter has its first name."""
    for module in sharded_modules(model):
        module.reshard()
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    with without_rows():  # tables on devices have files of their own
        saved = model.state_dict(keep_vars=True)
    aliases = set(tied(model))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    strange = sorted(set(saved) - set(found) - set(buffers) - aliases)
    if strange:
        raise CheckpointError(f"'{strange[0]}' of the model's state_dict is no parameter or buffer: it cannot be saved")
    return {**found, **buffers}


def tied(model: torch.nn.Module) -> dict[str, str]:
    """Other names of tied parameters and buffers → the first name."""
    firsts: dict[torch.Tensor, str] = {}
    others = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        first = firsts.setdefault(tensor, name)
        if first != name:
            others[name] = first
    return others


def model_pieces(model: torch.nn.Module, world: World | None) -> Pieces:
    """The pieces that this rank holds. All ranks call it together; an error on one rank is raised on all.

    Without `world`, the process is alone. A parameter with an attribute `fleet_piece` = (dimension, index, count) is
    one of `count` pieces along a dimension; other ranks hold the others.
    """
    failed = None
    try:
        every = named(model)
        cuts = {name: tensor.fleet_piece for name, tensor in every.items() if hasattr(tensor, "fleet_piece")}
        made = {name: piece_of(tensor) for name, tensor in every.items() if name not in cuts}
        own = Cuts(pieces={name: (cut[1], cut[2], every[name].shape[cut[0]]) for name, cut in cuts.items()})
    except Exception as error:
        own, failed = Cuts(error=error_text(error)), error
    lengths = _lengths(exchange(world, own, failed))
    for name, (dim, index, _) in cuts.items():
        shape, offset = list(every[name].shape), [0] * every[name].dim()
        shape[dim], offset[dim] = sum(lengths[name]), sum(lengths[name][:index])
        made[name] = HeldPiece(local(every[name]), tuple(shape), tuple(offset))
    buffers = {name for name, _ in model.named_buffers()}
    return {name: replace(made[name], is_buffer=name in buffers) for name in every}


def _lengths(reports: Sequence[Cuts]) -> dict[str, list[int]]:
    """The lengths of the pieces of each parameter in the reports, in order."""
    found: dict[str, dict[int, int]] = {}
    for report in reports:
        for name, (index, count, length) in report.pieces.items():
            found.setdefault(name, dict.fromkeys(range(count), -1))[index] = length
    for name, lengths in found.items():
        if missing := [index for index, length in lengths.items() if length < 0]:
            raise CheckpointError(f"'{name}' is cut into {len(lengths)} pieces, and no rank has pieces {missing}")
    return {name: list(lengths.values()) for name, lengths in found.items()}


def piece_of(tensor: Any) -> HeldPiece:
    """This rank's shard of a DTensor; any other tensor is whole."""
    if not hasattr(tensor, "placements"):
        return HeldPiece(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
    return HeldPiece(local(tensor), tuple(tensor.shape), offset_of(tensor))


# States of strategies


def strategy_pieces(strategies: Sequence[Strategy], world: World) -> dict[Key, HeldPiece]:
    """Tensors that are equal on all ranks, and those of this rank, stacked along a leading dimension of ranks."""
    made: dict[Key, HeldPiece] = {}
    for strategy in strategies:
        for key, value in strategy.state().items():
            made["part", f"{strategy.field}.{key}"] = piece_of(value)
        for key, value in strategy.rank_state().items():
            shape = (world.size, *value.shape)
            offset = (world.rank, *[0] * value.dim())
            made["rank", f"{strategy.field}.{key}"] = HeldPiece(value.detach().unsqueeze(0), shape, offset)
    return made
