"""What compile_all compiles: it leaves nothing to compile to schedules in virtual time, to logs, copies and lookups."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.paths import ROOT, TESTS

# Kernels from the cache on disk are loaded, not compiled: so the test counts the versions that a process has used.
USE = """
import importlib, pkgutil
import numpy as np
import torch
import torchfleet.ps.kernels
from support.faults.schedules import Plan, run
from torchfleet.ps.server import warm
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
