"""The steps of a training that continues where it was: from copies in memory, or from the last save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.notices import tell
from torchfleet.collective.checkpoint.planning import error_text, exchange
from torchfleet.collective.elastic.memory_copies import CopyWriter, RankState, describe, load_copy
from torchfleet.collective.elastic.memory_files import MemoryFile, MemoryFiles
from torchfleet.collective.elastic.neighbours import Neighbours, distance
from torchfleet.collective.elastic.newest_copy import NO_STEP, Copies, Start, newest

_MACHINE = "GROUP_RANK"  # torch's launchers number machines by it


class ElasticSteps:
    """Yields steps; copies the state every `copy_steps` of them (0: never). All ranks iterate together.

    `saved` returns the step of the last save, or NO_STEP; rank 0 calls it, for all. `load` loads that save.
    """

    def __init__(
        self, state: RankState, num_steps: int, copy_steps: int, saved: Callable[[], int], load: Callable[[], Any]
    ) -> None:
        files = MemoryFiles.of_launcher() if copy_steps else None
        if copy_steps and files is None and state.world.rank == 0:
            tell(
                f"fleet.elastic.steps: no copies are kept (copy_steps={copy_steps}), since nothing would start a "
                "killed rank again: fleetrun --max_restart N does"
            )
        self._state, self._num_steps, self._copy_steps = state, num_steps, 0 if files is None else copy_steps
        self._saved, self._load = saved, load
        self._files = files or MemoryFiles([], [])
        machines = [data.decode() for data in state.world.gather(os.environ.get(_MACHINE, "0").encode())]
        step = distance(machines) if self._copy_steps else 0
        self._neighbours = Neighbours(state.world, step) if step else None
        self._writers = [CopyWriter(file) for file in self._files.own]

    def __iter__(self) -> Iterator[int]:
        first = last_copy = self._restore()
        try:
            for step in range(first, self._num_steps):
                yield step
                made = step + 1
                is_due = self._copy_steps and made - last_copy >= self._copy_steps and made < self._num_steps
                if is_due and not self._state.optimizer.is_gathering:
                    self._copy(made)
                    last_copy = made
            if self._neighbours is not None:
                self._neighbours.finish()
        finally:
            if self._neighbours is not None:
                self._neighbours.abandon()

    def _copy(self, step: int) -> None:
        if self._neighbours is not None:
            self._neighbours.finish()
        writer = min(self._writers, key=lambda writer: writer.file.step)
        writer.write(step, self._state)
        if self._neighbours is not None:
            self._neighbours.begin(writer.file, min(self._files.kept, key=lambda file: file.step))

    def _restore(self) -> int:
        """Load the newest complete copy, or else the last save. Returns its step, which is the next one to make."""
        world = self._state.world
        apart = self._neighbours.distance if self._neighbours is not None else 0
        copies = Copies(own=self._steps(self._files.own, 0), kept=self._steps(self._files.kept, apart))
        failed = None
        try:
            if world.rank == 0:
                copies.saved = self._saved()
        except Exception as error:
            copies.error, failed = error_text(error), error
        start = newest(exchange(world, copies, failed), apart, self._copy_steps)
        for file in (*self._files.own, *self._files.kept):
            if file.step > start.step:  # a step that is made again
                file.begin()
        if start.is_copy:
            self._load_copy(start)
        elif start.is_save:
            self._load()
        if world.rank == 0:
            _tell(start)
        return start.step

    def _steps(self, files: list[MemoryFile], behind: int) -> list[int]:
        """The steps of the copies in `files` that are of the rank `behind` places before this one, in a job of this
        size. Forgets all other copies."""
        world = self._state.world
        owner = ((world.rank - behind) % world.size, world.size)
        for file in files:
            if file.step != NO_STEP and owner != ((about := describe(file)).rank, about.num_ranks):
                file.begin()
        return [file.step for file in files if file.step != NO_STEP]

    def _load_copy(self, start: Start) -> None:
        own, kept = self._files
        if self._neighbours is not None:
            self._neighbours.give_back(start.wards, own, kept, start.step)
        file = next(file for file in own if file.step == start.step)
        load_copy(file, self._state)
        if self._neighbours is not None and start.wards:  # keepers that were replaced have no copies yet
            self._neighbours.begin(file, min(kept, key=lambda file: file.step))


def _tell(start: Start) -> None:
    if start.lost:
        tell(f"fleet: {start.lost}; going on from the save of step {start.step}")
    elif start.is_copy:
        tell(f"fleet: going on from step {start.step}, which was copied in memory")


def check_copies(state: RankState, has_rows: bool) -> None:
    """Raise FleetError for a job whose state is more than what a copy holds. `has_rows`: it has tables on devices."""
    if has_rows:
        raise FleetError(
            "fleet.elastic.steps(copy_steps=...) copies networks, and this job has tables on its devices: give "
            "copy_steps=0, and save them with fleet.save"
        )
    alone = next((strategy.field for strategy in state.strategies if strategy.trains_alone), None)
    if alone is not None:
        raise FleetError(
            f"fleet.elastic.steps(copy_steps=...) and {alone} cannot be used together: with it the ranks train alone "
            "between two exchanges, and what they keep for the next one is not copied. Leave one of them out."
        )
