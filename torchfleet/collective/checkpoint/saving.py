"""fleet.save: every rank writes a share of what it holds, then the manifest makes it the model.

The ranks tell each other which pieces they hold; of a piece that several have, the one that has least to write writes
it. Messages among ranks, and all that is read back, are JSON and raw numbers: nothing that is loaded can run code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from torchfleet.checkpoint.lock import alone
from torchfleet.checkpoint.manifest import FILE, as_json, folder_of
from torchfleet.checkpoint.part_writer import write_file
from torchfleet.collective.checkpoint import collective_manifest as saved
from torchfleet.collective.checkpoint.collective_manifest import Group, Manifest
from torchfleet.collective.checkpoint.optimizer_states import (
    Names,
    groups_of,
    innermost,
    master_pieces,
    names_of,
    optimizer_pieces,
)
from torchfleet.collective.checkpoint.pieces import Piece, model_pieces, part_pieces, tied
from torchfleet.collective.checkpoint.planning import Key, Line, Said, say, shared_out, told
from torchfleet.collective.checkpoint.tensor_files import Buffers, Bytes, entries_of, file_key, header, offsets_metadata
from torchfleet.collective.strategy import Part
from torchfleet.collective.world import World
from torchfleet.monitor.progress import Progress
from torchfleet.storage import Storage


class Begun(Said, kw_only=True):
    """What a rank would write, and into the manifest."""

    number: int = 0
    lines: list[Line] = msgspec.field(default_factory=list)
    optimizer: str = ""
    groups: list[Group] = msgspec.field(default_factory=list)
    values: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    tied: dict[str, str] = msgspec.field(default_factory=dict)


class Written(Said, kw_only=True):
    data_start: int = 0  # where in the file the first tensor begins
    checksums: list[int] = msgspec.field(default_factory=list)


def save(
    dirname: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    parts: Sequence[Part],
    world: World,
    extra: Mapping[str, Any] | None = None,
    names: Names | None = None,
) -> int:
    """Number of the save, when all of it is on disk. All ranks call it together, with a folder that all of them reach.

    `names`: of the optimizer's parameters, if they are not the model's own. An error, on whichever rank, is raised on
    all of them, and leaves the model that was saved there before, as does being killed.
    """
    own: dict[Key, Piece] = {("model", name): piece for name, piece in model_pieces(model, world).items()}
    failed = None
    try:
        begun = _begin(own, model, optimizer, parts, world, names)
        as_json(extra or {}, "fleet.save")
        begun.number = saved.next_number(Storage(dirname)) if world.rank == 0 else 0
    except Exception as error:
        begun, failed = Begun(error=told(error)), error
    everybody = say(world, begun, failed)
    storage, number = Storage(dirname), everybody[0].number
    plan = shared_out([one.lines for one in everybody])
    progress = Progress("fleet.save") if world.rank == 0 else None
    written = say(world, _write(storage, number, plan[world.rank], own, world, progress))
    done = Said()
    if world.rank == 0:
        tensors = _tensors(plan, written, everybody)
        settings = parts[0].strategy.differences() if parts else {}
        kept = [as_json(one, "fleet.save") for one in (settings, extra or {})]
        done = _commit(storage, _manifest(number, tensors, everybody, *kept))
    say(world, done)
    if progress is not None:
        progress.end(f"save {number} is in {storage.path}")
    return number


def _begin(
    own: dict[Key, Piece],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    parts: Sequence[Part],
    world: World,
    names: Names | None,
) -> Begun:
    """Adds to `own`, the model's, all else that this rank holds."""
    begun = Begun(tied=tied(model))
    if optimizer is not None:
        homes = {name: piece for (_, name), piece in own.items()}
        known = names_of(model, names)
        states, begun.values = optimizer_pieces(optimizer, known, homes)
        own.update({("optimizer", name): piece for name, piece in states.items()})
        copies = master_pieces(optimizer, known, homes, model)
        own.update({("master", name): piece for name, piece in copies.items()})
        begun.optimizer, begun.groups = type(innermost(optimizer)).__name__, groups_of(optimizer, known)
    own.update(part_pieces(parts, world))
    begun.lines = [piece.line(key) for key, piece in own.items()]
    return begun


