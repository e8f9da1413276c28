"""Memory of rows, and how much of it a growing table takes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import platform
import subprocess
import sys

import numpy as np
import psutil
import pytest

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.rows import memory
from torchfleet.ps.tables.rows.memory import HUGE_PAGE, Memory, physical_bytes
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read as on Linux")


def resident_bytes() -> int:
    """Without what earlier tests of this process have left: garbage, and freed memory that the allocator keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


@on_linux
def test_memory_is_reserved_at_once_and_filled_when_touched():
    before = resident_bytes()
    words = Memory(64 << 30).array(np.float32)
    assert len(words) == 16 << 30
    assert resident_bytes() - before < 8 << 20
    assert not words[:: 1 << 28].any()  # zeros, wherever it is read
    words[: 8 << 20] = 1
    assert 28 << 20 < resident_bytes() - before < 48 << 20


def test_an_array_keeps_its_memory_alive():
    words = Memory(1 << 20).array(np.uint32)
    words[:] = 7
    assert (words == 7).all()


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097])
def test_memory_is_at_least_what_was_asked_for(num_bytes):
    part = Memory(num_bytes)
    assert part.array(np.uint8).size >= num_bytes
    assert part.held_bytes == part.array(np.uint8).size


@on_linux
def test_released_pages_go_back_to_the_system_and_read_as_zeros():
    part = Memory(16 * HUGE_PAGE)
    octets = part.array(np.uint8)
    octets[:] = 1
    before = resident_bytes()
    part.release_up_to(10 * HUGE_PAGE + 5)
    assert before - resident_bytes() > 9 * HUGE_PAGE
    assert part.held_bytes == 6 * HUGE_PAGE
    assert not octets[: 10 * HUGE_PAGE].any()
    assert octets[10 * HUGE_PAGE :].all()
    part.release_up_to(3 * HUGE_PAGE)  # nothing left to do
    assert part.held_bytes == 6 * HUGE_PAGE


def test_a_reservation_that_the_system_refuses_is_a_table_error_that_says_what_to_do():
    with pytest.raises(TableError, match="max_table_bytes"):
        Memory(1 << 62)
    with pytest.raises(TableError, match="max_table_bytes"):
        Memory(1 << 70)


def test_a_kernel_without_huge_pages_is_no_error(monkeypatch):
    """Linux without CONFIG_TRANSPARENT_HUGEPAGE answers the advice with EINVAL; it is only advice."""

    class Refusing(mmap.mmap):
        def madvise(self, *arguments):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Refusing)
    assert Memory(8 * HUGE_PAGE).array(np.uint8).size == 8 * HUGE_PAGE


def test_the_machines_memory_is_that_of_the_system():
    assert physical_bytes() == pytest.approx(psutil.virtual_memory().total, rel=0.01)


def grow(num_rows: int, step: int):
    """A table of dim 8 with Adagrad, so rows of 8 + 64 bytes, in training; yields it at each `step` new rows."""
    rule, first = Rule("adagrad"), Initializer("uniform", -0.01, 0.01)
    table = SparseTable(TableSpec("t", dim=8, rule=rule, initializer=first), 1 << 32)
    for start in range(0, num_rows, step):
        keys = np.arange(start, start + step, dtype=np.uint64)
        table.pull(keys)
        table.push(keys, np.zeros((step, 8), np.float32))
        yield table


def test_a_growing_table_takes_at_most_a_quarter_more_than_its_rows():
    """At every thousandth row between 200,000 and a million, growth under way or not."""
    worst = (0.0, 0)
    for table in grow(1_000_000, 1000):
        stats = table.stats()
        if stats["rows"] >= 200_000:
            worst = max(worst, (stats["bytes"] / (stats["rows"] * (8 + 64)), stats["rows"]))
    assert table.stats()["rows"] == 1_000_000
    assert worst[0] <= 1.25, f"{worst[0]:.3f} times its payload at {worst[1]:,} rows"


@on_linux
def test_the_bytes_that_a_table_reports_are_those_that_the_process_gained():
    """Within 5 percent and the rounding to huge pages of its rows, its old and its new slots; growing or not."""
    for _ in grow(20_000, 20_000):
        pass  # load the kernels
    before = resident_bytes()
    for table in grow(1_000_000, 10_000):
        gained, reported = resident_bytes() - before, table.stats()["bytes"]
        assert gained == pytest.approx(reported, rel=0.05, abs=4 * HUGE_PAGE), table.stats()["rows"]


FREE_AND_TAKE_AGAIN = """
import mmap, resource
import numpy as np
from torchfleet.ps.tables.rows.memory import keep_freed_memory

def take_and_free():
    for buffer in [np.empty(1 << 18, np.float32) for _ in range(8)]:
        buffer[:] = 1

def num_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
take_and_free()
before = num_faults()
for _ in range(20):
    take_and_free()
faults, pages = num_faults() - before, 20 * (8 << 20) / mmap.PAGESIZE
assert faults < 0.1 * pages, f"{faults} page faults for {pages} pages that had been freed"
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_buffers_of_messages_do_not_come_back_page_by_page():
    """In a process of its own, as the setting is one of the process."""
    command = [sys.executable, "-c", FREE_AND_TAKE_AGAIN]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
