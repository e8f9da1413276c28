"""Which inputs of a batch reach which table: learned from the first lookups, predicted from then on.

When an embedding looks up ids that are (a view of) a tensor of the batch, the way from the batch to the table is
remembered, and used at once. Ids that forward computes have a recipe, if the call was recorded. A way with such a
recipe is used after it was right about a second batch, until it is wrong about one. For the next batches all ids can
then be collected before the model runs, and pulled in one message per server.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from torchfleet.ps.worker.batch.batch_tensors import Stamp, is_no_padding, keys_of, stamp_of
from torchfleet.ps.worker.batch.columns import Blocks, Column, column_of, worth_it
from torchfleet.ps.worker.batch.recipe import CannotReplay, Input, Recipe, Replay, Shelf, nearest
from torchfleet.ps.worker.batch.recorder import OUTSIDE, Recorder, Refusal
from torchfleet.ps.worker.batch.window import Window
from torchfleet.ps.worker.client.shard import Keys

_LONGEST_REST = 1024
_MOST_WRONG = 3
_GIVE_IT = "give what changes to the model as an input tensor, or compute the ids before the call"

CHANGING = Refusal(
    "the recorded computation gave other ids on later batches: it depends on a value that is not an input of the call "
    "(a Python number, numpy, a changing attribute)",
    _GIVE_IT,
)
NO_CALL = Refusal(
    "the embedding was called outside of a call of the model",
    "call the whole model, so that all ids of a batch are known when it begins",
)
NOT_YET = Refusal(
    "the ids are new to this worker; it looks how they are computed in one of the next calls",
    "nothing, unless this is still reported after many batches",
)


@dataclass
class Way:
    """A way from a batch to a table. A way that is asleep is not used; it wakes when it was right about a batch."""

    table: str
    recipe: Recipe
    padding_idx: int | None
    is_awake: bool = field(default=True, compare=False)
    is_new: bool = field(default=True, compare=False)  # learned in this call
    num_wrong: int = field(default=0, compare=False)  # consecutive calls in which it led to none of the ids
    origin: int = field(default=-1, compare=False)  # the same number for the same ids, whatever their table
    shared: Column | None = field(default=None, compare=False)  # its column, if it is computed with others

    @cached_property
    def column(self) -> Column | None:
        return column_of(self.recipe)


class Guess:
    """The keys that a way predicts for a batch, and whether they were looked up."""

    def __init__(self, way: Way, keys: Keys) -> None:
        self.way, self.keys, self.is_right = way, keys, False

    def compare(self, keys: Keys) -> None:
        self.is_right = self.is_right or (len(keys) == len(self.keys) and bool((keys == self.keys).all()))


@dataclass
class Expected:
    """The predicted lookups in a table: ways, and the ids that they lead to. Ids on a device are copied to the host
    when `keys`, `stamped` or `guesses` is read.
    """

    slots: Sequence[tuple[Way, torch.Tensor | Keys]]
    _known: tuple[Keys, Stamp | None, list[Guess]] | None = field(default=None, repr=False, compare=False)

    @property
    def origin(self) -> tuple[Any, ...]:
        """Two tables with the same origin have the same keys."""
        return tuple(way.origin for way, _ in self.slots)

    @property
    def tensors(self) -> list[tuple[torch.Tensor, int | None]]:
        """The ids of each slot, with its padding_idx."""
        found = []
        for way, ids in self.slots:
            own = ids if isinstance(ids, torch.Tensor) else torch.from_numpy(ids.view(np.int64))
            found.append((own, way.padding_idx))
        return found

    @property
    def keys(self) -> Keys:
        """The keys of all slots, without padding."""
        return (self._known or self._found_once())[0]

    @property
    def stamped(self) -> tuple[Keys, Stamp | None]:
        """(keys, stamp). The stamp is None if any ids are computed or may have padding; the keys are then a copy."""
        return (self._known or self._found_once())[:2]

    @property
    def guesses(self) -> list[Guess]:
        """The guesses of the ways that compute ids."""
        for way, _ in self.slots:
            if way.recipe.is_computed:
                return (self._known or self._found_once())[2]
        return []

    def _found_once(self) -> tuple[Keys, Stamp | None, list[Guess]]:
        in_batch = []
        for way, ids in self.slots:
            if isinstance(ids, torch.Tensor) and way.padding_idx is None and not way.recipe.is_computed:
                in_batch.append(ids)
        if len(in_batch) == len(self.slots):
            self._known = keys_of(in_batch), stamp_of(in_batch), []
            return self._known
        keys, guesses = [], []
        for way, ids in self.slots:
            own = keys_of([ids]) if isinstance(ids, torch.Tensor) else ids
            if way.recipe.is_computed:
                own = own if way.recipe.makes_memory else own.copy()
                guesses.append(Guess(way, own))
            keys.append(own if way.padding_idx is None else own[is_no_padding(own, way.padding_idx)])
        self._known = (keys[0] if len(keys) == 1 else np.concatenate(keys)), None, guesses
        return self._known


@dataclass
class Foresight:
    """The ways learned so far, how often prediction failed, and why."""

    ways: tuple[Way, ...] = ()  # replaced, never changed in place: other threads may be iterating over it
    num_unforeseen: int = 0
    aliases: dict[str, str] = field(default_factory=dict)  # from a place in the model's call to the place in the batch
    reasons: dict[str, Refusal] = field(default_factory=dict)  # by table, for tables whose ids are not predicted
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _shelf: Shelf = field(default_factory=Shelf)
    _is_wanted: bool = True  # whether a call should be recorded
    _rest: int = 0  # calls until the next recording
    _next_rest: int = 1

    def wants_recording(self) -> bool:
        """Whether to record this call: the first one, and then calls at growing intervals, as long as lookups occur
        that no way leads to.
        """
        if not self._is_wanted:
            return False
        if self._rest:
            self._rest -= 1
            return False
        self._is_wanted, self._rest = False, self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        return True

    def learn(
        self,
        replay: Replay,
        table: str,
        slots: Sequence[torch.Tensor],
        padding_idx: int | None,
        recorder: Recorder | None,
    ) -> None:
        """Learn from a lookup of these ids (without padding), not all of which were predicted.

        `replay`: of the batch. `recorder`: of the call, if it is recorded.
        """
        self.num_unforeseen += 1
        for ids in slots:
            if not ids.numel():
                continue
            place = _place_of(ids, replay.tensors)
            if place is not None:
                self._add(Way(table, Recipe(place), padding_idx))
            elif not self._wake(replay, table, ids):
                self._study(replay, table, ids, padding_idx, recorder)

    def note_call(self, batch: Mapping[str, torch.Tensor], call: Mapping[str, torch.Tensor]) -> None:
        """Record that the model is called with tensors of a prefetched batch. Ways begin at places in the call, so that
        they also apply to calls without prefetching.
        """
        places = {id(tensor): place for place, tensor in reversed(list(batch.items()))}
        found = {place: places[id(tensor)] for place, tensor in call.items() if id(tensor) in places}
        self.aliases = {**self.aliases, **found}

    def in_call(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch's tensors by their places in the coming call."""
        return {call: batch[place] for call, place in self.aliases.items() if place in batch}

    def lacks(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a way in use starts from a tensor that is missing here."""
        return any(way.is_awake and not way.recipe.places <= tensors.keys() for way in self.ways)

    def keys(
        self, replay: Replay, ways: Iterable[Way] | None = None, blocks: Blocks | None = None
    ) -> dict[str, Expected]:
        """All ids that this batch is expected to look up, by table. `ways`: the ways to ask; None: all. `blocks`: the
        blocks of the batch.
        """
        found: dict[str, list[tuple[Way, torch.Tensor | Keys]]] = {}
        blocks = Blocks(replay) if blocks is None else blocks
        for way in self.ways if ways is None else ways:
            if not way.is_awake:
                continue
            try:
                ids = replay.ids(way.recipe) if way.shared is None else blocks.keys(way.shared)
            except CannotReplay:
                continue
            except Exception as error:  # torch functions may raise anything for this batch
                way.is_awake = False
                self.reasons[way.table] = Refusal(f"what was recorded failed with another batch: {error}", _GIVE_IT)
                continue
            if not isinstance(ids, torch.Tensor) or not ids.is_floating_point():
                found.setdefault(way.table, []).append((way, ids))
        return {table: Expected(slots) for table, slots in found.items()}

    def end_call(self, guesses: Iterable[Guess], unforeseen: Collection[str], unused: Collection[str]) -> None:
        """End a call. `unforeseen`: tables with lookups of ids that were not predicted. `unused`: tables with predicted
        ids that were not looked up at all.
        """
        for guess in guesses:
            guess.way.is_awake = guess.is_right
        if unused:
            for way in self.ways:
                way.is_awake = way.is_awake and way.table not in unused
        if not unforeseen:
            return
        for way in self.ways:
            if not way.is_awake and way.table in unforeseen:
                way.num_wrong, way.is_new = way.num_wrong + (not way.is_new), False
                if way.num_wrong >= _MOST_WRONG:
                    self.reasons[way.table] = CHANGING
        if any(way.num_wrong >= _MOST_WRONG for way in self.ways):
            self._use(tuple(way for way in self.ways if way.num_wrong < _MOST_WRONG))

    def _add(self, way: Way) -> None:
        self.reasons.pop(way.table, None)
        if way not in self.ways:
            self._use((*self.ways, way))
        elif way.is_awake:  # it was not used in an earlier call
            known = self.ways[self.ways.index(way)]
            known.is_awake, known.num_wrong = True, 0

    def _use(self, ways: tuple[Way, ...]) -> None:
        """Use these ways from now on. Equal recipes and blocks are found once, here: batches only compare numbers."""
        # of these ways alone: a recipe that is no longer in use is freed, with its tensors
        origins = {(way.recipe, way.padding_idx): way.origin for way in ways if way.origin >= 0}
        blocks = {block: block for block in worth_it(way.column for way in ways if way.column is not None)}
        for way in ways:
            if way.origin < 0:
                way.origin = origins.setdefault((way.recipe, way.padding_idx), next(self._numbers))
            block = None if way.column is None else blocks.get(way.column.block)
            way.shared = None if way.column is None or block is None else way.column._replace(block=block)
        self.ways = ways

    def _wake(self, replay: Replay, table: str, ids: torch.Tensor) -> bool:
        """Whether a way that is asleep leads to these ids; if so, it wakes, unless it was learned in this call."""
        for way in self.ways:
            if way.table == table and not way.is_awake and _leads_to(replay, way.recipe, ids):
                way.is_awake, way.num_wrong = not way.is_new, 0
                self.reasons.pop(table, None)
                return True
        return False

    def _study(
        self, replay: Replay, table: str, ids: torch.Tensor, padding_idx: int | None, recorder: Recorder | None
    ) -> None:
        """Learn how these ids were computed, or that a call should be recorded."""
        if recorder is None:
            self._is_wanted = self._is_wanted or bool(replay.tensors)
            self.reasons.setdefault(table, NOT_YET if replay.tensors else NO_CALL)
            return
        recipe = recorder.recipe(ids)
        if isinstance(recipe, Refusal):
            self.reasons[table] = recipe
        elif not _leads_to(replay, recipe, ids):
            self.reasons[table] = OUTSIDE
        else:
            recipe = Recipe(self._shelf.put(recipe.root), recipe.shapes)
            self._add(Way(table, recipe, padding_idx, is_awake=False))


def _place_of(ids: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> Input | None:
    """The place of ids in the batch; None if they do not lie in it."""
    pointer = ids.untyped_storage().data_ptr()
    found = []
    for place, base in batch.items():
        if base.untyped_storage().data_ptr() == pointer and base.dtype == ids.dtype:
            is_all = ids.numel() == base.numel() and ids.storage_offset() == base.storage_offset()
            window = Window() if is_all else Window.of(ids, base)
            if window is not None:
                found.append(Input(place, window))
    return nearest(found)


def _leads_to(replay: Replay, recipe: Recipe, ids: torch.Tensor) -> bool:
    try:
        found = replay.ids(recipe)
    except Exception:  # torch functions may raise anything for this batch
        return False
    return found.shape == ids.shape and bool((found == ids).all())
