"""fleet.save: every rank writes a share of what it holds, then the manifest makes it the model.

The ranks exchange which pieces they hold; of a piece that several have, the one that has least to write writes it.
Messages among ranks, and all that is read back, are JSON and raw numbers: nothing that is loaded can run code.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from torchfleet.checkpoint.lock import Reservation, alone, check_written, reserve
from torchfleet.checkpoint.manifest import as_json, folder_of
from torchfleet.checkpoint.part_file import entries_of, header
from torchfleet.checkpoint.part_writer import write_file
from torchfleet.collective.checkpoint.collective_manifest import (
    CollectiveManifest,
    SavedGroup,
    SavedPiece,
    SavedTensor,
    next_number,
    read,
    remove_others,
    write,
)
from torchfleet.collective.checkpoint.optimizer_states import (
    Names,
    groups_of,
    innermost,
    master_pieces,
    names_of,
    optimizer_pieces,
)
from torchfleet.collective.checkpoint.pieces import HeldPiece, model_pieces, strategy_pieces, tied
from torchfleet.collective.checkpoint.planning import Key, PieceSpec, Report, assign_writers, error_text, exchange
from torchfleet.collective.checkpoint.tensor_files import Buffers, Bytes, file_key, offsets_metadata
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import World
from torchfleet.errors import CheckpointError
from torchfleet.monitor.progress import Progress
from torchfleet.storage import Storage


class Holdings(Report, kw_only=True):
    """What a rank holds, and what it adds to the manifest."""

    number: int = 0
    specs: list[PieceSpec] = msgspec.field(default_factory=list, name="lines")  # its name in the exchanged JSON
    optimizer: str = ""
    groups: list[SavedGroup] = msgspec.field(default_factory=list)
    values: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    tied: dict[str, str] = msgspec.field(default_factory=dict)


class Written(Report, kw_only=True):
    data_start: int = 0  # where in the file the first tensor begins
    checksums: list[int] = msgspec.field(default_factory=list)


def save(
    dirname: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategies: Sequence[Strategy],
    world: World,
    extra: Mapping[str, Any] | None = None,
    names: Names | None = None,
) -> int:
    """Number of the save, when all of it is on disk. All ranks call it together, with a folder that all of them reach.

    `names`: of the optimizer's parameters, if they are not the model's own. An error, on whichever rank, is raised on
    all of them, and leaves the model that was saved there before, as does being killed.
    """
    with contextlib.ExitStack() as stack:
        return _save(dirname, model, optimizer, strategies, world, extra, names, stack)


def _save(
    dirname: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategies: Sequence[Strategy],
    world: World,
    extra: Mapping[str, Any] | None,
    names: Names | None,
    stack: contextlib.ExitStack,
) -> int:
    """`stack` ends when the save has: what is left of one that failed is removed."""
    own: dict[Key, HeldPiece] = {("model", name): piece for name, piece in model_pieces(model, world).items()}
    failed = place = None
    try:
        holdings = _collect(own, model, optimizer, strategies, world, names)
        as_json(extra or {}, "fleet.save")
        if world.rank == 0:
            place = stack.enter_context(_reserve(Storage(dirname)))
            holdings.number = place.number
    except Exception as error:
        holdings, failed = Holdings(error=error_text(error)), error
    held = exchange(world, holdings, failed)
    storage, number = Storage(dirname), held[0].number
    plan = assign_writers([holdings.specs for holdings in held])
    progress = Progress("fleet.save") if world.rank == 0 else None
    written = exchange(world, _write(storage, number, plan[world.rank], own, world, progress))
    done = Report()
    if place is not None:
        tensors = _tensors(plan, written, held)
        settings = strategies[0].settings.differences() if strategies else {}
        kept = [as_json(values, "fleet.save") for values in (settings, extra or {})]
        done = _commit(storage, _manifest(number, tensors, held, *kept), place)
    exchange(world, done)
    if progress is not None:
        progress.end(f"save {number} is in {storage.path}")
    return number


def _collect(
    own: dict[Key, HeldPiece],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategies: Sequence[Strategy],
    world: World,
    names: Names | None,
) -> Holdings:
    """Adds to `own`, the model's, all else that this rank holds."""
    holdings = Holdings(tied=tied(model))
    if optimizer is not None:
        homes = {name: piece for (_, name), piece in own.items()}
        known = names_of(model, names)
        states, holdings.values = optimizer_pieces(optimizer, known, homes)
        own.update({("optimizer", name): piece for name, piece in states.items()})
        copies = master_pieces(optimizer, known, homes, model)
        own.update({("master", name): piece for name, piece in copies.items()})
        holdings.optimizer, holdings.groups = type(innermost(optimizer)).__name__, groups_of(optimizer, known)
    own.update(strategy_pieces(strategies, world))
    holdings.specs = [piece.spec(key) for key, piece in own.items()]
    return holdings


def _write(
    storage: Storage,
    number: int,
    specs: Sequence[PieceSpec],
    own: Mapping[Key, HeldPiece],
    world: World,
    progress: Progress | None,
) -> Written:
    """This rank's file."""
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

    buffers = Buffers(head, [_maker(own[spec.kind, spec.name].tensor) for spec in specs], show)
    try:
        write_file(storage, f"{folder_of(number)}/{file_of(world.rank, world.size)}", buffers)
    except Exception as error:
        return Written(error=error_text(error))
    return Written(data_start=len(head), checksums=buffers.checksums)


def _maker(tensor: torch.Tensor) -> Callable[[], Bytes]:
    """Its bytes, when they are asked for: one tensor at a time is copied to the host."""
    return lambda: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def file_of(rank: int, size: int) -> str:
    return f"rank-{rank:05}-of-{size:05}.safetensors"


def _tensors(
    plan: Sequence[Sequence[PieceSpec]], written: Sequence[Written], held: Sequence[Holdings]
) -> list[SavedTensor]:
    """In the order of the model: every tensor, and where its pieces are."""
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


def _manifest(
    number: int,
    tensors: list[SavedTensor],
    held: Sequence[Holdings],
    settings: dict[str, Any],
    extra: dict[str, Any],
) -> CollectiveManifest:
    return CollectiveManifest(
        save=folder_of(number),
        number=number,
        num_ranks=len(held),
        tensors=tensors,
        optimizer=held[0].optimizer,
        groups=_merged_groups([holdings.groups for holdings in held]),
        values={name: values for holdings in held for name, values in holdings.values.items()},
        tied={name: first for holdings in held for name, first in holdings.tied.items()},
        strategy=settings,
        extra=extra,
        time=time.time(),
    )


def _merged_groups(groups_of_ranks: Sequence[Sequence[SavedGroup]]) -> list[SavedGroup]:
    """The param groups of all ranks: in a pipeline each has the parameters of its own stage."""
    made = []
    most = max(len(groups) for groups in groups_of_ranks)
    for number, group in enumerate(next(groups for groups in groups_of_ranks if len(groups) == most)):
        names = [name for groups in groups_of_ranks if number < len(groups) for name in groups[number].parameters]
        made.append(SavedGroup(group.options, list(dict.fromkeys(names))))
    return made


def _reserve(storage: Storage) -> Reservation:
    return reserve(storage, next_number(storage), secrets.randbits(62) + 1)


def _commit(storage: Storage, manifest: CollectiveManifest, held: Reservation) -> Report:
    """From here on the new model is the model. The one of before goes last."""
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
            remove_others(storage, manifest.save)
    except Exception as error:
        return Report(error=error_text(error))
    return Report()
