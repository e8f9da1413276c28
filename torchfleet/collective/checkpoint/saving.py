"""fleet.save: the ranks agree on who writes what, each writes its share, and the manifest completes the save.

The ranks exchange which pieces they hold. A piece that several ranks hold is written by the one with the least to
write. Buffers may differ among ranks: the first of the ranks that hold a buffer writes it. Messages among ranks, and
all files, are JSON and raw numbers: loading never runs code.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.collective_manifest import next_number, remove_tables
from torchfleet.collective.checkpoint.optimizer_states import (
    Names,
    groups_of,
    innermost,
    master_pieces,
    names_of,
    optimizer_pieces,
)
from torchfleet.collective.checkpoint.pieces import HeldPiece, model_pieces, strategy_pieces, tied
from torchfleet.collective.checkpoint.planning import Key, assign_writers, error_text, exchange
from torchfleet.collective.checkpoint.save_writing import Holdings, PlannedSave, write_save
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import World
from torchfleet.ps.checkpoint.lock import Reservation, reserve
from torchfleet.ps.checkpoint.manifest import as_json


def save(
    dirname: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategies: Sequence[Strategy],
    world: World,
    extra: Mapping[str, Any] | None = None,
    names: Names | None = None,
) -> int:
    """Save, and return the number of the save when all of it is on disk.

    All ranks call it together, with a folder that all of them can reach. `names`: the names of the optimizer's
    parameters, if they are not the model's own. An error on any rank is raised on all ranks. After an error or a kill,
    the previously saved model is intact.
    """
    planned, tensors = plan_save(dirname, model, optimizer, strategies, world, extra, names)
    write_save(planned, tensors, world)
    return planned.number


def plan_save(
    dirname: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategies: Sequence[Strategy],
    world: World,
    extra: Mapping[str, Any] | None = None,
    names: Names | None = None,
    features: Callable[[], list[dict[str, Any]]] = list,
) -> tuple[PlannedSave, dict[Key, torch.Tensor]]:
    """(the plan, this rank's tensors, which share memory with the model's). All ranks call it together.

    `features`: called on rank 0, returns those of the model; what it raises is raised on all ranks.
    """
    own: dict[Key, HeldPiece] = {("model", name): piece for name, piece in model_pieces(model, world).items()}
    failed = place = None
    kept: dict[str, Any] = {}
    described: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:  # removes the remains of a save that cannot be planned
        try:
            holdings = collect(own, model, optimizer, strategies, world, names)
            kept = as_json(extra or {}, "fleet.save")
            if world.rank == 0:
                described = features()
                place = stack.enter_context(_reserve(Storage(dirname)))
                holdings.number = place.number
        except Exception as error:
            holdings, failed = Holdings(error=error_text(error)), error
        held = exchange(world, holdings, failed)
        plan = assign_writers([holdings.specs for holdings in held])
        settings = as_json(strategies[0].settings.differences() if strategies else {}, "fleet.save")
        stack.pop_all()
    planned = PlannedSave(Storage(dirname), held[0].number, plan, held, settings, kept, place, described)
    mine = {(spec.kind, spec.name) for spec in plan[world.rank]}
    return planned, {key: piece.tensor for key, piece in own.items() if key in mine}


def collect(
    own: dict[Key, HeldPiece],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategies: Sequence[Strategy],
    world: World,
    names: Names | None,
) -> Holdings:
    """Add everything else that this rank holds to `own`, which has the model's pieces."""
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


def _reserve(storage: Storage) -> Reservation:
    remove_tables(storage)  # of a save that failed: it would fill the disk beside those of the next one
    return reserve(storage, next_number(storage), secrets.randbits(62) + 1)
