"""fleet.save(..., asynchronous=True): each rank copies its share and writes it while training continues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch

from torchfleet.base.background import BackgroundThreads
from torchfleet.collective.checkpoint.planning import Key
from torchfleet.collective.checkpoint.save_writing import PlannedSave, write_save
from torchfleet.collective.checkpoint.snapshots import Snapshots
from torchfleet.collective.world import Gathering, World


class BackgroundSaves:
    """The background saves of a rank, one at a time. All ranks begin and finish the same saves.

    The thread is not a daemon: a process that exits without calling `finish` still writes its share to the end.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ranks: Gathering | None = None  # the threads' own connections: the ranks' main threads train meanwhile
        self._snapshots = Snapshots()
        self._thread: BackgroundThreads | None = None

    def begin(
        self,
        planned: PlannedSave,
        tensors: Mapping[Key, torch.Tensor],
        first: Callable[[Gathering], object] | None = None,
    ) -> None:
        """Start a save; returns when the tensors are copied. The previous save must be finished. `first` is called on
        all ranks, in their threads, before the tensors are written.
        """
        assert self._thread is None
        ranks = self._ranks = self._ranks or self._world.aside()
        with contextlib.ExitStack() as stack:
            stack.enter_context(planned.place or contextlib.nullcontext())  # if copying fails, removes the remains
            copies = self._snapshots.take(tensors)
            stack.pop_all()

        def write() -> None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(planned.place or contextlib.nullcontext())  # if `first` fails, removes the remains
                if first is not None:
                    first(ranks)
                stack.pop_all()
            write_save(planned, copies, ranks)

        self._thread = BackgroundThreads([write], f"save {planned.number} beside training", daemon=False)
        self._thread.start()

    def finish(self, timeout: float | None = None) -> None:
        """Wait until the save in progress, if any, is on disk. Raises its error, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout)
            thread.check()
