"""Cuts samples that come as columns into batches of one size, in order or in a random order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchfleet.data.column_samples import ColumnSamples
from torchfleet.data.file_passes import FileBatch, Ticket

Held = tuple[ColumnSamples, tuple[Ticket, ...]]


class ColumnCutter:
    """As file_passes.Cutter. A batch within one piece of samples is a view of it; one over several pieces is a copy.

    With `window`, that many samples are collected, shuffled and then cut.
    """

    def __init__(
        self, batch_size: int, put: Callable[[FileBatch], None], window: int = 0, rng: np.random.Generator | None = None
    ) -> None:
        self._batch_size, self._put, self._window = batch_size, put, window
        self._rng = rng or np.random.default_rng()
        self._waiting: list[Held] = []  # until the window is full
        self._parts: list[Held] = []  # of the next batch
        self._num_waiting = self._num = 0

    def add(self, samples: ColumnSamples, *tickets: Ticket) -> None:
        """Add samples. `tickets`: of the files that they come from."""
        if not samples.num:
            return
        if not self._window:
            self._cut_off(samples, tickets)
            return
        _hold(tickets)
        self._waiting.append((samples, tickets))
        self._num_waiting += samples.num
        if self._num_waiting >= self._window:
            self._shuffle()

    def cut(self) -> None:
        """Put a batch of the samples so far, full or not; a partly filled window is shuffled and cut first."""
        if self._waiting:
            self._shuffle()
        if self._parts:
            self._put_batch()

    def drop(self) -> None:
        """Put the full batches of the window; drop the rest, which counts as used."""
        if self._waiting:
            self._shuffle()
        parts, self._parts, self._num = self._parts, [], 0
        for _, tickets in parts:
            _release(tickets)

    def move_to(self, other: ColumnCutter) -> None:
        """Move the samples so far to another cutter."""
        held = [*self._waiting, *self._parts]
        self._waiting, self._parts, self._num_waiting, self._num = [], [], 0, 0
        for samples, tickets in held:
            other.add(samples, *tickets)
            _release(tickets)

    def _shuffle(self) -> None:
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        samples = ColumnSamples.joined([samples for samples, _ in waiting])
        held = tuple(ticket for _, tickets in waiting for ticket in tickets)
        self._cut_off(samples.picked(self._rng.permutation(samples.num)), held)
        _release(held)

    def _cut_off(self, samples: ColumnSamples, tickets: tuple[Ticket, ...]) -> None:
        at = 0
        while at < samples.num:
            stop = min(samples.num, at + self._batch_size - self._num)
            _hold(tickets)
            self._parts.append((samples.part(at, stop), tickets))
            self._num += stop - at
            at = stop
            if self._num == self._batch_size:
                self._put_batch()

    def _put_batch(self) -> None:
        made = ColumnSamples.joined([samples for samples, _ in self._parts])
        batch = FileBatch(made.slots(), made.num)
        batch.tickets = tuple(ticket for _, tickets in self._parts for ticket in tickets)
        self._parts, self._num = [], 0
        self._put(batch)


def _hold(tickets: tuple[Ticket, ...]) -> None:
    for ticket in tickets:
        ticket.hold()


def _release(tickets: tuple[Ticket, ...]) -> None:
    for ticket in tickets:
        ticket.release()
