"""Agreement among ranks about a save or load: JSON reports, errors raised on all ranks, and who writes which piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.prepared_types import prepared
from torchfleet.collective.checkpoint.collective_manifest import Kind, num_elements
from torchfleet.collective.checkpoint.tensor_files import file_key
from torchfleet.collective.world import Gathering
from torchfleet.ps.checkpoint.part_file import ITEM_BYTES

AnyReport = TypeVar("AnyReport", bound="Report")
Key = tuple[Kind, str]


class Report(msgspec.Struct, kw_only=True):
    """What one rank sends to all. `error`: the error on that rank, if any."""

    error: str = ""


def exchange(world: Gathering | None, report: AnyReport, cause: Exception | None = None) -> list[AnyReport]:
    """The reports of all ranks, in order. An error in one is raised on all; `cause` is this rank's own error.

    All ranks call it together. Without `world`, the process is alone.
    """
    kind = type(report)
    if world is None or world.size == 1:
        reports = [report]
    else:
        reports = [msgspec.json.decode(data, type=prepared(kind)) for data in world.gather(msgspec.json.encode(report))]
    for rank, received in enumerate(reports):
        if received.error:
            where = f"rank {rank}: " if len(reports) > 1 else ""
            raise CheckpointError(f"{where}{received.error}") from cause
    return reports


def error_text(error: Exception) -> str:
    """The error text that other ranks see."""
    return str(error) if isinstance(error, FleetError) else f"{type(error).__name__}: {error}"


class PieceSpec(msgspec.Struct, frozen=True, array_like=True):
    """A piece that a rank holds, without its values: its tensor, and its box in the tensor."""

    kind: Kind
    name: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_buffer: bool = False  # of the model: its values may differ among the ranks that hold it

    @property
    def bytes(self) -> int:
        return num_elements(self.shape) * ITEM_BYTES[self.dtype]


def assign_writers(held: Sequence[Sequence[PieceSpec]]) -> list[list[PieceSpec]]:
    """Which pieces each rank writes: every piece once, largest first, each by the holder with the least to write.

    The first holder of a buffer writes it, so that all buffers of a layer come from one rank. Raises CheckpointError if
    the ranks hold inconsistent tensors under one name, or if pieces of a tensor are missing.
    """
    holders: dict[PieceSpec, list[int]] = {}
    tensors: dict[Key, PieceSpec] = {}
    for rank, specs in enumerate(held):
        for spec in specs:
            first = tensors.setdefault((spec.kind, spec.name), spec)
            if (first.whole, first.dtype) != (spec.whole, spec.dtype):
                raise CheckpointError(
                    f"'{spec.name}' is {first.dtype} {first.whole} on one rank, and {spec.dtype} {spec.whole} on rank "
                    f"{rank}"
                )
            if spec.bytes or not num_elements(spec.whole):
                holders.setdefault(spec, []).append(rank)
    _check_names(tensors)
    _check_all_there(holders, tensors)
    loads = [0] * len(held)
    plan: list[list[PieceSpec]] = [[] for _ in held]
    for spec in sorted(holders, key=lambda spec: spec.bytes, reverse=True):
        writer = min(holders[spec], key=lambda rank: (not spec.is_buffer and loads[rank], rank))
        loads[writer] += spec.bytes
        plan[writer].append(spec)
    return plan


def _check_names(tensors: Mapping[Key, PieceSpec]) -> None:
    owners: dict[str, str] = {}
    for kind, name in tensors:
        other = owners.setdefault(file_key(kind, name), kind)
        if other != kind:
            raise CheckpointError(
                f"a tensor of the {other} and one of the {kind} would both be '{file_key(kind, name)}'"
            )


def _check_all_there(holders: Mapping[PieceSpec, Any], tensors: Mapping[Key, PieceSpec]) -> None:
    found = dict.fromkeys(tensors, 0)
    for spec in holders:
        found[spec.kind, spec.name] += num_elements(spec.shape)
    for (kind, name), spec in tensors.items():
        expected = num_elements(spec.whole)
        if kind != "rank" and found[kind, name] != expected:  # a rank may have no tensors of kind "rank"
            raise CheckpointError(
                f"'{name}' has {expected:,} elements, and the pieces that the ranks hold have {found[kind, name]:,}"
            )
