"""Copies of neighbours: each rank's copy is also in the memory of another machine, if there are several.

Rank r's copies are kept by rank r + d (around the ranks), with a distance d that leads to another machine. A machine
that is lost takes its ranks' own copies along; its ranks, started again, get them back from their keepers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchfleet.base.background import BackgroundThreads
from torchfleet.collective.elastic.memory_files import HEAD_BYTES, MemoryFile
from torchfleet.collective.world import World

_PIECE = 64 << 20  # bytes per message
_PATIENCE = 10.0  # seconds that an abandoned exchange may take to end


def distance(machines: Sequence[str]) -> int:
    """The distance from a rank to its keeper, given each rank's machine; 0: all are on one machine, without keepers.

    If no distance leads from every rank to another machine, the one that does for most ranks.
    """
    size = len(machines)
    if len(set(machines)) < 2:
        return 0

    def num_apart(step: int) -> int:
        return sum(machines[rank] != machines[(rank + step) % size] for rank in range(size))

    return max(range(1, size), key=num_apart)  # the first of the best


class Neighbours:
    """This rank's keeper and ward. All ranks make it together, and exchange together."""

    def __init__(self, world: World, step: int) -> None:
        self.distance, self._rank, self._size = step, world.rank, world.size
        self._group = dist.new_group(backend="gloo")  # beside training, in a thread of its own
        self._thread: BackgroundThreads | None = None

    def begin(self, own: MemoryFile, kept: MemoryFile) -> None:
        """Beside training, send this rank's copy to its keeper, and receive the ward's copy into `kept`."""
        assert self._thread is None
        keeper, ward = (self._rank + self.distance) % self._size, (self._rank - self.distance) % self._size

        def exchange() -> None:
            kept.begin()
            sending = BackgroundThreads([lambda: self._send(own, keeper)], "sending a copy to another rank")
            sending.start()
            self._receive(kept, ward)
            sending.join()
            sending.check()

        self._thread = BackgroundThreads([exchange], "copies of neighbours")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the exchange under way, if any. Raises its error."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            thread.check()

    def abandon(self) -> None:
        """Wait up to _PATIENCE seconds for the exchange under way, whose group is broken."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def give_back(self, wards: Sequence[int], own: Sequence[MemoryFile], kept: Sequence[MemoryFile], step: int) -> None:
        """Send each of `wards` its copy of `step` from its keeper. All ranks call it together."""
        for ward in wards:
            if self._rank == (ward + self.distance) % self._size:
                self._send(next(file for file in kept if file.step == step), ward)
            elif self._rank == ward:
                self._receive(own[0], (ward + self.distance) % self._size)

    def _send(self, file: MemoryFile, to: int) -> None:
        head = torch.frombuffer(bytearray(file.head()), dtype=torch.uint8)
        for piece in (head, *file.body().split(_PIECE)):  # type: ignore[no-untyped-call]
            dist.send(piece, to, self._group)

    def _receive(self, file: MemoryFile, source: int) -> None:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        dist.recv(head, source, self._group)
        data = head.numpy().tobytes()
        for piece in file.body_for(data).split(_PIECE):  # type: ignore[no-untyped-call]
            dist.recv(piece, source, self._group)
        file.set_head(data)
