"""What the ranks tell each other when they save or load: JSON, and errors that concern all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from torchfleet.collective.checkpoint.collective_manifest import Kind, num_elements
from torchfleet.collective.checkpoint.tensor_files import ITEM_BYTES, file_key
from torchfleet.collective.world import World
from torchfleet.errors import CheckpointError, FleetError

Message = TypeVar("Message", bound="Said")
Key = tuple[Kind, str]


class Said(msgspec.Struct, kw_only=True):
    """A message of one rank to all."""

    error: str = ""


def say(world: World | None, message: Message, cause: Exception | None = None) -> list[Message]:
    """What every rank said, in their order. If it was an error, it is raised on all of them; `cause` is this rank's."""
    kind = type(message)
    if world is None or world.size == 1:
        everybody = [message]
    else:
        everybody = [msgspec.json.decode(one, type=kind) for one in world.gather(msgspec.json.encode(message))]
    for rank, one in enumerate(everybody):
        if one.error:
            where = f"rank {rank}: " if len(everybody) > 1 else ""
            raise CheckpointError(f"{where}{one.error}") from cause
    return everybody


def told(error: Exception) -> str:
    """What the other ranks are told of it."""
    return str(error) if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A piece that a rank holds."""

    kind: Kind
    name: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return num_elements(self.shape) * ITEM_BYTES[self.dtype]


def shared_out(held: Sequence[Sequence[Line]]) -> list[list[Line]]:
    """Which pieces each rank writes: every piece once, the largest first, each to the holder with least to write.

    Raises CheckpointError if the ranks hold tensors of one name that do not fit together, or not all of one.
    """
    holders: dict[Line, list[int]] = {}
    wholes: dict[Key, Line] = {}
    for rank, lines in enumerate(held):
        for line in lines:
            first = wholes.setdefault((line.kind, line.name), line)
            if (first.whole, first.dtype) != (line.whole, line.dtype):
                raise CheckpointError(
                    f"'{line.name}' is {first.dtype} {first.whole} on one rank, and {line.dtype} {line.whole} on rank "
                    f"{rank}"
                )
            if line.bytes or not num_elements(line.whole):
                holders.setdefault(line, []).append(rank)
    _check_names(wholes)
    _check_all_there(holders, wholes)
    loads = [0] * len(held)
    plan: list[list[Line]] = [[] for _ in held]
    for line in sorted(holders, key=lambda one: one.bytes, reverse=True):
        writer = min(holders[line], key=lambda rank: (loads[rank], rank))
        loads[writer] += line.bytes
        plan[writer].append(line)
    return plan


def _check_names(wholes: Mapping[Key, Line]) -> None:
    owners: dict[str, str] = {}
    for kind, name in wholes:
        other = owners.setdefault(file_key(kind, name), kind)
        if other != kind:
            raise CheckpointError(
                f"a tensor of the {other} and one of the {kind} would both be '{file_key(kind, name)}'"
            )


def _check_all_there(holders: Mapping[Line, Any], wholes: Mapping[Key, Line]) -> None:
    found = dict.fromkeys(wholes, 0)
    for line in holders:
        found[line.kind, line.name] += num_elements(line.shape)
    for (kind, name), line in wholes.items():
        expected = num_elements(line.whole)
        if kind != "rank" and found[kind, name] != expected:  # of those a rank may have none
            raise CheckpointError(
                f"'{name}' has {expected:,} elements, and the pieces that the ranks hold have {found[kind, name]:,}"
            )
