"""benchmarks.chaos: its faults are what they say, its count of steps finds what is lost and doubled, and it runs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paths import ROOT

from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos.ledger import KEYS_PER_STEP, Ids, audit, keys_of
from benchmarks.chaos.machines import Machines, machines
from benchmarks.chaos.progress import Board
from benchmarks.chaos.small_disk import DiskError, small_disk
from benchmarks.links import LinkError

pytestmark = pytest.mark.xdist_group("chaos")


class TestLedger:
    @pytest.fixture
    def board(self, tmp_path: Path) -> Board:
        """Worker 0 made ten steps. Worker 1 was killed in its fifth, of which four were acknowledged, and started
        again: it made three more."""
        board = Board(tmp_path, 0)
        for restart, worker, steps, acknowledged in ((0, 0, 10, 10), (0, 1, 5, 4), (1, 1, 3, 3)):
            progress = board.begin(worker, restart)
            first = progress.begun
            for step in range(first, first + steps):
                progress.begin(step)
                if step < first + acknowledged:
                    progress.acknowledge()
            if restart or not worker:
                progress.finish()
        return board

    def test_what_was_acknowledged_must_be_there_once(self, board: Board) -> None:
        taken = rows_of((0, range(10)), (1, range(4)), (1, range(5, 8)))
        found = audit(board, lambda keys: read(taken, keys), 1.0, is_partial=False)
        assert found == {"lost": 0, "doubled": 0, "unknown_steps": 1, "steps": 18}

    def test_a_step_of_a_killed_worker_may_be_there(self, board: Board) -> None:
        taken = rows_of((0, range(10)), (1, range(8)))
        assert audit(board, lambda keys: read(taken, keys), 1.0, is_partial=False)["doubled"] == 0

    def test_lost_and_doubled_rows_are_found(self, board: Board) -> None:
        taken = rows_of((0, range(10)), (1, range(8)))
        keys = [int(keys_of(worker, step, step + 1)[0]) for worker, step in ((0, 9), (1, 6), (1, 4))]
        del taken[keys[0]]
        taken[keys[1]] = taken[keys[2]] = -2.0  # the last one is of the step whose outcome is unknown
        found = audit(board, lambda wanted: read(taken, wanted), 1.0, is_partial=False)
        assert (found["lost"], found["doubled"]) == (1, 2)


def rows_of(*steps: tuple[int, range]) -> dict[int, float]:
    return {int(key): -1.0 for worker, numbers in steps for key in keys_of(worker, numbers.start, numbers.stop)}


def read(rows: dict[int, float], keys: Ids) -> Any:
    return np.array([rows.get(int(key), 0.0) for key in keys], np.float32)


def test_the_longest_wait_between_two_steps_is_that_of_the_worst_worker(tmp_path: Path) -> None:
    board = Board(tmp_path, 0)
    for worker, ends in ((0, (100.0, 100.5, 101.0)), (1, (99.0, 100.2, 101.4, 101.5))):
        progress = board.begin(worker, 0)
        progress._numbers[3 : 3 + len(ends)] = ends
    assert board.silence(99.8) == pytest.approx(1.2)
    assert len(np.unique(keys_of(3, 10, 15))) == KEYS_PER_STEP * 5


class TestMachines:
    @pytest.fixture
    def network(self) -> Any:
        try:
            with machines(2) as made:
                yield made
        except LinkError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")

    def test_cables_are_pulled_and_lose_one_way(self, network: Machines) -> None:
        with Talker(network, 0) as one, Talker(network, 1) as other:
            assert hears(one, other, num_tries=60)  # a cable that was just plugged in
            assert hears(other, one, num_tries=60)
            network.mute(1)
            assert hears(one, other, num_tries=60)
            assert not hears(other, one)
            network.unmute(1)
            assert hears(other, one, num_tries=60)
            network.pull_cable(1)
            assert not hears(one, other)
            network.plug_in(1)
            assert hears(one, other, num_tries=60)

    @pytest.mark.usefixtures("network")  # skips where none can be made
    def test_nothing_is_left(self) -> None:
        names: list[str] = []

        def fail() -> None:
            with machines(2) as made:
                names.extend(made.namespaces)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert not any(name in listed for name in names)


class Talker:
    """A socket on a machine, made by a thread that has entered it."""

    def __init__(self, network: Machines, machine: int) -> None:
        self.address = (network.addresses[machine], 9000)
        self._pool = ThreadPoolExecutor(1, initializer=network.enter, initargs=(machine,))
        self.socket = self.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self.socket.bind(self.address)
        self.socket.settimeout(0.5)

    def call(self, what: Callable[[], Any]) -> Any:
        return self._pool.submit(what).result(60)

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._pool.shutdown()


def hears(source: Talker, target: Talker, num_tries: int = 3) -> bool:
    """Whether something that is sent now from one machine arrives at the other. Earlier messages do not count."""
    sent = set()
    for _ in range(num_tries):
        sent.add(message := os.urandom(8))
        with contextlib.suppress(OSError):
            source.socket.sendto(message, target.address)
            while target.socket.recv(10) not in sent:
                pass
            return True
    return False


def test_a_disk_is_full_and_free_again(tmp_path: Path) -> None:
    try:
        with small_disk(tmp_path / "disk") as disk:
            kept = disk.folder / "kept"
            kept.write_bytes(bytes(100_000))
            disk.fill()
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                (disk.folder / "more").write_bytes(bytes(8192))
            disk.free()
            (disk.folder / "more").write_bytes(bytes(2 << 20))
            assert kept.stat().st_size == 100_000
    except DiskError as error:
        pytest.skip(f"no disk can be made here: {error}")
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--modes", "sync,magic"], "found magic"),
        (["--faults", "disk"], "only servers with --durability log"),
        (["--faults", "link", "--servers", "1"], "--servers 2"),
        (["--kills", "3", "--faults", "stop5"], "leave --faults out"),
        (["--kills", "3", "--goodput"], "use one of them"),
    ],
)
def test_what_cannot_be_tried_is_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chaos.options(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.long
def test_a_killed_primary_loses_and_doubles_nothing() -> None:
    """Real interpreters: the benchmark finds processes by their environment."""
    flags = ["--modes", "async", "--kills", "1", "--servers", "1", "--workers", "1", "--calm", "0.5", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *flags],
        capture_output=True, text=True, cwd=ROOT, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["doubled"], found["kills"]) == (0, 0, 1)
    assert found["by_mode"]["async"]["steps"] > 50
    assert found["takeover_p99_s"] > 0
    assert found["goodput"] > 0
