"""fleet.load: every rank reads the saved pieces that overlap with what it holds, whichever rank saved them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from torchfleet.base.errors import CheckpointError
from torchfleet.base.monitor.progress import Progress
from torchfleet.base.prepared_types import prepared
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint import collective_manifest as saved
from torchfleet.collective.checkpoint.collective_manifest import CollectiveManifest, SavedTensor
from torchfleet.collective.checkpoint.filling import PieceReader, Target, fill
from torchfleet.collective.checkpoint.optimizer_states import (
    Names,
    check_groups,
    innermost,
    names_of,
    new_state,
    optimized,
    set_options,
    states_by_parameter,
)
from torchfleet.collective.checkpoint.pieces import DTYPES, HeldPiece, Pieces, model_pieces, piece_of, tied
from torchfleet.collective.checkpoint.planning import Report, error_text, exchange
from torchfleet.collective.checkpoint.tensor_files import Reader
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import World


class Opened(Report, kw_only=True):
    """The manifest, which rank 0 reads, and the names of the tensors of this rank's model."""

    manifest: str = ""
    names: list[str] = msgspec.field(default_factory=list)


class Found(Report, kw_only=True):
    """Which save there is, as rank 0 sees it."""

    number: int | None = None
    features: list[dict[str, Any]] = msgspec.field(default_factory=list)


class LoadSource(NamedTuple):
    """Where tensors are loaded from: a save, or a copy in memory."""

    manifest: CollectiveManifest
    known: Collection[str]  # names of the tensors in the models to load into
    place: str  # its name in messages
    reader: Callable[[], AbstractContextManager[PieceReader]]


def load(
    dirname: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategies: Sequence[Strategy],
    world: World | None,
    names: Names | None = None,
) -> dict[str, Any]:
    """Load a save; returns its `extra`. All ranks call it together; an error on one rank is raised on all.

    The model must have exactly the saved tensors, in the same shapes; the number of ranks and the strategies may
    differ. The optimizer's state is rebuilt if the optimizer is of the same class; strategies that were not on when the
    model was saved keep their state. If the model does not fit, nothing is changed. If a file is damaged, some
    parameters may already have been overwritten: load another save.
    """
    storage, homes = Storage(dirname), model_pieces(model, world)
    source = _opened(storage, [*homes, *tied(model)], world)
    return load_from(source, homes, model, optimizer, strategies, world, names)


def load_from(
    source: LoadSource,
    homes: Pieces,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strategies: Sequence[Strategy],
    world: World | None,
    names: Names | None = None,
) -> dict[str, Any]:
    """Load from an opened source, as `load` does. `homes`: what model_pieces returned."""
    loading = CollectiveLoad(source, homes, model, world)
    report, failed = Report(), None
    try:
        loading.check()
        if optimizer is not None:
            loading.add_optimizer(optimizer, names_of(model, names), strategies)
        loading.add_strategies(strategies)
    except Exception as error:
        report, failed = Report(error=error_text(error)), error
    exchange(world, report, failed)
    exchange(world, loading.read())
    try:
        loading.assign()
    except Exception as error:
        report, failed = Report(error=error_text(error)), error
    exchange(world, report, failed)
    return loading.manifest.extra


def load_parameters(dirname: str, module: torch.nn.Module) -> dict[str, Any]:
    """Load parameters and buffers into a model of this process alone, for prediction; returns the saved `extra`."""
    return load(dirname, module, None, (), None)


def saved_number(dirname: str, world: World) -> int | None:
    """The number of the save in `dirname`; None if servers made it. Rank 0 looks, and all ranks call it together."""
    found, failed = Found(), None
    try:
        if world.rank == 0 and saved.is_collective(dirname):
            found.number = saved.read(Storage(dirname)).number
    except Exception as error:
        found.error, failed = error_text(error), error
    return exchange(world, found, failed)[0].number


def saved_features(dirname: str, world: World) -> list[dict[str, Any]]:
    """The features of the model in `dirname`. Rank 0 looks, and all ranks call it together."""
    found, failed = Found(), None
    try:
        if world.rank == 0:
            found.features = saved.features_of(dirname)
    except Exception as error:
        found.error, failed = error_text(error), error
    return exchange(world, found, failed)[0].features


def _opened(storage: Storage, names: list[str], world: World | None) -> LoadSource:
    """The save in `storage`. `names`: of the tensors of this rank's model. All ranks call it together."""
    opened = Opened(names=names)
    if world is None or not world.rank:
        try:
            opened.manifest = msgspec.json.encode(saved.read(storage)).decode()
        except Exception as error:
            opened.error = error_text(error)
    reports = exchange(world, opened)
    manifest = msgspec.json.decode(reports[0].manifest, type=prepared(CollectiveManifest))
    known = {name for report in reports for name in report.names}
    place = f"{storage.path} ({manifest.save})"
    return LoadSource(manifest, known, place, partial(Reader, storage, manifest))


