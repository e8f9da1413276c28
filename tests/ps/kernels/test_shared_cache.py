"""Kernels that several processes need are compiled by one of them, and those of a job's tables before all others."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fleets import WAIT
from support.paths import ROOT

from torchfleet.ps.kernels import shared_cache
from torchfleet.ps.kernels.rows import all_finite
from torchfleet.ps.kernels.shared_cache import SharedCache

USE = """
import sys
import numpy as np
from numba.core import event
from torchfleet.ps.kernels.rows import all_finite

compiled = []

class Count(event.Listener):
    def on_start(self, found):
        compiled.append(found.data["dispatcher"])
    def on_end(self, found):
        pass

print("ready", flush=True)
sys.stdin.readline()
with event.install_listener("numba:compile", Count()):
    assert all_finite(np.ones(4, np.uint32))
print(compiled.count(all_finite))
"""

TRAIN = """
import numpy as np
from numba.core import event
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.job.warm import warm_up
from torchfleet.ps.tables.settings.rule import Rule
from torchfleet.ps.tables.settings.spec import TableSpec

compiled = []

class Count(event.Listener):
    def on_start(self, found):
        compiled.append(found.data["dispatcher"].py_func.__name__)
    def on_end(self, found):
        pass

specs = [TableSpec("wide", dim=3000, rule=Rule("adam")), TableSpec("ids", "array", dim=4, size=100_000)]
specs.append(TableSpec("block", "dense", size=1 << 20, rule=Rule("adam")))
with event.install_listener("numba:compile", Count()):
    warm_up(specs)
    print(len(compiled))
    server = Server(1 << 30)
    for spec in specs:
        server.state.add_table(spec)
    del compiled[:]
    keys = np.arange(5000, dtype=np.uint64)
    for table in server.state.tables.values():
        if not table.spec.is_dense:
            for part in (keys, keys[:7]):
                table.check_pull(part, True)
                table.pull(part, True, None)
                grads = np.ones((len(part), table.spec.dim), np.float32)
                table.check_push(part, grads, None)
                table.update(part, grads, None)
print(compiled)
"""


def environment(folder: Path) -> dict[str, str]:
    folder.mkdir(mode=0o700)
    return {**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}


def start(code: str, folder: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], env=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_kernel_that_two_processes_need_is_compiled_by_one(tmp_path: Path) -> None:
    folder = environment(tmp_path / "kernels")
    both = [start(USE, folder) for _ in range(2)]
    try:
        assert [process.stdout.readline() for process in both if process.stdout] == ["ready\n"] * 2
        for process in both:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        assert sorted(process.communicate(timeout=WAIT)[0] for process in both) == ["0\n", "1\n"]
    finally:
        for process in both:
            process.kill()


@pytest.mark.slow
@pytest.mark.long
def test_a_process_that_is_killed_while_it_compiles_keeps_no_other_waiting(tmp_path: Path) -> None:
    folder = environment(tmp_path / "kernels")
    with start(USE.replace('print("ready"', 'all_finite._cache._acquire(); print("ready"'), folder) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "ready\n"
        with start(USE, folder) as other:
            assert other.stdin
            other.stdin.write("\n")
            other.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(3)
            holder.kill()
            assert other.communicate(timeout=WAIT)[0] == "ready\n1\n"


def test_a_process_with_a_simulated_clock_waits_in_real_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock that stands still, the time to wait would not end."""
    cache = SharedCache(all_finite.py_func)
    monkeypatch.setattr(cache._impl.locator, "_cache_path", str(tmp_path))
    monkeypatch.setattr(cache, "_cache_path", str(tmp_path))
    monkeypatch.setattr(shared_cache, "_PATIENCE", 0.05)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits in virtual time"))
    with open(tmp_path / f"{cache._impl.filename_base}.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        cache._acquire()
    cache._release()


@pytest.mark.long
def test_a_job_compiles_the_kernels_of_its_tables_and_no_others_before_it_serves(tmp_path: Path) -> None:
    with start(TRAIN, environment(tmp_path / "kernels")) as process:
        found = process.communicate(timeout=WAIT)[0].split("\n")
    assert 10 < int(found[0]) < 80  # of some 114 with those that kernels call
    assert found[1] == "[]"


class TestTheRest:
    CODE = "from torchfleet.ps.server.job import warm; {}; warm.compile_all()"

    def run(self, folder: dict[str, str], change: str) -> str:
        command = [sys.executable, "-c", self.CODE.format(change)]
        return subprocess.run(command, env=folder, capture_output=True, text=True, check=True, timeout=WAIT).stdout

    @pytest.mark.slow
    def test_all_kernels_are_marked_when_they_are_there_and_one_process_makes_them(self, tmp_path: Path) -> None:
        folder = environment(tmp_path / "kernels")
        told = "print(warm.mark_of_all()); warm.warm_up = lambda: print('compiles'); warm._use_rest = lambda: None"
        mark, done = self.run(folder, told).split()
        assert done == "compiles"
        assert Path(mark).exists()
        Path(mark).unlink()
        with open(Path(mark).with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert self.run(folder, told).split() == [mark]
            assert not Path(mark).exists()

    @pytest.mark.slow
    def test_a_server_starts_it_unless_all_are_there_and_ends_it(self, tmp_path: Path) -> None:
        folder = environment(tmp_path / "kernels")
        code = """
import psutil
from torchfleet.ps.server.job import server_run, warm
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import TableSpec
server_run.warm_up = lambda specs, are_copied: None
for _ in range(2):
    run = server_run.ServerRun(Server(1 << 20), server_run.Place(0))
    run.server.state.add_table(TableSpec("t"))
    run.warm_up()
    print(len(psutil.Process().children()), end=" ")
    run.close()
    print(len(psutil.Process().children()), end=" ")
    warm.mark_of_all().parent.mkdir(parents=True, exist_ok=True)
    warm.mark_of_all().touch()
"""
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, env=folder, capture_output=True, text=True, check=True, timeout=WAIT)
        assert ended.stdout.split() == ["1", "0", "0", "0"]
