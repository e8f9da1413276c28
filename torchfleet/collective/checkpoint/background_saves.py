"""fleet.save(..., asynchronous=True): the ranks' shares are copied, and written while training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from torchfleet.base.background import BackgroundThreads
from torchfleet.collective.checkpoint.planning import Key
from torchfleet.collective.checkpoint.save_writing import PlannedSave, write_save
from torchfleet.collective.checkpoint.snapshots import Snapshots
from torchfleet.collective.world import Gathering, World


class BackgroundSaves:
    """The saves of a rank, one at a time. All ranks begin and finish the same ones.

    The thread is no daemon: a process that ends without a word writes its share to the end first.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ranks: Gathering | None = None  # what the threads speak by: other ranks train at the same time
        self._snapshots = Snapshots()
        self._thread: BackgroundThreads | None = None

    def begin(self, planned: PlannedSave, tensors: Mapping[Key, torch.Tensor]) -> None:
        """Returns when the tensors are copied. The one before must be finished."""
        assert self._thread is None
        ranks = self._ranks = self._ranks or self._world.aside()
        with contextlib.ExitStack() as stack:
            stack.enter_context(planned.place or contextlib.nullcontext())  # if there is no memory for copies
            copies = self._snapshots.take(tensors)
            stack.pop_all()
        self._thread = BackgroundThreads(
            [lambda: write_save(planned, copies, ranks)], f"save {planned.number} beside training", daemon=False
        )
        self._thread.start()

    def finish(self, timeout: float | None = None) -> None:
        """Wait until the save under way is on disk, if there is one. Raises what went wrong with it, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout)
            thread.check()
