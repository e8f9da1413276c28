"""Buffers of worker 0's model on the servers, for processes that follow these: only the workers compute them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torchfleet.base.errors import FleetError, ModelError
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.shard import Floats
from torchfleet.ps.worker.lookup.dense_group import DenseGroup

SECONDS = 1.0  # between two copies; those of a model that makes no steps are sent, too
_PATIENCE = 5.0  # seconds for the thread to end


class SentBuffers:
    """Copies buffers after a step, at most once a second, and sends them in a thread, if they have changed."""

    def __init__(self, groups: Sequence[DenseGroup], connect: Callable[[], Client]) -> None:
        """`connect` is called in another thread."""
        self._groups, self._connect = groups, connect
        self._next = time.monotonic() + SECONDS
        self._num_steps = self._num_copied = 0
        self._marks: object = self._versions()
        self._copies: dict[str, Floats] | None = None  # not sent yet
        self._sending = threading.Lock()
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def step_made(self) -> None:
        """Called after a step of the whole model, by a thread that trains it."""
        self._num_steps += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="buffers", daemon=True)
            self._thread.start()
        if time.monotonic() >= self._next:
            self._copy()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Nothing is sent meanwhile, and nothing that was copied before is sent later."""
        with self._sending:
            self._copies = None
            yield

    def close(self) -> None:
        """End the thread. Later calls do nothing."""
        self._over.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def _copy(self) -> None:
        self._next, self._num_copied = time.monotonic() + SECONDS, self._num_steps
        with contextlib.suppress(ModelError):  # of a buffer that cannot be kept: a save raises it
            marks = self._versions()
            if marks == self._marks:
                return
            self._copies, self._marks = {group.spec.name: group.values() for group in self._groups}, marks
            self._wake.set()

    def _versions(self) -> object:
        """A value that changes when a buffer is changed or replaced."""
        tensors = [tensor for group in self._groups for tensor in group.parameters]
        return [(id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]

    def _run(self) -> None:
        client: Client | None = None
        seen = 0
        while not self._over.is_set():
            if not self._wake.wait(SECONDS) and self._num_steps == seen != self._num_copied:
                self._copy()  # no step has been made for a while, and the last ones came before a copy was due
            seen = self._num_steps
            self._wake.clear()
            with self._sending:
                copies, self._copies = self._copies, None
                if copies is None or self._over.is_set():
                    continue
                try:
                    client = client or self._connect()
                    for name, values in copies.items():
                        client.set_dense(name, values)
                except FleetError:  # training meets it, too, and says so
                    self._marks = None  # what was not sent is sent after a later step
                    if client is not None:
                        client.close()
                    client = None
        if client is not None:
            client.close()
