"""fleet.save: the ranks agree on who writes what; each writes its share, and then the manifest makes it the model.

The ranks exchange which pieces they hold; of a piece that several have, the one that has least to write writes it.
Buffers may differ from rank to rank: of those that several have, the first of these ranks writes all.
Messages among ranks, and all that is read back, are JSON and raw numbers: nothing that is loaded can run code.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.collective_manifest import next_number
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
    """Number of the save, when all of it is on disk. All ranks call it together, with a folder that all of them reach.

    `names`: of the optimizer's parameters, if they are not the model's own. An error, on whichever rank, is raised on
    all of them, and leaves the model that was saved there before, as does being killed.
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
) -> tuple[PlannedSave, dict[Key, torch.Tensor]]:
    """(who writes what, this rank's tensors, which share their memory with the model's). All ranks call it together."""
    own: dict[Key, HeldPiece] = {("model", name): piece for name, piece in model_pieces(model, world).items()}
    failed = place = None
    kept: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:  # what is left of a save that cannot be planned is removed
        try:
            holdings = _collect(own, model, optimizer, strategies, world, names)
            kept = as_json(extra or {}, "fleet.save")
            if world.rank == 0:
                place = stack.enter_context(_reserve(Storage(dirname)))
                holdings.number = place.number
        except Exception as error:
            holdings, failed = Holdings(error=error_text(error)), error
        held = exchange(world, holdings, failed)
        plan = assign_writers([holdings.specs for holdings in held])
        settings = as_json(strategies[0].settings.differences() if strategies else {}, "fleet.save")
        stack.pop_all()
    planned = PlannedSave(Storage(dirname), held[0].number, plan, held, settings, kept, place)
    mine = {(spec.kind, spec.name) for spec in plan[world.rank]}
    return planned, {key: piece.tensor for key, piece in own.items() if key in mine}


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


def _reserve(storage: Storage) -> Reservation:
    return reserve(storage, next_number(storage), secrets.randbits(62) + 1)
