"""Heter workers to test with: in threads of this process, behind sockets."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.refused import is_refused
from torchfleet.ps.net.sockets import Listener, SocketChannel
from torchfleet.ps.net.wire import Role
from torchfleet.ps.worker.heter.block_runner import BlockRunner
from torchfleet.ps.worker.heter.block_server import BlockServer
from torchfleet.ps.worker.heter.blocks import blocks_of
from torchfleet.ps.worker.heter.heter_links import HeterLinks, Place
from torchfleet.ps.worker.heter.remote_block import RemoteBlocks

CPU = torch.device("cpu")
WAIT = 60.0  # seconds; what takes longer hangs, on busy cores too


class HeterThread:
    """A heter worker with the blocks of a model, in a thread."""

    def __init__(
        self, model: torch.nn.Module, endpoint: str, num_workers: int = 1, keys: KeyFolder | None = None
    ) -> None:
        self.server = BlockServer(BlockRunner(blocks_of(model), CPU), num_workers)
        self._over = threading.Event()
        self._listener = Listener(endpoint, keys)
        self.endpoint = self._listener.endpoint
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._listener.serve(self.server, lambda: self._over.is_set() or self.server.is_stopping)
        finally:
            self._listener.close()

    def wait(self) -> None:
        """Until it has ended by itself."""
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """End at once, as a killed one would: nothing more is answered."""
        if not self._over.is_set():
            self._over.set()
            self.wait()
            self.server.close()


@contextmanager
def heter_workers(make: Callable[[], torch.nn.Module], num: int, num_workers: int = 1) -> Iterator[list[HeterThread]]:
    """Over sockets in a folder: no other process can take the address of one that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        made = [HeterThread(make(), f"ipc://{folder}/{number}", num_workers) for number in range(num)]
        try:
            yield made
        finally:
            for heter in made:
                heter.close()


def links_to(
    model: torch.nn.Module, endpoints: Sequence[str], worker: int = 0, keys: KeyFolder | None = None
) -> HeterLinks:
    places = [
        Place(end, functools.partial(SocketChannel, end, keys, Role.WORKER), functools.partial(is_refused, end))
        for end in endpoints
    ]
    return HeterLinks(places, [block.spec() for block in blocks_of(model)], worker, Role.WORKER, WAIT)


@contextmanager
def remote(
    model: torch.nn.Module, endpoints: Sequence[str], worker: int = 0, keys: KeyFolder | None = None
) -> Iterator[RemoteBlocks]:
    """The blocks of the model, computed by the heter workers at these addresses."""
    made = RemoteBlocks(blocks_of(model), links_to(model, endpoints, worker, keys), worker, WAIT)
    try:
        yield made
    finally:
        made.close(is_told=True)
