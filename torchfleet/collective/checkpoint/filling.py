"""Resharding: read and copy the overlap of the saved pieces with this rank's pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from torchfleet.base.errors import CheckpointError
from torchfleet.base.monitor.progress import Progress
from torchfleet.collective.checkpoint.collective_manifest import SavedPiece, SavedTensor, num_elements
from torchfleet.collective.checkpoint.pieces import DTYPES, HeldPiece
from torchfleet.collective.checkpoint.tensor_files import overlap


class Target(NamedTuple):
    """A piece of this rank, and the saved tensor to fill it from."""

    source: SavedTensor
    piece: HeldPiece


class PieceReader(Protocol):
    """Reads pieces from the files of a save, or from a copy in memory."""

    def check(self, tensors: Iterable[SavedTensor]) -> None:
        """Check that the pieces are there. Values are not read."""

    def read(self, tensor: SavedTensor, piece: SavedPiece) -> bytearray | memoryview:
        """The bytes of a piece."""


def fill(reader: PieceReader, targets: Sequence[Target], progress: Progress | None) -> None:
    """Fill the targets, in the order of the files."""
    jobs = []
    for source, piece in targets:
        num = 0
        for saved in source.pieces:
            common = overlap(piece.offset, tuple(piece.tensor.shape), saved.offset, saved.shape)
            if common is not None:
                jobs.append((source, saved, piece, *common))
                num += num_elements([some.stop - some.start for some in common[0]])
        if num != piece.tensor.numel():
            raise CheckpointError(f"'{source.name}': {num:,} of {piece.tensor.numel():,} elements were saved")
    reader.check({id(source): source for source, *_ in jobs}.values())
    total, done = sum(saved.bytes for _, saved, *_ in jobs), 0
    for source, saved, piece, here, there in sorted(jobs, key=lambda job: (job[1].file, job[1].start)):
        data = torch.frombuffer(reader.read(source, saved), dtype=DTYPES[source.dtype]).view(saved.shape)
        piece.tensor[here].copy_(data[there])
        done += saved.bytes
        if progress is not None:
            progress.show(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB for this rank")