def _write(
    storage: Storage,
    number: int,
    lines: Sequence[Line],
    own: Mapping[Key, Piece],
    world: World,
    progress: Progress | None,
) -> Written:
    """This rank's file."""
    if not lines:
        return Written()
    keys = [file_key(line.kind, line.name) for line in lines]
    entries = entries_of([(key, one.dtype, one.shape, one.bytes) for key, one in zip(keys, lines, strict=True)])
    head = header(entries, offsets_metadata({key: list(one.offset) for key, one in zip(keys, lines, strict=True)}))
    total, done = sum(line.bytes for line in lines), 0

    def show(num: int) -> None:
        nonlocal done
        done += num
        if progress is not None:
            progress.show(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB of rank 0")

    buffers = Buffers(head, [_maker(own[line.kind, line.name].tensor) for line in lines], show)
    try:
        write_file(storage, f"{folder_of(number)}/{file_of(world.rank, world.size)}", buffers)
    except Exception as error:
        return Written(error=told(error))
    return Written(data_start=len(head), checksums=buffers.checksums)


def _maker(tensor: torch.Tensor) -> Callable[[], Bytes]:
    """Its bytes, when they are asked for: one tensor at a time is copied to the host."""
    return lambda: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def file_of(rank: int, size: int) -> str:
    return f"rank-{rank:05}-of-{size:05}.safetensors"


def _tensors(
    plan: Sequence[Sequence[Line]], written: Sequence[Written], everybody: Sequence[Begun]
) -> list[saved.Tensor]:
    """In the order of the model: every tensor, and where its pieces are."""
    pieces: dict[Key, list[saved.Piece]] = {}
    for rank, lines in enumerate(plan):
        at = written[rank].data_start
        for line, crc in zip(lines, written[rank].checksums, strict=True):
            made = saved.Piece(file_of(rank, len(plan)), list(line.offset), list(line.shape), at, line.bytes, crc)
            pieces.setdefault((line.kind, line.name), []).append(made)
            at += line.bytes
    wholes = {(line.kind, line.name): line for one in everybody for line in one.lines}
    return [
        saved.Tensor(
            line.name, line.kind, line.dtype, list(line.whole), sorted(pieces[key], key=lambda one: one.offset)
        )
        for key, line in wholes.items()
        if key in pieces
    ]


def _manifest(
    number: int,
    tensors: list[saved.Tensor],
    everybody: Sequence[Begun],
    settings: dict[str, Any],
    extra: dict[str, Any],
) -> Manifest:
    return Manifest(
        save=folder_of(number),
        number=number,
        num_ranks=len(everybody),
        tensors=tensors,
        optimizer=everybody[0].optimizer,
        groups=_united([one.groups for one in everybody]),
        values={name: values for one in everybody for name, values in one.values.items()},
        tied={name: first for one in everybody for name, first in one.tied.items()},
        strategy=settings,
        extra=extra,
        time=time.time(),
    )


def _united(everybody: Sequence[Sequence[Group]]) -> list[Group]:
    """The param groups of all ranks: in a pipeline each has the parameters of its own stage."""
    made = []
    most = max(len(groups) for groups in everybody)
    for number, group in enumerate(next(groups for groups in everybody if len(groups) == most)):
        names = [name for groups in everybody if number < len(groups) for name in groups[number].parameters]
        made.append(Group(group.options, list(dict.fromkeys(names))))
    return made


def _commit(storage: Storage, manifest: Manifest) -> Said:
    """From here on the new model is the model."""
    try:
        with alone(storage):
            write_file(storage, FILE, [saved.encode(manifest)])
            saved.remove_others(storage, manifest.save)
    except Exception as error:
        return Said(error=told(error))
    return Said()