class CollectiveLoad:
    """A save being loaded into this rank's tensors: call `check` and `add_...` first, then `read`, then `assign`."""

    def __init__(self, source: LoadSource, homes: Pieces, model: torch.nn.Module, world: World | None) -> None:
        self._source, self._homes, self._model, self._world = source, homes, model, world
        self.manifest = source.manifest
        self._saved = self.manifest.of_kind("model")
        self._targets: list[Target] = []
        self._assignments: list[Callable[[], object]] = []

    def check(self) -> None:
        """Check that the model has exactly the saved tensors."""
        masters = self.manifest.of_kind("master")
        place = self._source.place
        for name in self._saved:
            if name not in self._source.known:
                raise CheckpointError(
                    f"{place} has '{name}', which the model does not have. Load it into its own model."
                )
        for name, piece in self._homes.items():
            source = self._saved.get(self._saved_name(name))
            if source is None:
                raise CheckpointError(f"{place} has no '{name}', which the model has. Load it into its own model.")
            if tuple(source.shape) != piece.shape:
                raise CheckpointError(
                    f"'{name}' has shape {piece.shape} in the model, and was saved with shape {tuple(source.shape)}"
                )
            copy = masters.get(self._saved_name(name))  # read if it has the type of the model's tensor now
            is_better = copy is not None and DTYPES[copy.dtype] == piece.tensor.dtype
            self._targets.append(Target(copy if copy is not None and is_better else source, piece))

    def _saved_name(self, name: str) -> str:
        """The saved name of a parameter. A tied one was saved under one name; in a pipeline, under one per stage."""
        return name if name in self._saved else self.manifest.tied.get(name, name)

    def add_optimizer(self, optimizer: torch.optim.Optimizer, names: Names, strategies: Sequence[Strategy]) -> None:
        """Add the options of the groups, the state of each parameter, and the optimizer's copies of parameters."""
        kind, kept = type(innermost(optimizer)).__name__, self.manifest.optimizer
        is_same, parameters = kind == kept, list(optimized(optimizer, names))
        if is_same:
            check_groups(optimizer, names, self.manifest.groups, self._saved_name)
            self._assignments.append(partial(set_options, optimizer, self.manifest.groups))
        elif self._is_first:
            self._assignments.append(partial(_print_new_state, kept or "no optimizer", kind))
        states = states_by_parameter(self.manifest) if is_same else {}
        masters, own = self.manifest.of_kind("master"), set(self._model.parameters())
        made: dict[torch.Tensor, dict[str, Any]] = {}
        for parameter, name, group in parameters:
            home, there = self._homes[name], self._saved_name(name)
            if parameter not in own:
                source = masters.get(there) or self._saved[there]
                self._targets.append(Target(source, home.like(parameter)))
            if is_same and all(strategy.owns_state(parameter) for strategy in strategies):
                made[parameter], pieces = new_state(parameter, home, states.get(there, {}), group)
                made[parameter].update(self.manifest.values.get(there, {}))
                self._targets += [Target(states[there][key], piece) for key, piece in pieces.items()]
        self._assignments.append(partial(_replace_state, optimizer, made))

    def add_strategies(self, strategies: Sequence[Strategy]) -> None:
        for strategy in strategies:
            common, own = self._common_state(strategy), self._rank_state(strategy)
            if common:
                self._assignments.append(partial(strategy.load_state, common))
            if own:
                self._assignments.append(partial(_load_means, strategy, own))

    def _common_state(self, strategy: Strategy) -> dict[str, torch.Tensor]:
        made, present = {}, strategy.state()
        for key, source in _of_field(self.manifest.of_kind("part"), strategy.field):
            made[key] = _empty(source.shape, source, present.get(key))
            self._targets.append(Target(source, piece_of(made[key])))
        return made

    def _rank_state(self, strategy: Strategy) -> dict[str, torch.Tensor]:
        """This rank's saved state if the number of ranks is the same; else the states of all saved ranks, stacked."""
        assert self._world is not None
        made, present, rank = {}, strategy.rank_state(), self._world.rank
        for key, source in _of_field(self.manifest.of_kind("rank"), strategy.field):
            ranks = [piece.offset[0] for piece in source.pieces]
            if self.manifest.num_ranks == self._world.size and rank in ranks:
                ranks = [rank]
            made[key] = _empty([len(ranks), *source.shape[1:]], source, present.get(key))
            for i, saved_rank in enumerate(ranks):
                offset = (saved_rank, *[0] * (len(source.shape) - 1))
                self._targets.append(Target(source, HeldPiece(made[key][i : i + 1], tuple(source.shape), offset)))
        return made

    def read(self) -> Report:
        """Read everything that was added: into the model's own tensors, and new ones for the optimizer and the
        strategies."""
        progress = Progress("fleet.load") if self._is_first else None
        try:
            with torch.no_grad(), self._source.reader() as reader:
                fill(reader, self._targets, progress)
        except Exception as error:
            return Report(error=error_text(error))
        if progress is not None:
            progress.end(self._source.place)
        return Report()

    def assign(self) -> None:
        """Pass what was read to the optimizer and the strategies."""
        for assign in self._assignments:
            assign()

    @property
    def _is_first(self) -> bool:
        return self._world is None or self._world.rank == 0


def _empty(shape: Sequence[int], source: SavedTensor, like: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=DTYPES[source.dtype], device=None if like is None else like.device)


def _of_field(tensors: Mapping[str, SavedTensor], field: str) -> list[tuple[str, SavedTensor]]:
    return [(name[len(field) + 1 :], tensor) for name, tensor in tensors.items() if name.startswith(f"{field}.")]


def _replace_state(optimizer: torch.optim.Optimizer, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if states.get(parameter):
                optimizer.state[parameter] = states[parameter]


def _load_means(strategy: Strategy, states: Mapping[str, torch.Tensor]) -> None:
    strategy.load_rank_state({key: _mean(state) for key, state in states.items()})


def _mean(states: torch.Tensor) -> torch.Tensor:
    """The mean over ranks, which are the first dimension."""
    if len(states) == 1:
        return states[0]
    mean = states.double().mean(0)
    return (mean if states.is_floating_point() else mean.round()).to(states.dtype)


def _print_new_state(kept: str, kind: str) -> None:
    print(
        f"the model was saved by {kept}, and is now trained by {kind}: parameters are loaded, the optimizer's state "
        "starts anew",
        file=sys.stderr,
        flush=True,
    )
