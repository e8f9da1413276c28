"""The files of a planned save: every rank writes its share, then the manifest makes the save the current model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from torchfleet.base.errors import CheckpointError
from torchfleet.base.monitor.progress import Progress
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.collective_manifest import (
    CollectiveManifest,
    SavedGroup,
    SavedPiece,
    SavedTensor,
    read,
    remove_others,
    write,
)
from torchfleet.collective.checkpoint.planning import Key, PieceSpec, Report, error_text, exchange
from torchfleet.collective.checkpoint.tensor_files import Buffers, Bytes, file_key, offsets_metadata
from torchfleet.collective.world import Gathering
from torchfleet.ps.checkpoint.lock import Reservation, alone, check_written
from torchfleet.ps.checkpoint.manifest import folder_of
from torchfleet.ps.checkpoint.part_file import entries_of, header
from torchfleet.ps.checkpoint.part_writer import write_made_file

Tensors = Mapping[Key, torch.Tensor]


class Holdings(Report, kw_only=True):
    """What a rank holds, and what it adds to the manifest."""

    number: int = 0
    specs: list[PieceSpec] = msgspec.field(default_factory=list, name="lines")  # its name in the exchanged JSON
    optimizer: str = ""
    groups: list[SavedGroup] = msgspec.field(default_factory=list)
    values: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    tied: dict[str, str] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class PlannedSave:
    """What all ranks have agreed on: everything about a save except the values of the tensors."""

    storage: Storage
    number: int
    plan: list[list[PieceSpec]]  # which pieces each rank writes
    held: list[Holdings]  # of all ranks
    settings: dict[str, Any]
    extra: dict[str, Any]
    place: Reservation | None  # of the folder; held by rank 0
    features: list[dict[str, Any]]  # of the model; known to rank 0


class Written(Report, kw_only=True):
    data_start: int = 0  # offset of the first tensor in the file
    checksums: list[int] = msgspec.field(default_factory=list)


def write_save(planned: PlannedSave, tensors: Tensors, ranks: Gathering) -> None:
    """Write a planned save; all of it is on disk when this returns. All ranks call it together, with their own tensors.

    An error on any rank is raised on all ranks; the previously saved model stays intact.
    """
    storage, number, plan = planned.storage, planned.number, planned.plan
    progress = Progress("fleet.save") if ranks.rank == 0 else None
    with planned.place or contextlib.nullcontext():  # removes the remains of a failed save
        written = exchange(ranks, _write(storage, number, plan[ranks.rank], tensors, ranks, progress))
        done = Report()
        if planned.place is not None:
            done = _commit(storage, _manifest(planned, _tensors(plan, written, planned.held)), planned.place)
        exchange(ranks, done)
    if progress is not None:
        progress.end(f"save {number} is in {storage.path}")


def _write(
    storage: Storage,
    number: int,
    specs: Sequence[PieceSpec],
    tensors: Tensors,
    ranks: Gathering,
    progress: Progress | None,
) -> Written:
    """Write this rank's file."""
    if not specs:
        return Written()
    keys = [file_key(spec.kind, spec.name) for spec in specs]
    entries = entries_of([(key, spec.dtype, spec.shape, spec.bytes) for key, spec in zip(keys, specs, strict=True)])
    head = header(entries, offsets_metadata({key: list(spec.offset) for key, spec in zip(keys, specs, strict=True)}))
    total, done = sum(spec.bytes for spec in specs), 0

    def show(num: int) -> None:
        nonlocal done
        done += num
        if progress is not None:
            progress.show(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB of rank 0")

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()  # a separate thread copies the tensors
    buffers = Buffers(head, [_maker(tensors[spec.kind, spec.name]) for spec in specs], show)
    try:
        name = f"{folder_of(number)}/{file_of(ranks.rank, ranks.size)}"
        write_made_file(storage, name, buffers, len(head) + total)
    except Exception as error:
        return Written(error=error_text(error))
    return Written(data_start=len(head), checksums=buffers.checksums)


def _maker(tensor: torch.Tensor) -> Callable[[], Bytes]:
    """A function that returns the tensor's bytes, so that tensors are copied to the host one after the other."""
    return lambda: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def file_of(rank: int, size: int) -> str:
    return f"rank-{rank:05}-of-{size:05}.safetensors"


def _tensors(
    plan: Sequence[Sequence[PieceSpec]], written: Sequence[Written], held: Sequence[Holdings]
) -> list[SavedTensor]:
    """Every tensor, in the order of the model, and where its pieces are."""
    pieces: dict[Key, list[SavedPiece]] = {}
    for rank, specs in enumerate(plan):
        at = written[rank].data_start
        for spec, crc in zip(specs, written[rank].checksums, strict=True):
            made = SavedPiece(file_of(rank, len(plan)), list(spec.offset), list(spec.shape), at, spec.bytes, crc)
            pieces.setdefault((spec.kind, spec.name), []).append(made)
            at += spec.bytes
    tensors = {(spec.kind, spec.name): spec for holdings in held for spec in holdings.specs}
    return [
        SavedTensor(
            spec.name, spec.kind, spec.dtype, list(spec.whole), sorted(pieces[key], key=lambda piece: piece.offset)
        )
        for key, spec in tensors.items()
        if key in pieces
    ]


def _manifest(planned: PlannedSave, tensors: list[SavedTensor]) -> CollectiveManifest:
    held = planned.held
    return CollectiveManifest(
        save=folder_of(planned.number),
        number=planned.number,
        num_ranks=len(held),
        tensors=tensors,
        optimizer=held[0].optimizer,
        groups=_merged_groups([holdings.groups for holdings in held]),
        values={name: values for holdings in held for name, values in holdings.values.items()},
        tied={name: first for holdings in held for name, first in holdings.tied.items()},
        strategy=planned.settings,
        extra=planned.extra,
        time=time.time(),
        features=planned.features,
    )


def _merged_groups(groups_of_ranks: Sequence[Sequence[SavedGroup]]) -> list[SavedGroup]:
    """The param groups of all ranks, merged: in a pipeline each rank has the parameters of its own stage."""
    made = []
    most = max(len(groups) for groups in groups_of_ranks)
    for number, group in enumerate(next(groups for groups in groups_of_ranks if len(groups) == most)):
        names = [name for groups in groups_of_ranks if number < len(groups) for name in groups[number].parameters]
        made.append(SavedGroup(group.options, list(dict.fromkeys(names))))
    return made


def _commit(storage: Storage, manifest: CollectiveManifest, held: Reservation) -> Report:
    """Make the new save the current model, then remove the previous one."""
    sizes: dict[str, int] = {}
    for tensor in manifest.tensors:
        for piece in tensor.pieces:
            sizes[piece.file] = max(sizes.get(piece.file, 0), piece.start + piece.bytes)
    try:
        with alone(storage):
            check_written(storage, manifest.save, sizes)
            write(storage, manifest)
            if read(storage) != manifest:
                raise CheckpointError(f"the manifest in {storage.path} is not the one that was written")
            held.release()
            remove_others(storage, manifest.number)
    except Exception as error:
        return Report(error=error_text(error))
    return Report()
