"""A primary whose loop is held up goes on to give signs of life, from a thread; one whose loop hangs does not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.fleets import MAX_TABLE_BYTES
from support.scripts.launching import SOON, wait_until

from torchfleet.ps.coordination.file_coordinator import FileCoordinator
from torchfleet.ps.net import addresses
from torchfleet.ps.net.transport import Peer
from torchfleet.ps.net.wire import Frame, Role
from torchfleet.ps.server.replicas import signs_of_life
from torchfleet.ps.server.replicas.between import Identity
from torchfleet.ps.server.replicas.liveness import Liveness
from torchfleet.ps.server.replicas.pace import SILENCE
from torchfleet.ps.server.replicas.replica import Replica
from torchfleet.ps.server.replicas.signs_of_life import SignsOfLife
from torchfleet.ps.server.server import Server


class HeldUp(Server):
    """A server that is asked for something that takes long."""

    pause = 0.0

    def work(self) -> bool | None:
        pause, self.pause = self.pause, 0.0
        time.sleep(pause)
        return super().work()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[HeldUp, FileCoordinator]]:
    """The primary's server, and who decides; both replicas serve on real sockets, each in a thread."""
    folder.chmod(0o700)
    places = [f"ipc://{folder}/{replica}" for replica in range(2)]
    coordinator, over = FileCoordinator(folder), threading.Event()
    servers = [HeldUp(MAX_TABLE_BYTES) for _ in places]
    threads = []
    for number, (place, server) in enumerate(zip(places, servers, strict=True)):
        listener = addresses.listen(place)
        own = Identity(0, number, 0, 1000 + number)
        connect = lambda replica: addresses.connect(places[replica], None, Role.SERVER)  # noqa: E731
        made = Replica(server, own, coordinator, connect, liveness=Liveness(has_thread=True))
        made.begin()

        def serve(listener: object = listener, made: Replica = made) -> None:
            listener.serve(made, over.is_set)  # type: ignore[attr-defined]
            made.end()
            listener.close()  # type: ignore[attr-defined]

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
    try:
        yield servers[0], coordinator
    finally:
        over.set()
        for thread in threads:
            thread.join(SOON)


def stays_primary(folder: Path) -> bool:
    """Whether it is primary still when its loop has been held up for several times SILENCE."""
    folder.mkdir()
    with served(folder) as (server, coordinator):
        wait_until(lambda: bool((view := coordinator.read(0)) and view.backup), SOON, "backup")
        before = coordinator.read(0)
        server.pause = 4 * SILENCE
        wait_until(lambda: not server.pause, SOON, "long request")
        time.sleep(4 * SILENCE)
        return coordinator.read(0) == before


@pytest.mark.slow
def test_a_primary_whose_loop_is_held_up_stays_primary(tmp_path: Path) -> None:
    """A machine may keep the thread from a core for longer than SILENCE, but not four times; without the thread the
    primary is replaced each time."""
    assert any(stays_primary(tmp_path / str(number)) for number in range(4))


class Counting:
    """A channel that counts what is sent."""

    num = 0

    def send(self, frames: Sequence[Frame]) -> bool:
        self.num += 1
        return True

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        time.sleep(min(timeout, 0.01))
        return None

    def reconnect(self) -> None: ...

    def close(self) -> None: ...

    def now(self) -> float:
        return time.monotonic()

    def wakes(self) -> tuple[Peer, ...]:
        return ()


def is_silent(channel: Counting) -> bool:
    before = channel.num
    time.sleep(0.2)
    return channel.num == before


def test_nothing_is_said_for_a_loop_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_of_life, "BEAT", 0.01)
    monkeypatch.setattr(signs_of_life, "GIVE_UP", 0.3)
    channel = Counting()
    signs = SignsOfLife(lambda: channel, lambda now: [b""], 0, 1, time.monotonic())
    try:
        wait_until(lambda: signs.turn(time.monotonic()) or channel.num > 3, SOON, "signs of life")
        wait_until(lambda: is_silent(channel), SOON, "silence")
        before = channel.num
        wait_until(lambda: signs.turn(time.monotonic()) or channel.num > before, SOON, "signs of life again")
    finally:
        signs.close(wait=True)
