"""Copies of a rank's whole state in memory files: model, optimizer, strategies, random numbers, the user's objects.

A rank copies what it holds, and only the same rank of a job of the same size can load it: nothing is resharded, no
values come from other ranks, and buffers and random numbers are each rank's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from torchfleet.base.errors import FleetError
from torchfleet.base.prepared_types import prepared
from torchfleet.collective.checkpoint.collective_manifest import CollectiveManifest, SavedPiece, SavedTensor
from torchfleet.collective.checkpoint.loading import LoadSource, load_from
from torchfleet.collective.checkpoint.pieces import HeldPiece, model_pieces, tied
from torchfleet.collective.checkpoint.planning import Key
from torchfleet.collective.checkpoint.save_writing import Holdings
from torchfleet.collective.checkpoint.saving import collect
from torchfleet.collective.checkpoint.snapshots import Snapshots
from torchfleet.collective.collective_model import CollectiveModel
from torchfleet.collective.collective_optimizer import CollectiveOptimizer
from torchfleet.collective.elastic.memory_files import MemoryFile
from torchfleet.collective.elastic.random_states import RandomStates, random_states, set_random_states
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import World


class Kept(Protocol):
    """An object of the user that is copied with the model: a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class RankState(NamedTuple):
    """What a copy holds, by reference."""

    model: CollectiveModel
    optimizer: CollectiveOptimizer
    strategies: Sequence[Strategy]
    world: World
    names: Mapping[torch.Tensor, str]
    kept: Mapping[str, Kept]


class Description(msgspec.Struct):
    """What a memory file has beside the tensors."""

    rank: int
    num_ranks: int
    manifest: CollectiveManifest
    random: RandomStates
    kept: dict[str, Any]


def describe(file: MemoryFile) -> Description:
    return msgspec.json.decode(file.description(), type=prepared(Description))


class CopyWriter:
    """Writes copies into one file. On a GPU its memory is pinned once."""

    def __init__(self, file: MemoryFile) -> None:
        self.file = file
        self._snapshots = Snapshots(file.grow)

    def write(self, step: int, state: RankState) -> None:
        """Copy the state over the file's last copy. Returns when training may continue. All ranks call it together."""
        world, model = state.world, state.model.module
        homes = model_pieces(model, world)  # all ranks meet: their last copies are complete
        own: dict[Key, HeldPiece] = {("model", name): piece for name, piece in homes.items()}
        holdings = collect(own, model, state.optimizer.inner, state.strategies, world, state.names)
        self.file.begin()
        copies = self._snapshots.take({key: piece.tensor for key, piece in own.items()})
        manifest, num_bytes = _manifest(own, copies, holdings, world.size)
        kept = {name: one.state_dict() for name, one in state.kept.items()}
        description = Description(world.rank, world.size, manifest, random_states(world.device), kept)
        self.file.complete(step, num_bytes, _encoded(description))


def _encoded(description: Description) -> bytes:
    try:
        return msgspec.json.encode(description)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise FleetError(
            f"fleet.elastic.steps(keep=...): expected objects whose state_dict JSON can hold: {error}"
        ) from None


def _manifest(
    own: Mapping[Key, HeldPiece], copies: Mapping[Key, torch.Tensor], holdings: Holdings, num_ranks: int
) -> tuple[CollectiveManifest, int]:
    """(a manifest of this rank's tensors alone, the bytes that they take)."""
    begin = min((copy.data_ptr() for copy in copies.values() if copy.numel()), default=0)
    tensors, end = [], 0
    for key, piece in own.items():
        spec, copy = piece.spec(key), copies[key]
        start = copy.data_ptr() - begin if copy.numel() else 0
        end = max(end, start + copy.nbytes)
        place = SavedPiece("", list(spec.offset), list(spec.shape), start, copy.nbytes, 0)
        tensors.append(SavedTensor(spec.name, spec.kind, spec.dtype, list(spec.whole), [place]))
    groups, values = holdings.groups, holdings.values
    made = CollectiveManifest("", 0, num_ranks, tensors, holdings.optimizer, groups, values, holdings.tied, {}, {})
    return made, end


def load_copy(file: MemoryFile, state: RankState) -> None:
    """Load the copy in the file. All ranks call it together, with copies of one step."""
    description, model = describe(file), state.model.module
    homes = model_pieces(model, state.world)
    source = LoadSource(
        description.manifest,
        {*homes, *tied(model)},
        f"the copy of step {file.step} in memory",
        partial(_reading, file.tensors()),
    )
    load_from(source, homes, model, state.optimizer.inner, state.strategies, state.world, state.names)
    state.optimizer.begin_anew()
    if set(description.kept) != set(state.kept):
        raise FleetError(
            f"fleet.elastic.steps(keep=...): the copy has {sorted(description.kept)}, the script now gives "
            f"{sorted(state.kept)}: give the same objects in every attempt"
        )
    for name, one in state.kept.items():
        one.load_state_dict(description.kept[name])
    set_random_states(description.random, state.world.device)


class _Copied:
    """Reads the pieces of a copy in place."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory.numpy().data

    def check(self, tensors: Iterable[SavedTensor]) -> None:
        """Checks nothing: a file that has its head is complete."""

    def read(self, tensor: SavedTensor, piece: SavedPiece) -> memoryview:
        return self._memory[piece.start : piece.start + piece.bytes]


@contextlib.contextmanager
def _reading(memory: torch.Tensor) -> Iterator[_Copied]:
    yield _Copied(memory)
