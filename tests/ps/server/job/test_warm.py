"""What compile_all compiles: it leaves nothing to compile to schedules in virtual time, to logs, copies and lookups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT, TESTS

from torchfleet.ps.server.job import warm
from torchfleet.ps.tables.settings.spec import TableSpec

# Kernels from the cache on disk are loaded, not compiled: so the test counts the versions that a process has used.
USE = """
import importlib, pkgutil
import numpy as np
import torch
import torchfleet.ps.kernels
from support.faults.schedules import Plan, run
from torchfleet.ps.server.job import warm
from torchfleet.ps.worker.batch.bags import Bags, split_slots
from torchfleet.ps.worker.lookup.batch_rows import BatchRows, merged
from torchfleet.ps.worker.lookup.row_functions import Lookup, pooled

def used():
    modules = [importlib.import_module(f"torchfleet.ps.kernels.{m.name}")
               for m in pkgutil.iter_modules(torchfleet.ps.kernels.__path__)]
    return {(kernel.py_func.__name__, str(signature))
            for module in modules for kernel in vars(module).values() if hasattr(kernel, "signatures")
            for signature in kernel.signatures if type(kernel._cache).__name__ == "SharedCache"}

def look_up():
    keys, weight = np.array([1, 2, 1, 3], np.uint64), torch.ones(1, requires_grad=True)
    rows = BatchRows(2, lambda rows: None)
    rows.expect(keys, None)
    rows.append(np.array([5], np.uint64), np.ones((1, 2), np.float32), [0.0])
    rows.values = np.ones((len(rows.keys), 2), np.float32)
    index, missing = rows.find(keys[:2])
    total = Lookup.apply(weight, rows, index).sum()
    for pooling, by_freq in (("sum", False), ("mean", False), ("max", False), ("sum", True)):
        _, bags = split_slots([torch.tensor([[1, 2], [1, 3]])], pooling)
        bags = Bags(bags.offsets, bags.num_slots, pooling, None, by_freq)
        total = total + pooled(weight, rows, rows.expected_index, bags).sum()
    total.backward()
    merged([rows, rows])

warm.warm_up()
warm._use_rest()
before = used()
for seed, script, fleet in ((1, "tokens", "logged"), (0, "policies", "logged"), (0, "geo", "replicas")):
    run(Plan.of(seed, script, fleet))
look_up()
print(len(before), *sorted(used() - before), sep="\\n")
"""


@pytest.mark.slow
def test_nothing_is_left_to_compile() -> None:
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    command = [sys.executable, "-c", USE]
    ended = subprocess.run(command, env=own, capture_output=True, text=True, timeout=600, check=False)
    assert not ended.returncode, ended.stderr
    num, *late = ended.stdout.splitlines()
    assert int(num) > 100
    assert late == []


def test_one_server_of_a_machine_starts_the_process_that_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one does when that process has ended without a mark."""
    start = subprocess.Popen
    monkeypatch.setattr(warm, "mark_of_all", lambda: tmp_path / "cache" / "all.mark")
    monkeypatch.setattr(warm, "is_temporary", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", lambda command, pass_fds, **_: start(["sleep", "60"], pass_fds=pass_fds))
    for _ in range(2):
        compiling = warm.warm_up_rest()
        assert compiling is not None
        try:
            assert warm.warm_up_rest() is None
        finally:
            compiling.kill()
            compiling.wait()
    (tmp_path / "cache" / "all.mark").touch()
    assert warm.warm_up_rest() is None


def test_a_server_that_has_all_kernels_uses_none_for_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []
    monkeypatch.setattr(warm, "train", used.append)
    monkeypatch.setattr(warm, "_loaded", [])
    warm.warm_up([TableSpec("t", dim=2)])
    assert len(used) == 1
    monkeypatch.setattr(warm, "_loaded", [True])
    warm.warm_up([TableSpec("t", dim=2)])
    assert len(used) == 1


def test_a_process_says_once_that_it_compiles_for_long() -> None:
    """Kernels of numba, kept nowhere: each is compiled. The first is done before the time is over."""
    code = """
import time, numba
from torchfleet.ps.kernels import compiling
compiling.tell_of_compilation(after=0.5)
numba.njit(lambda x: x + 1)(1)
time.sleep(0.6)
for number in range(3):
    numba.njit(lambda x, n=number: x * n)(2)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    (line,) = ended.stderr.splitlines()
    assert "fleet compile" in line


@pytest.mark.slow
def test_fleet_compile_says_where_kernels_are_and_refuses_what_is_not_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchfleet.observe.commands", "compile"]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=280, check=True) for _ in "12")
    assert first.stdout == second.stdout
    assert str(warm.mark_of_all().parent) in second.stdout
    assert warm.mark_of_all().exists()
    # A temporary folder cannot be made the cache from outside as root: the state of the process is set.
    code = (
        "import numba; from torchfleet.ps.kernels import jit; numba.config.CACHE_DIR = '/tmp/torchfleet-kernels-x'; "
        "from torchfleet.observe.commands.command import main; raise SystemExit(main(['compile']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1
    assert "NUMBA_CACHE_DIR" in ended.stderr
